"""From encoder steps to texts: greedy search, whose state can be carried on, and beam search.

Greedy search takes the best output at each step and, as long as that is a token, asks again; several steps are scored
together. Beam search is synchronous in time: at each step every text goes on by a blank or by up to `most_at_once`
tokens, and texts that were reached in several ways are one, with the sum of their probabilities.

Shapes: U utterances, B rows, T encoder steps, A steps looked at together, D width, V outputs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.data.audio.features import HOP_SAMPLES, WINDOW_SAMPLES
from sottovoce.models.attention_search import SearchOptions, rank_by_language_model
from sottovoce.models.ctc import BLANK
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import Parameters
from sottovoce.models.lstm import LstmState
from sottovoce.models.speech_lstm import encode_frames, normalised_frames
from sottovoce.models.trainable import with_corrections
from sottovoce.models.transducer.network import PredictionState, Settings, joint, predict_next

AHEAD = 8


class Written(NamedTuple):
    """What greedy search remembers of the text so far: g, and the prediction network's state."""

    predicted_UD: Tensor
    state: PredictionState


def nothing_written(weights: Parameters, rows: int, *, settings: Settings) -> Written:
    begin_U1 = torch.full((rows, 1), BLANK, device=weights["embedding.weight"].device)
    predicted_U1D, state = predict_next(weights, begin_U1, settings=settings)
    return Written(predicted_U1D[:, 0], state)


def search_greedily(
    weights: Parameters,
    encoded_UTD: Tensor,
    lengths_U: Tensor,
    before: Written | None = None,
    *,
    settings: Settings,
    temperature: float = 1.0,
) -> tuple[list[Hypothesis], Written]:
    """The text of each utterance's steps, with its log-score (one alignment's), and from where later steps go on."""
    utterances, device = len(encoded_UTD), encoded_UTD.device
    predicted_UD, state = nothing_written(weights, utterances, settings=settings) if before is None else before
    lengths_U, ahead_A = lengths_U.to(device), torch.arange(AHEAD, device=device)
    step_U, at_once_U = torch.zeros_like(lengths_U), torch.zeros_like(lengths_U)
    score_U = torch.zeros(utterances, dtype=torch.float64, device=device)
    encoded_UTD = F.pad(encoded_UTD, (0, 0, 0, AHEAD))
    every_U1 = torch.arange(utterances, device=device)[:, None]
    tokens: list[list[int]] = [[] for _ in range(utterances)]
    frames: list[list[int]] = [[] for _ in range(utterances)]
    while bool((step_U < lengths_U).any()):
        places_UA = step_U[:, None] + ahead_A
        inside_UA = places_UA < lengths_U[:, None]
        near_UAD = encoded_UTD[every_U1, places_UA.clamp(max=encoded_UTD.shape[1] - 1)]
        log_probs_UAV = joint(weights, near_UAD, predicted_UD[:, None], temperature=temperature)
        best_UA = log_probs_UAV.argmax(dim=-1)
        writes_UA = inside_UA & (best_UA != BLANK)
        writes_UA[:, 0] &= at_once_U < settings.most_at_once
        writes_U = writes_UA.any(dim=1)
        blanks_U = torch.where(writes_U, writes_UA.int().argmax(dim=1), inside_UA.sum(dim=1))
        token_U = best_UA.gather(1, blanks_U.clamp(max=AHEAD - 1)[:, None])[:, 0]
        passed_UA = ahead_A < blanks_U[:, None]
        score_U += torch.where(passed_UA, log_probs_UAV[..., BLANK], 0).sum(dim=1)
        said_U = log_probs_UAV[every_U1[:, 0], blanks_U.clamp(max=AHEAD - 1), token_U]
        score_U += torch.where(writes_U, said_U, 0)
        step_U = step_U + blanks_U
        at_once_U = torch.where(blanks_U > 0, 0, at_once_U) + writes_U
        rows = writes_U.nonzero().flatten()
        if not len(rows):
            continue
        next_B1D, next_state = predict_next(weights, token_U[rows, None], _take(state, rows), settings=settings)
        predicted_UD = predicted_UD.index_copy(0, rows, next_B1D[:, 0])
        state = tuple(old.index_copy(1, rows, new) for old, new in zip(state, next_state, strict=True))
        for row, token, step in zip(rows.tolist(), token_U[rows].tolist(), step_U[rows].tolist(), strict=True):
            tokens[row].append(token)
            frames[row].append(step)
    scores = score_U.tolist()
    found = [Hypothesis(*own) for own in zip(tokens, frames, scores, strict=True)]
    return found, Written(predicted_UD, state)


