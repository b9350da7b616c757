"""Utterances on their way to a model, in two shapes: as they were recorded, and as a family hears them.

    Recordings   samples, end to end or a line each ─► hear ─► Features [U, T, F], each utterance with its frames

Both carry the texts as tokens; speech without text has none. A client's local steps go through the same few utterances
again and again, and so do its rounds: their samples travel to the device once and without padding, features are kept,
and a local step takes lines of them. Central training and recognition see an utterance once: a line each, padded.

Shapes: U utterances, N samples of all of them, T frames of the longest, F features, L tokens of the longest text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.data.audio.batches import collate
from sottovoce.data.audio.features import HOP_SAMPLES, WINDOW_SAMPLES
from sottovoce.data.corpora.corpus import SAMPLE_RATE


@dataclass(frozen=True, eq=False)
class Recordings:
    """Utterances and their texts. Samples are on the compute device, everything else is on the host.

    Each utterance begins at its place in `starts_U`: on a whole hop, so that its frames are some of those of all
    samples taken together; or, where each has a `line` of as many samples, at the beginning of its own.
    """

    samples_N: Tensor  # int16, or float where they were augmented
    starts_U: Tensor
    lengths_U: Tensor
    tokens_UL: Tensor
    token_lengths_U: Tensor
    line: int | None = None

    def __len__(self) -> int:
        return len(self.lengths_U)

    @property
    def audio_seconds(self) -> float:
        return float(self.lengths_U.sum()) / SAMPLE_RATE

    @property
    def lines_UN(self) -> Tensor:
        """The samples, a line for each utterance."""
        assert self.line is not None, "these lie end to end"
        return self.samples_N.view(len(self), self.line)

    def as_lines(self) -> Tensor:
        """The samples, a line for each utterance, however they lie; behind an utterance's end stands whatever comes."""
        if self.line is not None:
            return self.lines_UN
        device = self.samples_N.device
        places_N = torch.arange(int(self.lengths_U.max()), device=device)
        index_UN = self.starts_U.to(device, non_blocking=True)[:, None] + places_N
        return self.samples_N[index_UN.clamp_(max=len(self.samples_N) - 1)]

    def with_lines(self, lines_UN: Tensor, lengths_U: Tensor) -> "Recordings":
        """The same texts, said otherwise."""
        line = lines_UN.shape[1]
        starts_U = torch.arange(len(self)) * line
        return replace(self, samples_N=lines_UN.reshape(-1), starts_U=starts_U, lengths_U=lengths_U, line=line)


def record(
    samples: Sequence[NDArray[np.int16]],
    tokens: Sequence[Sequence[int] | NDArray[np.int32]] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Recordings:
    """Lay utterances end to end, and send them on their way to `device`."""
    pins = torch.device(device).type == "cuda"
    lengths = np.array([len(own) for own in samples], dtype=np.int64)
    # A clip that is shorter than a window is followed by silence, as it would be alone.
    slots = -(-np.maximum(lengths, WINDOW_SAMPLES) // HOP_SAMPLES) * HOP_SAMPLES
    starts = np.cumsum(slots) - slots
    samples_N = torch.empty(int(slots.sum()), dtype=torch.int16, pin_memory=pins)
    target = samples_N.numpy()
    for own, start, slot in zip(samples, starts.tolist(), slots.tolist(), strict=True):
        target[start : start + len(own)] = own
        target[start + len(own) : start + slot] = 0
    return Recordings(
        samples_N.to(device, non_blocking=True),
        torch.from_numpy(starts),
        torch.from_numpy(lengths),
        *padded_tokens([()] * len(samples) if tokens is None else tokens),
    )


def record_lines(
    samples: Sequence[NDArray[np.int16]],
    tokens: Sequence[Sequence[int] | NDArray[np.int32]] | None = None,
    *,
    padded_samples: int | None = None,
    device: torch.device | str = "cpu",
) -> Recordings:
    """Lay utterances in lines of `padded_samples`, or as long as the longest, and send them on their way."""
    pins = torch.device(device).type == "cuda"
    lines_UN, lengths_U = collate(samples, padded_samples=padded_samples, pin_memory=pins)
    line = lines_UN.shape[1]
    return Recordings(
        lines_UN.to(device, non_blocking=True).view(-1),
        torch.arange(len(samples)) * line,
        lengths_U,
        *padded_tokens([()] * len(samples) if tokens is None else tokens),
        line=line,
    )


def padded_tokens(tokens: Sequence[Sequence[int] | NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Texts as one tensor [U, L], zero behind each, and their lengths [U]."""
    lengths = np.array([len(own) for own in tokens], dtype=np.int64)
    tokens_UL = np.zeros((len(tokens), int(lengths.max(initial=0))), dtype=np.int64)
    for line, own in zip(tokens_UL, tokens, strict=True):
        line[: len(own)] = own
    return torch.from_numpy(tokens_UL), torch.from_numpy(lengths)


@dataclass(frozen=True, eq=False)
class Features:
    """Utterances as features, which are on the compute device; their frames and texts are on the host."""

    features_UTF: Tensor
    frames_U: Tensor
    tokens_UL: Tensor
    token_lengths_U: Tensor

    def __len__(self) -> int:
        return len(self.frames_U)

    def take(self, lines: Tensor) -> "Features":
        """The utterances `lines` (on the host), as long as the longest of them."""
        frames_U, token_lengths_U = self.frames_U[lines], self.token_lengths_U[lines]
        own = lines.pin_memory() if self.features_UTF.is_cuda else lines
        return Features(
            self.features_UTF[:, : int(frames_U.max())].index_select(
                0, own.to(self.features_UTF.device, non_blocking=True)
            ),
            frames_U,
            self.tokens_UL[lines, : int(token_lengths_U.max())],
            token_lengths_U,
        )


def end_to_end(parts: Sequence[Features]) -> Features:
    """Everything in `parts`, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return Features(
        _padded([part.features_UTF for part in parts]),
        torch.cat([part.frames_U for part in parts]),
        _padded([part.tokens_UL for part in parts]),
        torch.cat([part.token_lengths_U for part in parts]),
    )


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """[U, T, …] of several, zero behind the shorter ones."""
    whole = parts[0].new_zeros(sum(map(len, parts)), max(part.shape[1] for part in parts), *parts[0].shape[2:])
    first = 0
    for part in parts:
        whole[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return whole
