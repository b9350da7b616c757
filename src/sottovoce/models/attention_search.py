"""Beam search with an attention decoder, alone or with CTC prefix scores: all hypotheses of all utterances at once.

    memory ─► start ─► state ─┬─► step ─► log-probabilities of every next token, attention
                              └── the best continuations ◄──┘       until nothing can become better

Output 0 begins and ends every text (and is CTC's blank). A hypothesis scores, for each of its tokens,

    (1 − ctc_weight) · log p(token | attention, temperature) + ctc_weight · log p(token | CTC prefix)

divided by their number where scores are normalised. The first slot follows the best token of every step, so that no
search ends with less than greedy search (width 1) under the same settings.

Shapes: U utterances, K hypotheses of each (slots), B = U·K rows, T frames, D features, V outputs, N results, S steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import ctc_prefix
from sottovoce.models.decoding import MOST_WIDTH, Hypothesis

END = 0
# A jump of the attention costs so much: more than any text does, yet not so much that float32 forgets the rest.
JUMP_COST = 1e4
# Steps between two questions of the host, which would make a GPU wait for each.
STEPS_A_QUESTION = {"cuda": 8}


@dataclass(frozen=True, kw_only=True)
class AttentionDecoder:
    """A decoder as two functions, its parameters and settings filled in.

    `start(memory_BTD, lengths_B)` gives the state before the first token: a NamedTuple of tensors with a row each.
    `step(memory_BTD, lengths_B, tokens_B, state)` gives log-probabilities [B, V], the next state, and its attention [B,
    T]. A tensor of the state that a step returns as the same object is its utterance's (projected keys, say).
    """

    start: Callable[[Tensor, Tensor], Any]
    step: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any, Tensor]]


MOST_FRAMES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search; by default as Gao et al. (2022) released it, on SpeechBrain's defaults.

    Args:
        width: hypotheses kept after each step.
        temperature: divides the decoder's logits; above 1 it is less sure of itself.
        end_threshold: a text may end only where log p(end) ≥ `end_threshold` · log p(best other token).
        longest_shift: an attention whose peak moves by more frames than this at once costs `JUMP_COST`.
        shortest, longest: tokens of a text (its end counted) per frame of the utterance.
        ctc_weight: between 0, the decoder alone, and 1, CTC alone.
        normalised: scores are divided by the number of tokens, the end counted.
        results: hypotheses returned of each utterance, the best first.
        language_model: log10 p(tokens) of a whole text; the `width` best texts are ranked again with `lm_weight`
            times that (divided like the score).
    """

    width: int = 80
    temperature: float = 1.5
    end_threshold: float | None = 1.5
    longest_shift: int | None = 140
    shortest: float = 0.0
    longest: float = 1.0
    ctc_weight: float = 0.0
    normalised: bool = True
    results: int = 1
    language_model: Callable[[Sequence[int]], float] | None = field(default=None, repr=False)
    lm_weight: float = 0.0

    def __post_init__(self) -> None:
        expected = {
            "width": (1 <= self.width <= MOST_WIDTH, f"1 to {MOST_WIDTH:,}"),
            "temperature": (0 < self.temperature < float("inf"), "a number above 0"),
            "end_threshold": (self.end_threshold is None or self.end_threshold >= 1, "at least 1"),
            "longest_shift": (
                self.longest_shift is None or 1 <= self.longest_shift <= MOST_FRAMES,
                f"1 to {MOST_FRAMES:,} frames",
            ),
            "shortest": (0 <= self.shortest <= self.longest, "between 0 and longest"),
            "longest": (0 < self.longest < float("inf"), "a number above 0"),
            "ctc_weight": (0 <= self.ctc_weight <= 1, "between 0 and 1"),
            "results": (1 <= self.results <= self.width, "between 1 and width"),
        }
        for name, (fine, what) in expected.items():
            if not fine:
                raise InputError(f"attention search: {name}={getattr(self, name)}, expected {what}")


GREEDY = SearchOptions(width=1, temperature=1.0, end_threshold=None, longest_shift=None)


