"""The front end of most families: log-mel features, each utterance normalised by itself.

Shapes: U utterances, N samples, T frames of the longest, F mel features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.augment import empty_bands
from sottovoce.data.audio.features import (
    HOP_SAMPLES,
    MEL_COUNT,
    FeatureSettings,
    Normalised,
    filter_hertz,
    frame_count,
    frame_lengths,
    log_mel,
    normalise_features,
    normalise_filters,
    raise_floor,
)
from sottovoce.data.audio.waveforms import Features, Waveforms

# From features [U, T, F], their frames [U] and a band of each [U, 2] to features of the same speech within that band.
Narrow = Callable[[Tensor, Tensor, Tensor], Tensor]

# Frames that are worked on at a time: a window of 400 samples each, several times over, must fit into memory.
PIECE_FRAMES = 2**17
# A processor takes them in pieces that stay in its cache: twice as fast. Not in smaller ones, whose matrix products and
# sums may add in another order: so features have the same bits in pieces as in one.
CACHED_FRAMES = 2**10
LEAST_LINES = 2

PAPER_FEATURES = FeatureSettings()


class LogMelSettings(Protocol):
    """Settings of a model with these features, or with those of released code."""

    @property
    def ears(self) -> FeatureSettings | None: ...
    @property
    def as_released(self) -> bool: ...


def check_feature_settings(features: FeatureSettings | None, *, as_released: bool | None) -> None:
    """Released code has features of its own."""
    if as_released and features is not None:
        raise InputError("model: features with as_released, which has the released code's; expected one of them")


def normalised_log_mel(lines_UN: Tensor, lengths_U: Tensor, *, features: FeatureSettings = PAPER_FEATURES) -> Tensor:
    """Normalised features [U, T, F] of utterances in lines. All arguments are on the device."""
    return normalise_log_mel(*log_mel(lines_UN, lengths_U), features=features)


def normalise_log_mel(features_UTF: Tensor, frames_U: Tensor, *, features: FeatureSettings) -> Tensor:
    """Log-mel features [U, T, F] as a model takes them, zero behind each utterance's end."""
    if features.floor_db is not None:
        features_UTF = raise_floor(features_UTF, frames_U, decibels=features.floor_db)
    if torch.compiler.is_exporting():  # runtimes may add up thousands of values one by one
        return _NORMALISED[features.normalise](features_UTF.double(), frames_U).float()
    return _NORMALISED[features.normalise](features_UTF, frames_U)


_NORMALISED: Mapping[Normalised, Callable[[Tensor, Tensor], Tensor]] = {
    "utterance": normalise_features,
    "filter": normalise_filters,
}


def narrow_by_settings(settings: LogMelSettings) -> Narrow | None:
    """How features become those of narrower speech; None for released code's."""
    return None if settings.as_released else narrow_by_features(settings.ears)


def narrow_by_features(features: FeatureSettings | None) -> Narrow:
    return partial(narrow_log_mel, features=features or PAPER_FEATURES)


def narrow_log_mel(features_UTF: Tensor, frames_U: Tensor, bands_U2: Tensor, *, features: FeatureSettings) -> Tensor:
    """Normalised features as they would be had nothing been recorded outside `bands_U2`.

    An empty band lies as low as the utterance ever gets, and moves the mean and the scale of all; either way of
    normalising forgets those from before.
    """
    hertz_F = torch.from_numpy(filter_hertz()).to(features_UTF.device, torch.float32)
    # In float64 and then rounded to float32, in which they were normalised first: so sums over more or less padding, in
    # batches of one client or several, come to the same.
    emptied_UTF = empty_bands(features_UTF.double(), frames_U, bands_U2, hertz_F=hertz_F)
    narrowed_UTF = _NORMALISED[features.normalise](emptied_UTF, frames_U).float().to(features_UTF.dtype)
    # Utterances whose band holds every filter stay as they are, to the bit.
    is_whole_U = (bands_U2[:, 0] <= hertz_F[0]) & (bands_U2[:, 1] >= hertz_F[-1])
    return features_UTF.where(is_whole_U[:, None, None], narrowed_UTF)