def _take(state: PredictionState, rows: Tensor) -> PredictionState:
    return tuple(own[:, rows] for own in state)


@dataclass(frozen=True, slots=True)
class _Text:
    """A text, the step of each of its tokens, its log-probability, and its row of the prediction network's states."""

    tokens: tuple[int, ...]
    frames: tuple[int, ...]
    score: float
    row: int


class _Beams:
    """The texts of all utterances, and what the prediction network makes of each."""

    def __init__(self, weights: Parameters, utterances: int, *, settings: Settings, how: SearchOptions) -> None:
        self.weights, self.settings, self.how = weights, settings, how
        self.predicted_BD, self.state = nothing_written(weights, utterances, settings=settings)
        self.texts = [[_Text((), (), 0.0, row)] for row in range(utterances)]

    def advance(self, encoded_UD: Tensor, active: Sequence[int], *, step: int) -> None:
        """One step of speech, for those utterances that have it."""
        reached: dict[int, dict[tuple[int, ...], _Text]] = {utterance: {} for utterance in active}
        going = {utterance: self.texts[utterance] for utterance in active}
        for count in range(self.settings.most_at_once + 1):
            flat = [(utterance, text) for utterance, texts in going.items() for text in texts]
            if not flat:
                break
            owners, rows = ([owner for owner, _ in flat], [text.row for _, text in flat])
            log_probs_BV = joint(
                self.weights, encoded_UD[owners], self.predicted_BD[rows], temperature=self.how.temperature
            )
            for (utterance, text), blank in zip(flat, log_probs_BV[:, BLANK].tolist(), strict=True):
                _reach(reached[utterance], replace(text, score=text.score + blank))
            is_last = count == self.settings.most_at_once
            going = {} if is_last else self._further(flat, log_probs_BV, reached, step=step)
        for utterance, texts in reached.items():
            self.texts[utterance] = _best(texts.values(), self.how.width)
        self._forget()

    def _further(
        self,
        flat: Sequence[tuple[int, _Text]],
        log_probs_BV: Tensor,
        reached: dict[int, dict[tuple[int, ...], _Text]],
        *,
        step: int,
    ) -> dict[int, list[_Text]]:
        """The best continuations by a token that may still be among the best: scores only fall."""
        width = self.how.width
        scores_BK, tokens_BK = log_probs_BV[:, BLANK + 1 :].topk(min(width, log_probs_BV.shape[1] - 1), dim=1)
        longer: dict[int, list[_Text]] = {}
        for (utterance, text), scores, tokens in zip(flat, scores_BK.tolist(), tokens_BK.tolist(), strict=True):
            for score, token in zip(scores, tokens, strict=True):
                grown = _Text((*text.tokens, token + 1), (*text.frames, step), text.score + score, text.row)
                longer.setdefault(utterance, []).append(grown)
        going: dict[int, list[_Text]] = {}
        for utterance, texts in longer.items():
            there = _best(reached[utterance].values(), width)
            bar = there[-1].score if len(there) == width else -math.inf
            going[utterance] = [text for text in _best(texts, width) if text.score > bar]
        return self._predicted(going)

    def _predicted(self, going: dict[int, list[_Text]]) -> dict[int, list[_Text]]:
        """The same texts with rows of their own."""
        flat = [text for texts in going.values() for text in texts]
        if not flat:
            return going
        device = self.predicted_BD.device
        parents = torch.tensor([text.row for text in flat], device=device)
        tokens_B1 = torch.tensor([[text.tokens[-1]] for text in flat], device=device)
        next_B1D, state = predict_next(self.weights, tokens_B1, _take(self.state, parents), settings=self.settings)
        rows = iter(range(len(self.predicted_BD), len(self.predicted_BD) + len(flat)))
        self.predicted_BD = torch.cat([self.predicted_BD, next_B1D[:, 0]])
        self.state = tuple(torch.cat(pair, dim=1) for pair in zip(self.state, state, strict=True))
        return {utterance: [replace(text, row=next(rows)) for text in texts] for utterance, texts in going.items()}

    def _forget(self) -> None:
        """Rows of texts that are no more."""
        rows = torch.tensor([text.row for texts in self.texts for text in texts], device=self.predicted_BD.device)
        self.predicted_BD, self.state = self.predicted_BD[rows], _take(self.state, rows)
        left = iter(range(len(rows)))
        self.texts = [[replace(text, row=next(left)) for text in texts] for texts in self.texts]