def search_attention(
    decoder: AttentionDecoder,
    memory_UTD: Tensor,
    lengths_U: Tensor,
    *,
    ctc_log_probs_UTV: Tensor | None = None,
    how: SearchOptions = GREEDY,
) -> list[list[Hypothesis]]:
    """The best texts of each utterance, the best first; nothing is said without a frame. `lengths_U` is on the host."""
    if how.ctc_weight and ctc_log_probs_UTV is None:
        raise InputError(f"attention search: ctc_weight={how.ctc_weight} needs a model with CTC log-probabilities")
    silent = [Hypothesis([], [], 0.0)]
    spoken = lengths_U.nonzero().flatten()
    if not len(spoken):
        return [silent for _ in lengths_U]
    if len(spoken) < len(lengths_U):
        there = spoken.to(memory_UTD.device)
        memory_UTD = memory_UTD[there]
        ctc_log_probs_UTV = None if ctc_log_probs_UTV is None else ctc_log_probs_UTV[there]
    wide = how if how.language_model is None else replace(how, results=how.width)
    with torch.no_grad():
        beams = _Beams(memory_UTD, lengths_U[spoken], how=wide)
        _run(decoder, beams, memory_UTD, ctc_log_probs_UTV if how.ctc_weight else None, how=wide)
        found = iter(beams.results())
    every = [next(found) if length else silent for length in lengths_U.tolist()]
    return every if how.language_model is None else [rank_by_language_model(texts, how) for texts in every]


def _run(
    decoder: AttentionDecoder,
    beams: "_Beams",
    memory_UTD: Tensor,
    ctc_log_probs_UTV: Tensor | None,
    *,
    how: SearchOptions,
) -> None:
    """Steps until every utterance is over."""
    width = how.width
    memory_BTD = memory_UTD.repeat_interleave(width, dim=0)
    lengths_B = beams.lengths_U.repeat_interleave(width)
    state = decoder.start(memory_BTD, lengths_B)
    ctc = (
        None
        if ctc_log_probs_UTV is None
        else ctc_prefix.begin_prefixes(ctc_log_probs_UTV, beams.lengths_U, prefixes=width)
    )
    steps_a_question = STEPS_A_QUESTION.get(memory_UTD.device.type, 1)
    for step in range(beams.steps):
        log_probs_BV, after, attention_BT = decoder.step(memory_BTD, lengths_B, beams.tokens_UK.flatten(), state)
        following_UKV = None if ctc is None else ctc_prefix.score_following(*ctc)
        log_probs_UKV = log_probs_BV.float().view(-1, width, log_probs_BV.shape[-1])
        peaks_UK = attention_BT.argmax(dim=-1).view(-1, width)
        beams.advance(step, _weighted(log_probs_UKV, following_UKV, how=how), peaks_UK)
        state = _gathered(state, after, beams.parent_rows())
        if ctc is not None and following_UKV is not None:
            ctc = ctc[0], ctc_prefix.extend_prefixes(*ctc, following_UKV, beams.parents_UK, beams.tokens_UK)
        if (step + 1) % steps_a_question:
            continue
        unfinished = beams.unfinished()
        if not len(unfinished):
            return
        if len(unfinished) <= 0.75 * len(beams.scores_UK):  # not for every one: each time all is copied
            beams.keep(unfinished)
            rows = (unfinished[:, None] * width + torch.arange(width, device=unfinished.device)).flatten()
            memory_BTD, lengths_B = memory_BTD[rows], lengths_B[rows]
            state = type(state)(*(tensor[rows] for tensor in state))
            ctc = None if ctc is None else (ctc[0].take(unfinished), ctc[1].take(unfinished))


def _weighted(log_probs_UKV: Tensor, following_UKV: Tensor | None, *, how: SearchOptions) -> Tensor:
    """What every next token adds to a score; minus infinity for an end that may not be."""
    if how.temperature != 1:
        log_probs_UKV = (log_probs_UKV / how.temperature).log_softmax(dim=-1)
    scores_UKV = log_probs_UKV
    if following_UKV is not None:
        scores_UKV = torch.lerp(log_probs_UKV, following_UKV.to(log_probs_UKV.dtype), how.ctc_weight)
    # What is not a number must not win: not against anything, and not against nothing.
    scores_UKV = scores_UKV.masked_fill(scores_UKV.isnan(), -torch.inf)
    if how.end_threshold is not None:
        too_early_UK = log_probs_UKV[..., END] < how.end_threshold * log_probs_UKV[..., END + 1 :].amax(dim=-1)
        scores_UKV[..., END].masked_fill_(too_early_UK, -torch.inf)
    return scores_UKV


