"""How well what comes next is told from what is said elsewhere in the same utterance (Ramesh et al. 2023, App. A.1).

    z_t  step t as the dense layers hear it        c_t  the same with all before it, by the LSTMs

    loss = Σ_k −1/(T−k) Σ_t log softmax of z_{t+k}ᵀ(W_k c_t + b_k)/κ over z_{t+k} and N−1 other steps of the utterance

Rows go by the step that is predicted, s = t + k: its rivals are drawn once and are the same for every distance k. All
scores against all steps are computed, of which a row takes its N: to gather so many vectors z would move N·D/K times as
much as T, 5,461 steps or 164 s in the paper's size.

Shapes: U utterances, K distances, T steps of the longest, S = T the steps to be predicted, D width of z, C of c,
N candidates, R = N - 1 rivals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PLACE_BITS = 31  # of a draw, which stands for a place among an utterance's other steps


class Contrast(NamedTuple):
    """Of each utterance: its loss, and how often the true step has the highest score, the mean over distances."""

    loss_U: Tensor
    accuracy_U: Tensor


def draw_places(utterances: int, steps: int, rivals: int, *, generator: torch.Generator) -> Tensor:
    """What chance decides: a place in [0, 1) for each rival of each step, as integers of `PLACE_BITS` bits."""
    shape = (utterances, steps, rivals)
    return torch.randint(2**PLACE_BITS - 1, shape, dtype=torch.int32, generator=generator)


def even_places(rivals: int) -> Tensor:
    """Places without chance: evenly spread, the same for every step of every utterance."""
    return ((2 * torch.arange(rivals) + 1) * 2 ** (PLACE_BITS - 1) // rivals).to(torch.int32)[None, None]


def rival_steps(places_USR: Tensor, lengths_U: Tensor, steps: int) -> Tensor:
    """The steps that stand against each step: any other of the same utterance, all equally likely, [U, S, R].

    Behind an utterance's end, where nothing is predicted, they are some of its own steps.
    """
    lengths_U11 = lengths_U[:, None, None]
    others_U11 = (lengths_U11 - 1).clamp(min=0)
    onwards_USR = 1 + (places_USR.long() * others_U11 >> PLACE_BITS)
    true_S1 = torch.arange(steps, device=places_USR.device)[:, None]
    return (true_S1 + onwards_USR) % lengths_U11.clamp(min=1)


def contrast(
    z_UTD: Tensor,
    c_UTC: Tensor,
    predictors: Sequence[tuple[Tensor, Tensor]],
    *,
    lengths_U: Tensor,
    rivals_USR: Tensor,
    scale: float,
) -> Contrast:
    """All arguments are on one device; an utterance without a step to predict has neither loss nor right answers."""
    utterances, steps, _ = z_UTD.shape
    distances = len(predictors)
    # c_{s-k} in row s; where there is none, a row of zeros that does not count.
    told = [
        F.linear(F.pad(c_UTC, (0, 0, k, 0))[:, :steps], *predictor) for k, predictor in enumerate(predictors, start=1)
    ]
    told_UXD = torch.stack(told, dim=1).flatten(1, 2)
    scores_UKST = torch.bmm(told_UXD, z_UTD.mT).view(utterances, distances, steps, steps)
    true_UKS1 = scores_UKST.diagonal(dim1=2, dim2=3)[..., None]
    against_UKSR = scores_UKST.gather(3, rivals_USR[:, None].expand(-1, distances, -1, -1))
    precision = torch.promote_types(scores_UKST.dtype, torch.float32)
    scores_UKSN = torch.cat([true_UKS1, against_UKSR], dim=-1).to(precision) * scale
    lost_UKS = scores_UKSN.logsumexp(dim=-1) - scores_UKSN[..., 0]
    with torch.no_grad():
        right_UKS = (scores_UKSN[..., :1] > scores_UKSN[..., 1:]).all(dim=-1)
    share_UKS = _shares(lengths_U, distances, steps, dtype=precision)
    return Contrast(
        torch.where(share_UKS > 0, lost_UKS * share_UKS, 0.0).sum(dim=(1, 2)),
        (right_UKS * share_UKS).sum(dim=(1, 2)) / distances,
    )


def _shares(lengths_U: Tensor, distances: int, steps: int, *, dtype: torch.dtype) -> Tensor:
    """1/(T−k) where step s can be predicted from k before it, else 0: [U, K, S]."""
    s_S = torch.arange(steps, device=lengths_U.device)
    k_K1 = torch.arange(1, distances + 1, device=lengths_U.device)[:, None]
    lengths_U11 = lengths_U[:, None, None]
    counts_UKS = (s_S >= k_K1) & (s_S < lengths_U11)
    return counts_UKS / (lengths_U11 - k_K1).clamp(min=1).to(dtype)
