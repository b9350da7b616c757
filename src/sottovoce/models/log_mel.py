"""The ears of most families: log-mel features, each utterance normalised by itself.

Shapes: U utterances, N samples, T frames of the longest, F mel features.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sottovoce.audio.features import HOP_SAMPLES, MEL_COUNT, frame_lengths, log_mel, normalise
from sottovoce.models.utterances import Features, Recordings

# Frames that are worked on at a time: a window of 400 samples each, several times over, must fit into memory.
PIECE_FRAMES = 2**17


def line_features(lines_UN: Tensor, lengths_U: Tensor) -> Tensor:
    """Normalised features [U, T, F] of utterances in lines. All arguments are on the device."""
    features_UTF, frames_U = log_mel(lines_UN, lengths_U)
    return normalise(features_UTF, frames_U)


def hear(
    recordings: Recordings,
    *,
    settings: Any = None,
    dtype: torch.dtype = torch.float32,
    line_features: Callable[[Tensor, Tensor], Tensor] = line_features,
) -> Features:
    """Normalised features [U, T, F] on the recordings' device, zero behind each utterance's end.

    `line_features` is the function above or a compiled form of it. Every family that hears so has the same `settings`.
    """
    device, frames_U = recordings.samples_N.device, frame_lengths(recordings.lengths_U)
    if recordings.line is not None:
        lengths_U = recordings.lengths_U.to(device, non_blocking=True)
        features_UTF = line_features(recordings.lines_UN, lengths_U).to(dtype)
    else:
        features_UTF = _heard_in_pieces(recordings, frames_U, dtype=dtype)
    return Features(features_UTF, frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def _heard_in_pieces(recordings: Recordings, frames_U: Tensor, *, dtype: torch.dtype) -> Tensor:
    longest, device = int(frames_U.max()), recordings.samples_N.device
    features_UTF = torch.empty(len(frames_U), longest, MEL_COUNT, dtype=dtype, device=device)
    for first, last in pieces(frames_U):
        begin = int(recordings.starts_U[first])
        end = len(recordings.samples_N) if last == len(frames_U) else int(recordings.starts_U[last])
        samples_1N = recordings.samples_N[None, begin:end]
        frames_TF = log_mel(samples_1N, torch.full((1,), end - begin, device=device))[0][0]
        first_frames_U = ((recordings.starts_U[first:last] - begin) // HOP_SAMPLES).to(device, non_blocking=True)
        index_UT = first_frames_U[:, None] + torch.arange(longest, device=device)
        own_UTF = frames_TF[index_UT.clamp_(max=len(frames_TF) - 1)]
        features_UTF[first:last] = normalise(own_UTF, frames_U[first:last].to(device, non_blocking=True))
    return features_UTF


def pieces(frames_U: Tensor) -> Iterator[tuple[int, int]]:
    """Utterances [first, last) whose frames, padded to the longest, are worked on together."""
    size, count = max(1, PIECE_FRAMES // int(frames_U.max())), len(frames_U)
    for first in range(0, count, size):
        yield first, min(first + size, count)
