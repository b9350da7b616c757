"""Our own log-mel features or, as released, SpeechBrain's, with the padding as silence.

Theirs: centred Hamming windows of 25 ms, a 400-point power spectrum, triangles that are symmetric in Hertz and as wide
as the mel scale's step below them, decibels floored 80 below an utterance's loudest. They normalise each filter by a
running mean and deviation, which their federation neither sends nor averages; here these are settings (an imported
model has them) or, without, each utterance's own.

Shapes: U utterances, N samples of the longest, T frames of the longest, F mel features.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.data.audio.features import HOP_SAMPLES, INT16_SCALE, MEL_COUNT, WINDOW_SAMPLES, frame_count, frame_mask
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.crdnn.settings import Settings
from sottovoce.models.log_mel import extract_log_mel

LEAST_POWER, DECIBELS = 1e-10, 80.0
LEAST_DEVIATION = 1e-10


def frames_of(samples: int, settings: Settings) -> int:
    return samples // HOP_SAMPLES + 1 if settings.as_released else frame_count(samples)


def extract_features(
    recordings: Waveforms, *, settings: Settings, dtype: torch.dtype = torch.float32, **options: Any
) -> Features:
    """Normalised features [U, T, F]; `options` are those of `extract_log_mel`."""
    if not settings.as_released:
        return extract_log_mel(recordings, dtype=dtype, features=settings.ears, **options)
    features_UTF = decibels(_lines(recordings))
    frames_U = recordings.lengths_U // HOP_SAMPLES + 1
    if settings.feature_mean is not None and settings.feature_deviation is not None:
        mean_F, deviation_F = map(features_UTF.new_tensor, (settings.feature_mean, settings.feature_deviation))
        features_UTF = (features_UTF - mean_F) / deviation_F
    else:
        features_UTF = _normalised(features_UTF, frames_U.to(features_UTF.device, non_blocking=True))
    return Features(features_UTF.to(dtype), frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def _lines(recordings: Waveforms) -> Tensor:
    """Samples in [-1, 1), a line for each utterance, zero behind its end: [U, N]."""
    own_UN = recordings.padded_UN[:, : int(recordings.lengths_U.max())]
    lengths_U = recordings.lengths_U.to(own_UN.device, non_blocking=True)
    scale = 1.0 if own_UN.is_floating_point() else INT16_SCALE
    return torch.where(
        torch.arange(own_UN.shape[1], device=own_UN.device) < lengths_U[:, None], own_UN.float() * scale, 0.0
    )


def decibels(samples_UN: Tensor) -> Tensor:
    """Log-mel features [U, T, F] as SpeechBrain's `Fbank` makes them."""
    window = torch.hamming_window(WINDOW_SAMPLES, device=samples_UN.device)
    options: dict[str, Any] = {"pad_mode": "constant", "return_complex": True}
    spectrum = torch.stft(samples_UN, WINDOW_SAMPLES, HOP_SAMPLES, window=window, **options)
    power_UTB = torch.view_as_real(spectrum).square().sum(dim=-1).transpose(1, 2)
    found_UTF = 10 * torch.log10((power_UTB @ _filters().to(samples_UN.device)).clamp(min=LEAST_POWER))
    return found_UTF.maximum(found_UTF.amax(dim=(1, 2), keepdim=True) - DECIBELS)


@cache
def _filters() -> Tensor:
    """[bins, F]."""
    highest = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    hertz = 700 * (10 ** (np.linspace(0, highest, MEL_COUNT + 2) / 2595) - 1)
    bins = np.linspace(0, SAMPLE_RATE / 2, WINDOW_SAMPLES // 2 + 1)[:, None]
    away = np.abs(bins - hertz[1:-1]) / np.diff(hertz)[:-1]
    return torch.from_numpy((1 - away).clip(min=0.0)).float()


def _normalised(features_UTF: Tensor, frames_U: Tensor) -> Tensor:
    """Each bin by its mean and deviation over the utterance's own frames; padding is scaled with it."""
    own_UT1 = frame_mask(frames_U, features_UTF.shape[1])[:, :, None]
    frames_U11 = frames_U[:, None, None].to(features_UTF.dtype)
    mean_U1F = torch.where(own_UT1, features_UTF, 0).sum(dim=1, keepdim=True) / frames_U11
    centred_UTF = features_UTF - mean_U1F
    squares_U1F = torch.where(own_UT1, centred_UTF.square(), 0).sum(dim=1, keepdim=True)
    return centred_UTF / (squares_U1F / (frames_U11 - 1).clamp(min=1)).sqrt().clamp(min=LEAST_DEVIATION)