def _reach(texts: dict[tuple[int, ...], _Text], text: _Text) -> None:
    """Add a way to a text; its steps are those of the best way, as far as is known."""
    other = texts.get(text.tokens)
    if other is None:
        texts[text.tokens] = text
        return
    high, low = (text, other) if text.score > other.score else (other, text)
    texts[text.tokens] = replace(high, score=high.score + math.log1p(math.exp(low.score - high.score)))


def _best(texts: Iterable[_Text], width: int) -> list[_Text]:
    return nlargest(width, texts, key=lambda text: text.score)


def search_with_beam(
    weights: Parameters, encoded_UTD: Tensor, lengths_U: Tensor, *, settings: Settings, how: SearchOptions
) -> list[list[Hypothesis]]:
    """The `how.width` best texts of each utterance, the best first."""
    beams, lengths = _Beams(weights, len(encoded_UTD), settings=settings, how=how), lengths_U.tolist()
    for step in range(max(lengths, default=0)):
        active = [utterance for utterance, length in enumerate(lengths) if step < length]
        beams.advance(encoded_UTD[:, step], active, step=step)
    return [[Hypothesis(list(text.tokens), list(text.frames), text.score) for text in texts] for texts in beams.texts]


def search_transducer(
    weights: Parameters, encoded_UTD: Tensor, lengths_U: Tensor, *, settings: Settings, how: SearchOptions
) -> list[list[Hypothesis]]:
    """The best texts of each utterance, the best first; of `how`, what is about attention or CTC means nothing here."""
    with torch.no_grad():
        if how.width == 1:
            one, _ = search_greedily(weights, encoded_UTD, lengths_U, settings=settings, temperature=how.temperature)
            found = [[text] for text in one]
        else:
            found = search_with_beam(weights, encoded_UTD, lengths_U, settings=settings, how=how)
    if how.normalised:
        found = [
            sorted(
                (replace(text, score=text.score / (len(text.tokens) + 1)) for text in texts),
                key=lambda text: -text.score,
            )
            for texts in found
        ]
    if how.language_model is None:
        return [texts[: how.results] for texts in found]
    return [rank_by_language_model(texts, how) for texts in found]


# Speech that is still being spoken: samples in, tokens out. A step's tokens come as soon as the window of its last
# frame is there, 45 ms after the step began (47.5 ms with filterbanks). They are those of greedy search in the whole
# recording: all is causal.


@dataclass(frozen=True, slots=True)
class StreamState:
    """Samples of which no step has been made yet, how many steps have, and what the networks remember of them."""

    left_N: NDArray[np.int16]
    steps: int = 0
    encoder: LstmState | None = None
    written: Written | None = None


def recognise_stream(
    parameters: Parameters, samples_N: NDArray[np.int16], before: StreamState | None = None, *, settings: Settings
) -> tuple[list[tuple[int, int]], StreamState]:
    """The tokens that follow, each with its step, and from where to go on."""
    before = before or StreamState(np.zeros(0, dtype=np.int16))
    left_N, encoder = np.concatenate([before.left_N, samples_N]), settings.encoder
    lead_N = left_N[: 0 if before.steps else encoder.lead_samples][::-1]  # as `mirror_start` has it
    frames = (len(lead_N) + len(left_N) - WINDOW_SAMPLES) // HOP_SAMPLES + 1
    if (steps := max(frames, 0) // encoder.stack) == 0:
        return [], StreamState(left_N, before.steps, before.encoder, before.written)
    weights = with_corrections(parameters)
    left_N = np.concatenate([lead_N, left_N])
    samples_1N = torch.from_numpy(left_N)[None].to(weights["output.bias"].device)
    with torch.no_grad():
        features_1TF = normalised_frames(
            samples_1N, torch.tensor([len(left_N)]).to(samples_1N.device), settings=encoder
        )
        encoded_1TD, state = encode_frames(
            weights, features_1TF[:, : steps * encoder.stack], before.encoder, settings=encoder
        )
        (found,), written = search_greedily(
            weights, encoded_1TD, torch.tensor([steps]), before.written, settings=settings
        )
    tokens = [(token, before.steps + step) for token, step in zip(found.tokens, found.frames, strict=True)]
    return tokens, StreamState(left_N[steps * encoder.step_samples :], before.steps + steps, state, written)
