"""The causal encoder of Ramesh et al. (2023), which several families share and inherit.

    samples ─► log-power, 256 bins every 10 ms ─► 3 frames side by side ─► dense layers, ReLU ─► LSTMs

A step ends with the window of its last frame: 15 ms of sound after the 30 ms that it stands for. Steps are computed one
by one, in chunks with a state that is carried on, or all at once, with the same result.

Other runtimes stream mel filterbanks, and take a step of a model for 40 ms: `filterbanks` are those, four to a step,
which ends 7.5 ms after what it stands for.

Tensors go by these names in every family that has it, each with `weight` and `bias`:

    encoder.dense.L              each followed by a ReLU
    encoder.lstm.L.input|recurrent    gates in torch's order (i, f, g, o)

Shapes: U utterances, T frames or steps, F bins, D width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.augment import empty_bands
from sottovoce.data.audio.features import (
    BIN_COUNT,
    HOP_SAMPLES,
    LEAD_SAMPLES,
    MEL_COUNT,
    STREAMED_HZ,
    bin_hertz,
    filter_hertz,
    frame_count,
    frame_lengths,
    frame_mask,
    log_mel,
    log_power,
    mirror_start,
)
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.models import lstm
from sottovoce.models.checks import check_counts
from sottovoce.models.family import FrontEnd, Parameters
from sottovoce.models.log_mel import Narrow
from sottovoce.models.lstm import Cell, LstmState
from sottovoce.models.trainable import with_corrections

Input = Literal["spectra", "filterbanks"]


class _Frames(NamedTuple):
    """What a frame of 10 ms is: so many values, at these frequencies; the first begins `lead_samples` before speech."""

    values: int
    hertz: Callable[[], NDArray[np.float64]]
    extract: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    lead_samples: int = 0


_INPUTS: Mapping[str, _Frames] = {
    "spectra": _Frames(BIN_COUNT, bin_hertz, log_power),
    "filterbanks": _Frames(
        MEL_COUNT, partial(filter_hertz, STREAMED_HZ), partial(log_mel, highest_hz=STREAMED_HZ), LEAD_SAMPLES
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """As in the paper. `stack` frames of 10 ms, laid side by side, are one step.

    Features are normalised by a `mean` and a `deviation` that are the same for all speech, at all times: whatever an
    utterance's own would be is known only at its end.
    """

    stack: int = 3
    dense_layers: int = 3
    dense_width: int = 512
    lstm_layers: int = 6
    lstm_width: int = 1024
    mean: float = -12.0
    deviation: float = 4.0
    input: Input = "spectra"

    def __post_init__(self) -> None:
        check_counts(self, "stack", "dense_layers", "dense_width", "lstm_layers", "lstm_width")
        if not (self.deviation > 0 and math.isfinite(self.mean) and math.isfinite(self.deviation)):
            raise InputError(
                f"model: mean={self.mean}, deviation={self.deviation}, expected numbers, the second above 0"
            )

    @property
    def layers(self) -> int:
        return self.dense_layers + self.lstm_layers

    @property
    def step_samples(self) -> int:
        return self.stack * HOP_SAMPLES

    @property
    def values(self) -> int:
        """Of a frame."""
        return _INPUTS[self.input].values

    @property
    def lead_samples(self) -> int:
        """How many samples the first frame begins before speech; see `mirror_start`."""
        return _INPUTS[self.input].lead_samples

    def steps(self, samples: int) -> int:
        """How many steps an utterance of so many samples has: whole stacks only."""
        return frame_count(samples + self.lead_samples) // self.stack


SIZES: Mapping[str, EncoderSettings] = {
    "tiny": EncoderSettings(dense_layers=2, dense_width=64, lstm_layers=2, lstm_width=96),
    "small": EncoderSettings(dense_width=256, lstm_layers=3, lstm_width=384),
    "ramesh": EncoderSettings(),  # 49,202,688 parameters
}


def named_encoder(size: str, *, input: Input = "spectra") -> EncoderSettings:
    """The encoder of a named size. Mean and deviation are near those of speech, close to a microphone and far."""
    if input == "spectra":
        return SIZES[size]
    return replace(SIZES[size], input=input, stack=4, mean=-8.0, deviation=4.0)


def encoder_shapes(settings: EncoderSettings) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, in the order of the network."""
    shapes: dict[str, tuple[int, ...]] = {}
    inputs = settings.stack * settings.values
    for layer in range(settings.dense_layers):
        shapes |= linear_shapes(f"encoder.dense.{layer}", inputs, settings.dense_width)
        inputs = settings.dense_width
    return shapes | lstm_shapes("encoder.lstm", inputs, settings.lstm_width, layers=settings.lstm_layers)


def linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def lstm_shapes(stem: str, inputs: int, width: int, *, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes |= linear_shapes(f"{stem}.{layer}.input", width if layer else inputs, 4 * width)
        shapes |= linear_shapes(f"{stem}.{layer}.recurrent", width, 4 * width)
    return shapes


def first_values(shapes: Mapping[str, tuple[int, ...]], *, generator: torch.Generator) -> dict[str, Tensor]:
    """Dense layers by He et al., so that ReLUs pass on as much as they get; all else as torch begins.

    That is: linear layers bounded by their inputs, LSTMs by their width, embeddings normal.
    """
    return {name: _first(name, shapes, generator) for name in shapes}


def _first(name: str, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator) -> Tensor:
    empty = torch.empty(shapes[name])
    if name == "embedding.weight":
        return empty.normal_(generator=generator)
    stem, _, last = name.rpartition(".")
    if stem.startswith("encoder.dense."):
        limit = math.sqrt(6 / shapes[f"{stem}.weight"][1]) if last == "weight" else 0.0
        return empty.uniform_(-limit, limit, generator=generator)
    cell, _, matrix = stem.rpartition(".")
    stem = f"{cell}.recurrent" if matrix == "input" else stem
    limit = 1 / math.sqrt(shapes[f"{stem}.weight"][1])
    return empty.uniform_(-limit, limit, generator=generator)


class HasEncoder(Protocol):
    """The settings of a family with this encoder."""

    @property
    def encoder(self) -> EncoderSettings: ...


# From samples to encoder steps.


def extract_features(recordings: Waveforms, *, settings: HasEncoder, dtype: torch.dtype = torch.float32) -> Features:
    """Normalised features [U, T, F] on the recordings' device, zero behind each utterance's end."""
    encoder, device = settings.encoder, recordings.samples_N.device
    frames_U = frame_lengths(recordings.lengths_U + encoder.lead_samples)
    lines_UN, lengths_U = recordings.padded_UN, recordings.lengths_U.to(device, non_blocking=True)
    if encoder.lead_samples:
        lines_UN, lengths_U = mirror_start(lines_UN, lengths_U)
    features_UTF = normalised_frames(lines_UN, lengths_U, settings=encoder)
    longest_UTF = features_UTF[:, : int(frames_U.max()) if len(frames_U) else 0]
    return Features(longest_UTF.to(dtype), frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def normalised_frames(lines_UN: Tensor, lengths_U: Tensor, *, settings: EncoderSettings) -> Tensor:
    """Of samples that begin where the first frame does, with their lead."""
    features_UTF, frames_U = _INPUTS[settings.input].extract(lines_UN, lengths_U)
    inside_UT1 = frame_mask(frames_U, features_UTF.shape[1])[:, :, None]
    return torch.where(inside_UT1, normalise_frames(features_UTF, settings=settings), 0.0)


def normalise_frames(features_UTF: Tensor, *, settings: EncoderSettings) -> Tensor:
    return (features_UTF - settings.mean) / settings.deviation


def _narrow(settings: HasEncoder) -> Narrow:
    hertz = _INPUTS[settings.encoder.input].hertz()

    def narrow(features_UTF: Tensor, frames_U: Tensor, bands_U2: Tensor) -> Tensor:
        """The same had nothing been recorded outside `bands_U2`: bins are normalised alike whatever others hold."""
        hertz_F = torch.from_numpy(hertz).to(features_UTF.device, torch.float32)
        return empty_bands(features_UTF, frames_U, bands_U2, hertz_F=hertz_F)

    return narrow


FRONT_END: FrontEnd[Any] = FrontEnd(extract_features=extract_features, narrow=_narrow)


def encode_features(parameters: Parameters, features: Features, *, settings: HasEncoder) -> tuple[Tensor, Tensor]:
    """Encoder steps [U, T, D], at least one, and how many of them each utterance has, on the host."""
    encoded_UTD, _ = encode_frames(with_corrections(parameters), features.features_UTF, settings=settings.encoder)
    return encoded_UTD, features.frames_U // settings.encoder.stack


def encode_frames(
    weights: Parameters, features_UTF: Tensor, state: LstmState | None = None, *, settings: EncoderSettings
) -> tuple[Tensor, LstmState]:
    """The steps of some frames, whole stacks of which count, and the state behind them, from which others go on."""
    return lstm_steps(weights, dense_steps(weights, features_UTF, settings=settings), state, settings=settings)


def dense_steps(weights: Parameters, features_UTF: Tensor, *, settings: EncoderSettings) -> Tensor:
    """The dense layers' part: each step by itself, at least one."""
    x_UTD = stacked_frames(features_UTF.to(weights["encoder.dense.0.weight"].dtype), settings=settings)
    for layer in range(settings.dense_layers):
        name = f"encoder.dense.{layer}"
        x_UTD = F.linear(x_UTD, weights[f"{name}.weight"], weights[f"{name}.bias"]).relu()
    return x_UTD


def stacked_frames(features_UTF: Tensor, *, settings: EncoderSettings) -> Tensor:
    """Frames side by side, as steps take them: whole stacks, at least one."""
    missing = max(settings.stack - features_UTF.shape[1], 0)  # an utterance of less than one step
    steps = (features_UTF.shape[1] + missing) // settings.stack
    whole_UTF = F.pad(features_UTF, (0, 0, 0, missing))[:, : steps * settings.stack]
    return whole_UTF.reshape(whole_UTF.shape[0], steps, -1)


def lstm_steps(
    weights: Parameters, x_UTD: Tensor, state: LstmState | None = None, *, settings: EncoderSettings
) -> tuple[Tensor, LstmState]:
    """The LSTMs' part: each step with all before it."""
    return lstm.forwards(x_UTD, lstm_cells(weights, "encoder.lstm", layers=settings.lstm_layers), state)


def lstm_cells(weights: Parameters, stem: str, *, layers: int) -> list[Cell]:
    return [Cell(*(weights[f"{stem}.{layer}.{name}"] for name in lstm.NAMES)) for layer in range(layers)]
