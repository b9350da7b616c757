"""Speech that is trained on several times: heard once, then kept as features.

    samples, end to end ─► log-mel frames, end to end ─► features [U, T, F], each normalised ─► batches: lines of them

A client's local steps go through the same few utterances again and again, and so do its rounds. Their samples travel
to the device once and without padding; only masks and the model differ from one step to the next.

Shapes: U utterances, N samples of all of them, T frames of the longest, F mel features, L tokens of the longest text,
B utterances of a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.audio.features import HOP_SAMPLES, MEL_COUNT, WINDOW_SAMPLES, frame_lengths, log_mel, normalise

# Frames that are worked on at a time: a window of 400 samples each, several times over, must fit into memory.
PIECE_FRAMES = 2**17


@dataclass(frozen=True, eq=False)
class Recordings:
    """Utterances and their texts. Samples are on the compute device, everything else is on the host.

    Each utterance begins on a whole hop, so that its frames are some of those of all samples taken together.
    """

    samples_N: Tensor  # int16
    starts_U: Tensor
    lengths_U: Tensor
    tokens_UL: Tensor
    token_lengths_U: Tensor


def record(
    samples: Sequence[NDArray[np.int16]],
    tokens: Sequence[Sequence[int] | NDArray[np.int32]],
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
        *padded_tokens(tokens),
    )


def padded_tokens(tokens: Sequence[Sequence[int] | NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Texts as one tensor [U, L], zero behind each, and their lengths [U]."""
    lengths = np.array([len(own) for own in tokens], dtype=np.int64)
    tokens_UL = np.zeros((len(tokens), int(lengths.max(initial=0))), dtype=np.int64)
    for line, own in zip(tokens_UL, tokens, strict=True):
        line[: len(own)] = own
    return torch.from_numpy(tokens_UL), torch.from_numpy(lengths)


@dataclass(frozen=True, eq=False)
class Heard:
    """Utterances as features, which are on the compute device; lengths in samples and texts are on the host."""

    features_UTF: Tensor
    lengths_U: Tensor
    tokens_UL: Tensor
    token_lengths_U: Tensor

    def batch(self, lines: Tensor) -> "HeardBatch":
        """The utterances `lines` (on the host), as long as the longest of them."""
        lengths_B, token_lengths_B = self.lengths_U[lines], self.token_lengths_U[lines]
        frames = int(frame_lengths(lengths_B).max())
        own = lines.pin_memory() if self.features_UTF.is_cuda else lines
        return HeardBatch(
            self.features_UTF[:, :frames].index_select(0, own.to(self.features_UTF.device, non_blocking=True)),
            lengths_B,
            self.tokens_UL[lines, : int(token_lengths_B.max())],
            token_lengths_B,
        )


def hear(recordings: Recordings, *, dtype: torch.dtype) -> Heard:
    """Normalised features [U, T, F] on the recordings' device, zero behind each utterance's end."""
    frames_U = frame_lengths(recordings.lengths_U)
    longest, device = int(frames_U.max()), recordings.samples_N.device
    features_UTF = torch.empty(len(frames_U), longest, MEL_COUNT, dtype=dtype, device=device)
    for first, last in _pieces(recordings):
        begin = int(recordings.starts_U[first])
        end = len(recordings.samples_N) if last == len(frames_U) else int(recordings.starts_U[last])
        samples_1N = recordings.samples_N[None, begin:end]
        frames_TF = log_mel(samples_1N, torch.full((1,), end - begin, device=device))[0][0]
        first_frames_U = ((recordings.starts_U[first:last] - begin) // HOP_SAMPLES).to(device, non_blocking=True)
        index_UT = first_frames_U[:, None] + torch.arange(longest, device=device)
        own_UTF = frames_TF[index_UT.clamp_(max=len(frames_TF) - 1)]
        features_UTF[first:last] = normalise(own_UTF, frames_U[first:last].to(device, non_blocking=True))
    return Heard(features_UTF, recordings.lengths_U, recordings.tokens_UL, recordings.token_lengths_U)


def joined(parts: Sequence[Heard]) -> Heard:
    """Everything heard in `parts`, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return Heard(
        _joined([part.features_UTF for part in parts]),
        torch.cat([part.lengths_U for part in parts]),
        _joined([part.tokens_UL for part in parts]),
        torch.cat([part.token_lengths_U for part in parts]),
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[U, T, …] of several, zero behind the shorter ones."""
    whole = parts[0].new_zeros(sum(map(len, parts)), max(part.shape[1] for part in parts), *parts[0].shape[2:])
    first = 0
    for part in parts:
        whole[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return whole


def _pieces(recordings: Recordings) -> Iterator[tuple[int, int]]:
    """Utterances [first, last) whose frames, padded to the longest, are worked on together."""
    padded = int(frame_lengths(recordings.lengths_U).max())
    size, count = max(1, PIECE_FRAMES // padded), len(recordings.lengths_U)
    for first in range(0, count, size):
        yield first, min(first + size, count)


@dataclass(frozen=True, slots=True)
class HeardBatch:
    """Utterances with their features, which are on the compute device; everything else is on the host."""

    features_BTF: Tensor
    lengths_B: Tensor
    tokens_BU: Tensor
    token_lengths_B: Tensor
