"""Connectionist temporal classification: the loss, which texts can fit, and where in time a text was spoken.

Shapes: B utterances, T frames, U tokens of a text, V outputs (the blank, then the tokens), S = 2U+1 states of the
alignment graph.

An alignment gives each frame a token or the blank; merging repeats and then removing blanks must leave the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.flat.kernels import triton_kernels
from sottovoce.models.gathering import gather

# Token sets number their tokens from 1, so that the model's output 0 is free for it.
BLANK = 0


def required_frames(tokens: Sequence[int]) -> int:
    """The fewest frames that can spell `tokens`: one each, and a blank between equal neighbours.

    >>> required_frames([8, 5, 12, 12, 15])
    6
    """
    return len(tokens) + sum(a == b for a, b in pairwise(tokens))


def text_obstacle(tokens: Sequence[int], *, frames: int) -> str | None:
    """Why no loss can be computed for `tokens` in so many `frames`; None where one can."""
    return "text too long for its audio" if required_frames(tokens) > frames else None


def log_softmax(scores: Tensor) -> Tensor:
    """Log-probabilities over the last axis, in float32 at least."""
    return scores.log_softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def has_alignment(lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor) -> Tensor:
    """Which utterances have a text and frames enough for it (`required_frames`, batched, on any one device)."""
    places_U = torch.arange(1, tokens_BU.shape[1], device=tokens_BU.device)
    repeats_BU = (tokens_BU[:, 1:] == tokens_BU[:, :-1]) & (places_U < token_lengths_B[:, None])
    return (token_lengths_B > 0) & (token_lengths_B + repeats_BU.sum(dim=1) <= lengths_B)


def ctc_losses(log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor) -> Tensor:
    """-log p(text | speech) of each utterance, summed over its alignments, not divided by any length: [B].

    An utterance without an alignment has zero loss and zero gradient; who builds batches leaves it out and counts it.
    On a CUDA device with Triton the gradient is the same bits every time, and nothing waits for the device.
    """
    kernels = _kernels(log_probs_BTV, tokens_BU)
    if kernels is not None:
        return kernels.losses(log_probs_BTV, lengths_B, tokens_BU, token_lengths_B)  # type: ignore[no-any-return]
    return F.ctc_loss(
        log_probs_BTV.transpose(0, 1),
        tokens_BU.to(log_probs_BTV.device, non_blocking=True),
        lengths_B,
        token_lengths_B,
        blank=BLANK,
        reduction="none",
        zero_infinity=True,
    )


def mean_ctc_loss(log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor) -> Tensor:
    """The mean of `ctc_losses` over the utterances that have an alignment (the paper's normalisation); 0 where none
    has.

    With both lengths on the host nothing here waits for the device.
    """
    counted_B, losses_B = _counted_losses(log_probs_BTV, lengths_B, tokens_BU, token_lengths_B)
    return torch.where(counted_B, losses_B, 0).sum() / counted_B.sum().clamp(min=1)


def mean_ctc_loss_by_token(
    log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor
) -> Tensor:
    """`mean_ctc_loss` with each utterance's own divided by its tokens: what torch calls its mean."""
    counted_B, losses_B = _counted_losses(log_probs_BTV, lengths_B, tokens_BU, token_lengths_B)
    tokens_B = token_lengths_B.to(losses_B.device, non_blocking=True).clamp(min=1)
    return torch.where(counted_B, losses_B / tokens_B, 0).sum() / counted_B.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class ClientPlaces:
    """Which utterances are a client's: where each of N clients has its own among all of them, and the way back.

    `lines_NW` has -1 behind the utterances of a client that has fewer than W; `places_U1` says where in it, flattened,
    an utterance is, and -1 for one that is nobody's.
    """

    lines_NW: Tensor
    places_U1: Tensor

    def to(self, device: torch.device) -> "ClientPlaces":
        return ClientPlaces(self.lines_NW.to(device, non_blocking=True), self.places_U1.to(device, non_blocking=True))


def find_places(
    rows_U: Sequence[int], *, rows: int, utterances: int | None = None, width_multiple: int = 1
) -> ClientPlaces:
    """The places of N `rows`, where utterance i belongs to row `rows_U[i]`; those from there to `utterances` to nobody.

    >>> find_places([1, 0, 1], rows=2).lines_NW.tolist()
    [[1, -1], [0, 2]]
    """
    row_of = np.asarray(rows_U, dtype=np.int64)
    counts = np.bincount(row_of, minlength=rows)
    order = np.argsort(row_of, kind="stable")
    within = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of[order]]
    width = -(-int(counts.max(initial=0)) // width_multiple) * width_multiple
    places = np.full(len(row_of) if utterances is None else utterances, -1, dtype=np.int64)
    places[order] = row_of[order] * width + within
    lines = np.full(rows * width, -1, dtype=np.int64)
    lines[places[order]] = order
    return ClientPlaces(torch.from_numpy(lines).view(rows, width), torch.from_numpy(places)[:, None])


def mean_ctc_losses_by_client(
    log_probs_BTV: Tensor,
    lengths_B: Tensor,
    tokens_BU: Tensor,
    token_lengths_B: Tensor,
    *,
    places: ClientPlaces,
    by_token: bool = False,
) -> Tensor:
    """`mean_ctc_loss` of each of N clients, [N].

    `by_token`: the same of `mean_ctc_loss_by_token`. With all on the device, nothing here waits for it.
    """
    counted_B, losses_B = _counted_losses(log_probs_BTV, lengths_B, tokens_BU, token_lengths_B)
    if by_token:
        losses_B = losses_B / token_lengths_B.to(losses_B.device, non_blocking=True).clamp(min=1)
    places = places.to(losses_B.device)
    own_NW, there_NW = (
        gather(values_B[:, None], places.lines_NW, places.places_U1)
        for values_B in (torch.where(counted_B, losses_B, 0), counted_B.to(losses_B.dtype))
    )
    return own_NW.sum(dim=1) / there_NW.sum(dim=1).clamp(min=1)


def _counted_losses(
    log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Which utterances count, and the loss of each, both on the device."""
    texts = (lengths_B, tokens_BU, token_lengths_B)
    on_device = [tensor.to(log_probs_BTV.device, non_blocking=True) for tensor in texts]
    # Torch's own loss wants the lengths where they are.
    losses_B = ctc_losses(log_probs_BTV, *(on_device if _kernels(log_probs_BTV, tokens_BU) is not None else texts))
    return has_alignment(*on_device), losses_B


def _kernels(log_probs_BTV: Tensor, tokens_BU: Tensor) -> ModuleType | None:
    kernels = triton_kernels("sottovoce.models.ctc_triton") if log_probs_BTV.is_cuda else None
    return kernels if kernels is not None and kernels.takes_batch(log_probs_BTV, tokens_BU) else None


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Frames [start, end) in which the best alignment emits one token of the text."""

    token: int
    start: int
    end: int


def align_tokens(log_probs_TV: Tensor, tokens: Sequence[int]) -> list[TokenSpan]:
    """The most probable alignment of one utterance with its text, as one span per token (Viterbi).

    >>> log_probs = torch.log(torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]]))
    >>> align_tokens(log_probs, [1])
    [TokenSpan(token=1, start=0, end=2)]
    """
    frames = len(log_probs_TV)
    if (needed := required_frames(tokens)) > frames:
        raise InputError(f"alignment: frames={frames}, expected at least {needed} for a text of {len(tokens)} tokens")
    if not tokens:
        return []
    states_S = np.full(2 * len(tokens) + 1, BLANK)
    states_S[1::2] = tokens
    path_T = _best_path(log_probs_TV[:, torch.as_tensor(states_S)].double().cpu().numpy(), states_S)
    token_states = 2 * np.arange(len(tokens)) + 1
    starts, ends = np.searchsorted(path_T, token_states), np.searchsorted(path_T, token_states, side="right")
    return [TokenSpan(int(t), int(s), int(e)) for t, s, e in zip(tokens, starts, ends, strict=True)]


def _best_path(scores_TS: NDArray[np.float64], states_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """The best sequence of states: stay, go to the next, or skip a blank between two different tokens."""
    frames, size = scores_TS.shape
    may_skip_S = np.zeros(size, dtype=bool)
    may_skip_S[3::2] = states_S[3::2] != states_S[1:-2:2]
    best_S = np.full(size, -np.inf)
    best_S[:2] = scores_TS[0, :2]
    steps_TS = np.zeros((frames, size), dtype=np.int8)
    arrivals = np.full((3, size), -np.inf)  # by staying, by one step, by two
    for frame in range(1, frames):
        arrivals[0] = best_S
        arrivals[1, 1:] = best_S[:-1]
        arrivals[2, 2:] = np.where(may_skip_S[2:], best_S[:-2], -np.inf)
        steps_TS[frame] = arrivals.argmax(axis=0)
        best_S = arrivals.max(axis=0) + scores_TS[frame]
    path_T = np.empty(frames, dtype=np.int64)
    path_T[-1] = size - 1 if best_S[-1] >= best_S[-2] else size - 2
    for frame in range(frames - 1, 0, -1):
        path_T[frame - 1] = path_T[frame] - steps_TS[frame, path_T[frame]]
    return path_T


@dataclass(frozen=True, slots=True)
class AlignedWord:
    """A word and the frames [start, end) in which its tokens are spoken."""

    text: str
    start: int
    end: int


def join_words(
    spans: Sequence[TokenSpan],
    pieces: Sequence[str],
    *,
    spell: Callable[[str, Sequence[int]], str] = lambda text, _: text,
) -> list[AlignedWord]:
    """Join aligned tokens to words. `pieces[i]` is the text of output i; one that begins with a space opens a word.

    That covers characters, where the space is a token of its own, and sentence pieces, where it is a prefix. `spell`
    says how a word is written that consists of these pieces, and of tokens with these numbers.

    >>> spans = [TokenSpan(1, 0, 2), TokenSpan(2, 4, 5), TokenSpan(3, 6, 7), TokenSpan(2, 8, 9)]
    >>> join_words(spans, ["", "a", "b", " "])
    [AlignedWord(text='ab', start=0, end=5), AlignedWord(text='b', start=8, end=9)]
    """
    found: list[list[TokenSpan]] = []
    opens = True
    for span in spans:
        piece = pieces[span.token]
        opens = opens or piece.startswith(" ")
        if not piece.removeprefix(" "):
            continue
        if opens:
            found.append([])
        found[-1].append(span)
        opens = False
    words = (("".join(pieces[span.token] for span in word).removeprefix(" "), word) for word in found)
    return [
        AlignedWord(spell(text, [span.token for span in word]), word[0].start, word[-1].end) for text, word in words
    ]
