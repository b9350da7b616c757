"""CTC prefix scores (Watanabe et al. 2017): how probable it is that the text begins with these tokens.

    p(h …) = p(h, and nothing more) + Σ_c p(h c …)

What may follow a prefix, one token more or the end, is a distribution over the same outputs as the decoder's; output 0,
the blank, stands for the end. For every frame a prefix carries the log-probability of all alignments up to there that
spell it, those that end in its last token apart from those that end in a blank. The recursion over frames is linear,
and so a cumulative sum in logarithms; scores of all tokens at once are a matrix product.

Shapes: U utterances, K prefixes of each, T frames, T+1 with the moment before the first, V outputs (the blank first).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sottovoce.models.ctc import BLANK

# The logarithm of what counts as impossible. Infinite, it would make differences of cumulative sums undefined; at this
# size, float64 still keeps sums over an hour of frames to nine digits behind the point.
IMPOSSIBLE = -1e3


class Frames(NamedTuple):
    """What CTC says of each frame, in float64; behind an utterance's end (`over`), a certain blank."""

    log_probs_UTV: Tensor
    probs_UTV: Tensor
    over_UT: Tensor

    def take(self, utterances: Tensor) -> "Frames":
        return Frames(*(tensor[utterances] for tensor in self))


class Prefixes(NamedTuple):
    """Texts that have begun: alignments that end in their last token or in a blank, by frame, and that last token."""

    in_token_UKT: Tensor  # both of these with T+1 moments
    in_blank_UKT: Tensor
    scores_UK: Tensor  # log p(h …)
    last_UK: Tensor  # the blank before the first token

    def take(self, utterances: Tensor) -> "Prefixes":
        return Prefixes(*(tensor[utterances] for tensor in self))


def begin_prefixes(log_probs_UTV: Tensor, lengths_U: Tensor, *, prefixes: int) -> tuple[Frames, Prefixes]:
    """Frames of utterances, and as many empty prefixes of each."""
    utterances, frames, _ = log_probs_UTV.shape
    log_probs_UTV = log_probs_UTV.double().clamp(min=IMPOSSIBLE)
    over_UT = torch.arange(frames, device=log_probs_UTV.device) >= lengths_U.to(log_probs_UTV.device)[:, None]
    log_probs_UTV = log_probs_UTV.masked_fill(over_UT[..., None], IMPOSSIBLE)
    log_probs_UTV[..., BLANK] = log_probs_UTV[..., BLANK].masked_fill(over_UT, 0.0)
    blanks_UT = torch.nn.functional.pad(log_probs_UTV[..., BLANK].cumsum(dim=1), (1, 0))
    in_blank_UKT = blanks_UT[:, None].expand(utterances, prefixes, frames + 1)
    scores_UK = blanks_UT.new_zeros(utterances, prefixes)
    return Frames(log_probs_UTV, log_probs_UTV.exp(), over_UT), Prefixes(
        torch.full_like(in_blank_UKT, -torch.inf), in_blank_UKT, scores_UK, scores_UK.long()
    )


def score_following(frames: Frames, prefixes: Prefixes) -> Tensor:
    """log p(c … | h …) of every next token c, and of the end in the blank's place: [U, K, V], at least `IMPOSSIBLE`.

    A token's alignments begin in a frame right after those of the prefix; an equal token needs a blank between.
    """
    before_UKT = _before(prefixes)
    highest_UK1 = before_UKT.amax(dim=-1, keepdim=True).clamp(min=10 * IMPOSSIBLE)
    sums_UKV = (before_UKT - highest_UK1).exp() @ frames.probs_UTV
    scores_UKV = sums_UKV.log() + highest_UK1
    last_UKT = _spoken(frames, prefixes.last_UK)
    # Nothing follows behind the end, not even impossible tokens: a score must not depend on padding.
    repeated_UKT = (prefixes.in_blank_UKT[..., :-1] + last_UKT).masked_fill(frames.over_UT[:, None], -torch.inf)
    repeated_UK = repeated_UKT.logsumexp(dim=-1)
    scores_UKV.scatter_(-1, prefixes.last_UK[..., None], repeated_UK[..., None])
    ended_UK = torch.logaddexp(prefixes.in_token_UKT[..., -1], prefixes.in_blank_UKT[..., -1])
    scores_UKV[..., BLANK] = ended_UK  # after the line above: an empty prefix's last token is the blank
    return (scores_UKV - prefixes.scores_UK[..., None]).nan_to_num(nan=IMPOSSIBLE).clamp(IMPOSSIBLE, 0.0)


def extend_prefixes(
    frames: Frames, prefixes: Prefixes, following_UKV: Tensor, parents_UK: Tensor, tokens_UK: Tensor
) -> Prefixes:
    """Prefix `parents_UK` of each utterance with one token more; what ends (with the blank) may become anything."""
    moments = prefixes.in_token_UKT.shape[-1]
    index_UKT = parents_UK[..., None].expand(*parents_UK.shape, moments)
    parents = Prefixes(
        prefixes.in_token_UKT.gather(1, index_UKT),
        prefixes.in_blank_UKT.gather(1, index_UKT),
        prefixes.scores_UK.gather(1, parents_UK),
        prefixes.last_UK.gather(1, parents_UK),
    )
    repeats_UK1 = (parents.last_UK == tokens_UK)[..., None]
    entering_UKT = torch.where(repeats_UK1, parents.in_blank_UKT[..., :-1], _before(parents))
    in_token_UKT = _carried(entering_UKT, _spoken(frames, tokens_UK))
    in_token_UKT[..., 1:].masked_fill_(frames.over_UT[:, None], -torch.inf)
    blanks_UKT = frames.log_probs_UTV[..., BLANK][:, None].expand_as(entering_UKT)
    in_blank_UKT = _carried(in_token_UKT[..., :-1], blanks_UKT)
    flat = parents_UK * following_UKV.shape[-1] + tokens_UK
    scores_UK = parents.scores_UK + following_UKV.flatten(1).gather(1, flat)
    return Prefixes(in_token_UKT, in_blank_UKT, scores_UK, tokens_UK)


def _before(prefixes: Prefixes) -> Tensor:
    """All alignments of each prefix that end just before each frame."""
    return torch.logaddexp(prefixes.in_token_UKT[..., :-1], prefixes.in_blank_UKT[..., :-1])


def _spoken(frames: Frames, tokens_UK: Tensor) -> Tensor:
    """Log-probabilities of one token for each prefix, by frame: [U, K, T]."""
    count = frames.log_probs_UTV.shape[1]
    return frames.log_probs_UTV.gather(2, tokens_UK[:, None].expand(-1, count, -1)).mT


def _carried(entering_UKT: Tensor, log_probs_UKT: Tensor) -> Tensor:
    """r(t) = (r(t−1) + entering(t)) · p(t) from r(0) = 0, in logarithms, with the moment 0 before.

    With P(t) = p(1) … p(t) that is r(t) = P(t) · Σ_{s ≤ t} entering(s) / P(s−1).
    """
    products_UKT = log_probs_UKT.cumsum(dim=-1)
    earlier_UKT = products_UKT - log_probs_UKT
    carried_UKT = products_UKT + torch.logcumsumexp(entering_UKT - earlier_UKT, dim=-1)
    return torch.nn.functional.pad(carried_UKT, (1, 0), value=-torch.inf)
