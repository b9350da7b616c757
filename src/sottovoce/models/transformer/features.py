"""Our own log-mel features or, as released, those of Pelikan et al.'s code.

Theirs: a Hamming window, pre-emphasis inside each frame, no mean taken off, the amplitude of a 512-point spectrum,
triangles with straight sides in Hertz from 0 on, 16-bit samples and a floor of 1 under the logarithm.

Shapes: U utterances, N samples of the longest, T frames of the longest, F mel features.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import (
    FFT_SAMPLES,
    HOP_SAMPLES,
    INT16_SCALE,
    MEL_COUNT,
    PRE_EMPHASIS,
    WINDOW_SAMPLES,
    fourier_waves,
    frame_count,
    frame_lengths,
    normalise_features,
)
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models import log_mel
from sottovoce.models.transformer.settings import Settings


def extract_features(
    recordings: Waveforms, *, settings: Settings, dtype: torch.dtype = torch.float32, **options: Any
) -> Features:
    """Normalised features [U, T, F], zero behind each utterance's end; `options` are `extract_log_mel`'s."""
    if settings.features != MEL_COUNT:
        raise InputError(f"the model takes {settings.features} mel filters, expected {MEL_COUNT}")
    if not settings.as_released:
        return log_mel.extract_log_mel(recordings, dtype=dtype, features=settings.ears, **options)
    lines_UN, frames_U = recordings.padded_UN, frame_lengths(recordings.lengths_U)
    device = lines_UN.device
    longest = int(frames_U.max()) if recordings.padded_samples is None else frame_count(recordings.padded_samples)
    lengths_U = recordings.lengths_U.to(device, non_blocking=True)
    features_UTF = torch.empty(len(frames_U), longest, MEL_COUNT, dtype=dtype, device=device)
    for first, last in log_mel.pieces(frames_U):
        own_UTF = amplitude_mel(lines_UN[first:last], lengths_U[first:last])[:, :longest]
        features_UTF[first:last] = normalise_features(own_UTF, frame_lengths(lengths_U[first:last]))
    return Features(features_UTF, frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def amplitude_mel(lines_UN: Tensor, lengths_U: Tensor) -> Tensor:
    """Log-mel features of the released code, [U, T, F], of int16 samples or floats in [-1, 1)."""
    scale = 1 / INT16_SCALE if lines_UN.is_floating_point() else 1.0
    inside_UN = torch.arange(lines_UN.shape[1], device=lines_UN.device) < lengths_U[:, None]
    samples_UN = torch.where(inside_UN, lines_UN.float() * scale, 0.0)
    samples_UN = torch.nn.functional.pad(samples_UN, (0, max(0, WINDOW_SAMPLES - samples_UN.shape[1])))
    frames_UTW = samples_UN.unfold(1, WINDOW_SAMPLES, HOP_SAMPLES)
    before_UTW = torch.cat([frames_UTW[..., :1], frames_UTW[..., :-1]], dim=-1)  # the first sample precedes itself
    waves, filters = _constants(lines_UN.device)
    with torch.autocast(device_type=lines_UN.device.type, enabled=False):
        # A matrix product, and no transform that would be planned anew for every number of frames.
        parts = (frames_UTW - PRE_EMPHASIS * before_UTW) @ waves
        amplitude_UTB: Tensor = torch.linalg.vector_norm(parts.view(*parts.shape[:2], -1, 2), dim=3)
        return (amplitude_UTB @ filters).clamp_(min=1.0).log_()


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The windowed waves of the Fourier transform [window, 2 · bins], and the triangles [bins, F]."""
    highest = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    hertz = 700 * (10 ** (np.linspace(0, highest, MEL_COUNT + 2) / 2595) - 1)
    edges = hertz * FFT_SAMPLES / SAMPLE_RATE
    bins = np.arange(FFT_SAMPLES // 2 + 1)[:, None]
    rising, falling = (bins - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - bins) / np.diff(edges)[1:]
    triangles = np.minimum(rising, falling).clip(min=0.0)
    windowed = np.hamming(WINDOW_SAMPLES)[:, None] * fourier_waves()
    waves, filters = (torch.from_numpy(array).float().to(device) for array in (windowed, triangles))
    return waves, filters
