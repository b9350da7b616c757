"""The CTC transformer for other runtimes: from samples, or from Kaldi's filterbanks.

Shapes: U utterances, N samples, T frames, F mel features, V tokens with the blank.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import HOP_SAMPLES, frame_lengths, normalise_features
from sottovoce.models.family import Parameters
from sottovoce.models.log_mel import PAPER_FEATURES, normalise_log_mel, normalised_log_mel
from sottovoce.models.onnx_graphs import (
    Export,
    OnnxModel,
    SherpaModel,
    ctc_from_samples,
    rescale_kaldi,
    sherpa_from_filterbanks,
)
from sottovoce.models.transformer.features import amplitude_mel
from sottovoce.models.transformer.network import forward
from sottovoce.models.transformer.positions import exported_waves
from sottovoce.models.transformer.settings import STRIDE, Settings


def emit_samples(
    parameters: Parameters, samples_UN: Tensor, lengths_U: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [U, T, V] and their lengths, of floats in [-1, 1)."""
    frames_U = frame_lengths(lengths_U)
    if settings.as_released:
        features_UTF = normalise_features(amplitude_mel(samples_UN, lengths_U), frames_U)
    else:
        features_UTF = normalised_log_mel(samples_UN, lengths_U, features=settings.ears or PAPER_FEATURES)
    return forward(parameters, features_UTF, frames_U, settings=settings)


def emit_filterbanks(
    parameters: Parameters, filterbanks_UTF: Tensor, frames_U: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The same of Kaldi's filterbanks of 16-bit samples."""
    features_UTF = normalise_log_mel(rescale_kaldi(filterbanks_UTF), frames_U, features=settings.ears or PAPER_FEATURES)
    return forward(parameters, features_UTF, frames_U, settings=settings)


def to_onnx(parameters: Parameters, settings: Settings) -> OnnxModel:
    exported_waves(settings.width)
    emit = partial(emit_samples, settings=settings)
    return ctc_from_samples(emit, parameters, outputs=settings.tokens, samples_per_frame=STRIDE * HOP_SAMPLES)


def to_sherpa(parameters: Parameters, settings: Settings, pieces: Sequence[str]) -> SherpaModel:
    if settings.as_released:
        raise InputError("sherpa-onnx computes Kaldi's filterbanks, and as_released has others: expected --to onnx")
    exported_waves(settings.width)
    emit = partial(emit_filterbanks, settings=settings)
    return sherpa_from_filterbanks(emit, parameters, pieces=pieces, subsampling=STRIDE)


EXPORT = Export(onnx=to_onnx, sherpa=to_sherpa)
