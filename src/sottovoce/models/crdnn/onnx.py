"""The CRDNN's CTC branch for other runtimes: from samples, or from Kaldi's filterbanks.

The decoder is left out: no runtime has its search.

Shapes: U utterances, N samples, T frames, F mel features, V tokens with the blank.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import HOP_SAMPLES, frame_lengths
from sottovoce.models.crdnn.network import encode_frames
from sottovoce.models.crdnn.settings import POOLING, Settings
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

_ENCODER = ("cnn.", "rnn.", "dnn.", "ctc.")


def emit_samples(
    parameters: Parameters, samples_UN: Tensor, lengths_U: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """CTC's log-probabilities [U, T, V] and their lengths, of floats in [-1, 1)."""
    features_UTF = normalised_log_mel(samples_UN, lengths_U, features=settings.ears or PAPER_FEATURES)
    return _emit(parameters, features_UTF, frame_lengths(lengths_U), settings)


def emit_filterbanks(
    parameters: Parameters, filterbanks_UTF: Tensor, frames_U: Tensor, *, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The same of Kaldi's filterbanks of 16-bit samples."""
    features_UTF = normalise_log_mel(rescale_kaldi(filterbanks_UTF), frames_U, features=settings.ears or PAPER_FEATURES)
    return _emit(parameters, features_UTF, frames_U, settings)


def _emit(parameters: Parameters, features_UTF: Tensor, frames_U: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    lengths_U = frames_U // POOLING
    encoded = encode_frames(parameters, features_UTF, lengths_U, ends_U=frames_U, settings=settings)
    return encoded.ctc_log_probs_UTV, lengths_U


def to_onnx(parameters: Parameters, settings: Settings) -> OnnxModel:
    emit = partial(emit_samples, settings=settings)
    weights = _encoder(parameters, settings)
    return ctc_from_samples(emit, weights, outputs=settings.tokens, samples_per_frame=POOLING * HOP_SAMPLES)


def to_sherpa(parameters: Parameters, settings: Settings, pieces: Sequence[str]) -> SherpaModel:
    emit = partial(emit_filterbanks, settings=settings)
    return sherpa_from_filterbanks(emit, _encoder(parameters, settings), pieces=pieces, subsampling=POOLING)


def _encoder(parameters: Parameters, settings: Settings) -> Parameters:
    """What CTC needs; refused where it was not trained, or padding is part of the speech."""
    if settings.as_released:
        raise InputError(
            "as_released: SpeechBrain's features, with padding as speech, are not exported; expected as_released=false"
        )
    if settings.mu == 1:
        raise InputError("mu=1: the CTC branch, which is what is exported, was not trained; expected mu below 1")
    return {name: p for name, p in parameters.items() if name.startswith(_ENCODER)}


EXPORT = Export(onnx=to_onnx, sherpa=to_sherpa)
