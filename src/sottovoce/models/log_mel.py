"""The ears of most families: log-mel features, each utterance normalised by itself.

Shapes: U utterances, N samples, T frames of the longest, F mel features.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sottovoce.audio.augment import empty_bands
from sottovoce.audio.features import (
    HOP_SAMPLES,
    MEL_COUNT,
    Ears,
    Normalised,
    filter_hertz,
    frame_lengths,
    log_mel,
    normalise,
    normalise_filters,
    raise_floor,
)
from sottovoce.errors import InputError
from sottovoce.models.utterances import Features, Recordings

# Features [U, T, F], their frames [U] and a band of each [U, 2]: what would have been heard had there been no more.
Narrow = Callable[[Tensor, Tensor, Tensor], Tensor]

# Frames that are worked on at a time: a window of 400 samples each, several times over, must fit into memory.
PIECE_FRAMES = 2**17


PAPERS_EARS = Ears()


def check_ears(ears: Ears | None, *, as_released: bool | None) -> None:
    """Released code has ears of its own."""
    if as_released and ears is not None:
        raise InputError("model: features with as_released, which has those of the released code; expected one of them")


def line_features(lines_UN: Tensor, lengths_U: Tensor, *, ears: Ears = PAPERS_EARS) -> Tensor:
    """Normalised features [U, T, F] of utterances in lines. All arguments are on the device."""
    return normalised(*log_mel(lines_UN, lengths_U), ears=ears)


def normalised(features_UTF: Tensor, frames_U: Tensor, *, ears: Ears) -> Tensor:
    """Log-mel features [U, T, F] as a model hears them, zero behind each utterance's end."""
    if ears.floor_db is not None:
        features_UTF = raise_floor(features_UTF, frames_U, decibels=ears.floor_db)
    return _NORMALISED[ears.normalise](features_UTF, frames_U)


_NORMALISED: Mapping[Normalised, Callable[[Tensor, Tensor], Tensor]] = {
    "utterance": normalise,
    "filter": normalise_filters,
}


def narrowing(ears: Ears | None, *, as_released: bool) -> Narrow | None:
    """How these ears hear speech of a narrower band, given what they heard; released code's is left as it is."""
    return None if as_released else partial(narrowed, ears=ears or PAPERS_EARS)


def narrowed(features_UTF: Tensor, frames_U: Tensor, bands_U2: Tensor, *, ears: Ears) -> Tensor:
    """Normalised features as they would be had nothing been recorded outside `bands_U2`.

    An empty band lies as low as the utterance ever gets, and moves the mean and the scale of all; either way of
    normalising forgets those from before.
    """
    hertz_F = torch.from_numpy(filter_hertz()).to(features_UTF.device, torch.float32)
    # In float64 and then rounded to float32, in which they were normalised first: so sums over more or less padding, in
    # batches of one client or several, come to the same.
    emptied_UTF = empty_bands(features_UTF.double(), frames_U, bands_U2, hertz_F=hertz_F)
    heard_UTF = _NORMALISED[ears.normalise](emptied_UTF, frames_U).float().to(features_UTF.dtype)
    return features_UTF.where(_hears_all(bands_U2, hertz_F)[:, None, None], heard_UTF)


def _hears_all(bands_U2: Tensor, hertz_F: Tensor) -> Tensor:
    """Whether a band holds every filter: [U]. Such utterances stay as they are, to the bit."""
    return (bands_U2[:, 0] <= hertz_F[0]) & (bands_U2[:, 1] >= hertz_F[-1])


def hear(
    recordings: Recordings,
    *,
    settings: Any = None,
    dtype: torch.dtype = torch.float32,
    ears: Ears | None = None,
    line_features: Callable[..., Tensor] = line_features,
) -> Features:
    """Normalised features [U, T, F] on the recordings' device, zero behind each utterance's end.

    `line_features` is the function above or a compiled form of it. Whatever a family's `settings` are, it hears with
    `ears`, or with the paper's.
    """
    ears = ears or PAPERS_EARS
    device, frames_U = recordings.samples_N.device, frame_lengths(recordings.lengths_U)
    if recordings.line is not None:
        lengths_U = recordings.lengths_U.to(device, non_blocking=True)
        features_UTF = line_features(recordings.lines_UN, lengths_U, ears=ears).to(dtype)
    else:
        features_UTF = _heard_in_pieces(recordings, frames_U, ears=ears, dtype=dtype)
    return Features(features_UTF, frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def _heard_in_pieces(recordings: Recordings, frames_U: Tensor, *, ears: Ears, dtype: torch.dtype) -> Tensor:
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
        own_U = frames_U[first:last].to(device, non_blocking=True)
        features_UTF[first:last] = normalised(own_UTF, own_U, ears=ears)
    return features_UTF


def pieces(frames_U: Tensor) -> Iterator[tuple[int, int]]:
    """Utterances [first, last) whose frames, padded to the longest, are worked on together."""
    size, count = max(1, PIECE_FRAMES // int(frames_U.max())), len(frames_U)
    for first in range(0, count, size):
        yield first, min(first + size, count)