def _gathered(before: Any, after: Any, rows_B: Tensor) -> Any:
    """The state `after` a step, each row from where its hypothesis was; what a step leaves alone is its utterance's."""
    pairs = zip(before, after, strict=True)
    return type(after)(*(new if new is old else new.index_select(0, rows_B) for old, new in pairs))


class _Beams:
    """The hypotheses of all unfinished utterances, and the best ended ones of all.

    A hypothesis is a slot of a step and, through the parents noted at each step, the tokens that lead to it.
    """

    def __init__(self, memory_UTD: Tensor, lengths_U: Tensor, *, how: SearchOptions) -> None:
        device, utterances, width = memory_UTD.device, len(lengths_U), how.width
        self.how = how
        longest_U = (lengths_U * how.longest).long().clamp(min=1)
        self.steps = int(longest_U.max())
        self.lengths_U = lengths_U.to(device, non_blocking=True)
        self.longest_U = longest_U.to(device, non_blocking=True)
        self.shortest_U = (lengths_U * how.shortest).long().to(device, non_blocking=True)
        self.names_U = torch.arange(utterances, device=device)  # places in what is kept for the end
        self.scores_UK = torch.full((utterances, width), -torch.inf, device=device)
        self.scores_UK[:, 0] = 0
        self.peaks_UK = torch.zeros(utterances, width, dtype=torch.int64, device=device)
        self.tokens_UK = torch.full_like(self.peaks_UK, END)
        self.parents_UK = torch.zeros_like(self.peaks_UK)
        self.follows_best_U = torch.ones(utterances, dtype=torch.bool, device=device)
        self.ends_U = torch.zeros(utterances, dtype=torch.int64, device=device)
        # Kept for the end: token, parent and frame of every slot; and where the best hypotheses end.
        self.history_S3UK = torch.zeros(self.steps, 3, utterances, width, dtype=torch.int32, device=device)
        self.best_UN = torch.full((utterances, how.results), -torch.inf, device=device)
        self.places_UN = torch.zeros(utterances, how.results, dtype=torch.int64, device=device)

    def advance(self, step: int, added_UKV: Tensor, peaks_UK: Tensor) -> None:
        """Choose the best continuations, and set those aside that end."""
        width, outputs = added_UKV.shape[1:]
        if self.how.longest_shift is not None:
            jumped_UK = (peaks_UK - self.peaks_UK).abs() > self.how.longest_shift
            added_UKV = added_UKV - JUMP_COST * jumped_UK[..., None]
        if self.how.shortest:
            early_U = step < self.shortest_U
            added_UKV[..., END].masked_fill_(early_U[:, None], -torch.inf)
        candidates_UC = (self.scores_UK[..., None] + added_UKV).flatten(1)
        # The first slot's best token first, as long as that slot has done nothing else: with the others, or instead of
        # the last of them.
        best_U1 = added_UKV[:, 0].argmax(dim=-1, keepdim=True)
        first_U1 = torch.where(self.follows_best_U[:, None], torch.inf, candidates_UC.gather(1, best_U1))
        chosen_UK = candidates_UC.scatter(1, best_U1, first_U1).topk(width, dim=1).indices
        self.scores_UK = candidates_UC.gather(1, chosen_UK)
        self.parents_UK = chosen_UK // outputs
        self.tokens_UK = chosen_UK % outputs
        self.peaks_UK = peaks_UK.gather(1, self.parents_UK)
        self.history_S3UK[step].index_copy_(
            1, self.names_U, torch.stack([self.tokens_UK, self.parents_UK, self.peaks_UK]).int()
        )
        alive_UK = self.scores_UK > -torch.inf
        ends_UK = (self.tokens_UK == END) & alive_UK
        over_U1 = (step + 1 >= self.longest_U)[:, None]
        self._set_aside(step, (ends_UK | over_U1) & alive_UK)
        self.ends_U = self.ends_U + ends_UK.sum(dim=1)
        self.follows_best_U = self.follows_best_U & ~ends_UK[:, 0] & alive_UK[:, 0] & ~over_U1[:, 0]
        self.scores_UK = self.scores_UK.masked_fill(ends_UK | over_U1 | self._decided()[:, None], -torch.inf)

    def _set_aside(self, step: int, over_UK: Tensor) -> None:
        """Keep the best of those that end in this step and of those before."""
        width = over_UK.shape[1]
        scores_UK = self.scores_UK / (step + 1) if self.how.normalised else self.scores_UK
        places_UK = step * width + torch.arange(width, device=over_UK.device).expand_as(over_UK)
        both = torch.cat([self.best_UN[self.names_U], scores_UK.masked_fill(~over_UK, -torch.inf)], dim=1)
        best_UN, chosen_UN = both.topk(self.best_UN.shape[1], dim=1)
        places_UN = torch.cat([self.places_UN[self.names_U], places_UK], dim=1).gather(1, chosen_UN)
        self.best_UN.index_copy_(0, self.names_U, best_UN)
        self.places_UN.index_copy_(0, self.names_U, places_UN)

    def _decided(self) -> Tensor:
        """Whether no better text can follow, [U]: scores only fall, and enough texts have ended."""
        going_on_UK = self.scores_UK.masked_fill(self.tokens_UK == END, -torch.inf)
        hope_U = going_on_UK.amax(dim=1)
        hope_U = hope_U / self.longest_U if self.how.normalised else hope_U
        enough_U = (self.ends_U >= self.how.width) & ~self.follows_best_U
        return enough_U | (hope_U <= self.best_UN[self.names_U, -1])

    def parent_rows(self) -> Tensor:
        utterances, width = self.parents_UK.shape
        return (self.parents_UK + width * torch.arange(utterances, device=self.parents_UK.device)[:, None]).flatten()

    def unfinished(self) -> Tensor:
        """The utterances that are not over; the host waits here for the device."""
        return (self.scores_UK > -torch.inf).any(dim=1).nonzero().flatten()

    def keep(self, utterances: Tensor) -> None:
        """Go on with these alone."""
        for name in ("lengths_U", "longest_U", "shortest_U", "names_U", "follows_best_U", "ends_U"):
            setattr(self, name, getattr(self, name)[utterances])
        for name in ("scores_UK", "peaks_UK", "tokens_UK", "parents_UK"):
            setattr(self, name, getattr(self, name)[utterances])

    def results(self) -> list[list[Hypothesis]]:
        """The best hypotheses of every utterance, read from their ends to their beginnings; on the host."""
        history_S3UK = self.history_S3UK.cpu().numpy()
        scores_UN, places_UN = self.best_UN.cpu().numpy(), self.places_UN.cpu().numpy()
        steps_UN, slots_UN = np.divmod(places_UN, history_S3UK.shape[-1])
        rows_U1 = np.arange(len(steps_UN))[:, None]
        read_SUN2 = np.zeros((len(history_S3UK), *steps_UN.shape, 2), dtype=np.int64)
        for step in range(int(steps_UN.max()), -1, -1):
            tokens_UK, parents_UK, frames_UK = history_S3UK[step]
            read_SUN2[step] = np.stack([tokens_UK[rows_U1, slots_UN], frames_UK[rows_U1, slots_UN]], axis=-1)
            slots_UN = np.where(step <= steps_UN, parents_UK[rows_U1, slots_UN], slots_UN)
        return [
            [
                _hypothesis(read_SUN2[: steps_UN[u, n] + 1, u, n], float(scores_UN[u, n]))
                for n in range(scores_UN.shape[1])
                if n == 0 or scores_UN[u, n] > -np.inf
            ]
            for u in range(len(scores_UN))
        ]


def _hypothesis(read_S2: NDArray[np.int64], score: float) -> Hypothesis:
    """A hypothesis of the tokens and frames of its steps."""
    if score == -np.inf:  # a decoder that gives no numbers
        return Hypothesis([], [], score, ended=False)
    ended = bool(read_S2[-1, 0] == END)
    tokens, frames = read_S2[: len(read_S2) - ended].T.tolist() if len(read_S2) > ended else ([], [])
    return Hypothesis(tokens, frames, score, ended)


def rank_by_language_model(texts: list[Hypothesis], how: SearchOptions) -> list[Hypothesis]:
    """The best texts by their own scores and the language model's."""
    assert how.language_model is not None
    scored = []
    for found in texts:
        length = len(found.tokens) + found.ended if how.normalised else 1
        score = found.score + how.lm_weight * how.language_model(found.tokens) / max(length, 1)
        scored.append(replace(found, score=score))
    return sorted(scored, key=lambda found: -found.score)[: how.results]