def extract_log_mel(
    recordings: Waveforms,
    *,
    settings: Any = None,
    dtype: torch.dtype = torch.float32,
    features: FeatureSettings | None = None,
    by_lines: Callable[..., Tensor] = normalised_log_mel,
) -> Features:
    """Normalised features [U, T, F] on the recordings' device, zero behind each utterance's end.

    `by_lines` is `normalised_log_mel` or a compiled form of it. `settings` are a family's; all that counts are
    `features`, by default the paper's.
    """
    features = features or PAPER_FEATURES
    device, frames_U = recordings.samples_N.device, frame_lengths(recordings.lengths_U)
    if recordings.padded_samples is not None:
        lengths_U = recordings.lengths_U.to(device, non_blocking=True)
        features_UTF = _extract_lines(recordings.padded_UN, lengths_U, by_lines, features=features).to(dtype)
    else:
        features_UTF = _extract_in_pieces(recordings, frames_U, features=features, dtype=dtype)
    return Features(features_UTF, frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def _extract_lines(
    lines_UN: Tensor, lengths_U: Tensor, by_lines: Callable[..., Tensor], *, features: FeatureSettings
) -> Tensor:
    if lines_UN.is_cuda or torch.compiler.is_exporting():
        return by_lines(lines_UN, lengths_U, features=features)
    cuts = _cached_pieces([frame_count(lines_UN.shape[1])] * len(lines_UN), most_lines=len(lines_UN))
    if len(cuts) <= 1:
        return by_lines(lines_UN, lengths_U, features=features)
    return torch.cat([by_lines(lines_UN[first:last], lengths_U[first:last], features=features) for first, last in cuts])


def _extract_in_pieces(
    recordings: Waveforms, frames_U: Tensor, *, features: FeatureSettings, dtype: torch.dtype
) -> Tensor:
    longest, device = int(frames_U.max()), recordings.samples_N.device
    features_UTF = torch.empty(len(frames_U), longest, MEL_COUNT, dtype=dtype, device=device)
    most_lines = max(1, PIECE_FRAMES // longest)
    cuts = pieces(frames_U) if device.type == "cuda" else _cached_pieces(frames_U.tolist(), most_lines=most_lines)
    for first, last in cuts:
        begin = int(recordings.starts_U[first])
        end = len(recordings.samples_N) if last == len(frames_U) else int(recordings.starts_U[last])
        samples_1N = recordings.samples_N[None, begin:end]
        frames_TF = log_mel(samples_1N, torch.full((1,), end - begin, device=device))[0][0]
        first_frames_U = ((recordings.starts_U[first:last] - begin) // HOP_SAMPLES).to(device, non_blocking=True)
        index_UT = first_frames_U[:, None] + torch.arange(longest, device=device)
        own_UTF = frames_TF[index_UT.clamp_(max=len(frames_TF) - 1)]
        own_U = frames_U[first:last].to(device, non_blocking=True)
        features_UTF[first:last] = normalise_log_mel(own_UTF, own_U, features=features)
    return features_UTF


def pieces(frames_U: Tensor) -> Iterator[tuple[int, int]]:
    """Utterances [first, last) whose frames, padded to the longest, are worked on together."""
    size, count = max(1, PIECE_FRAMES // int(frames_U.max())), len(frames_U)
    for first in range(0, count, size):
        yield first, min(first + size, count)


def _cached_pieces(frames: Sequence[int], *, most_lines: int) -> list[tuple[int, int]]:
    """Utterances [first, last) with `CACHED_FRAMES` or a little more, and at least `LEAST_LINES` of them.

    Never more than `most_lines`; what is left at the end goes with the last of them, where that is not too much.
    """
    cuts, first, held = [], 0, 0
    for last, own in enumerate(frames, start=1):
        held += own
        if last - first == most_lines or (held >= CACHED_FRAMES and last - first >= LEAST_LINES):
            cuts.append((first, last))
            first, held = last, 0
    if first < len(frames):
        begin = cuts.pop()[0] if cuts and len(frames) - cuts[-1][0] <= most_lines else first
        cuts.append((begin, len(frames)))
    return cuts
