"""The architecture of a CRDNN with an attention decoder: named sizes, the shapes of its tensors, their first values.

Tensors go by these names, each with `weight` and mostly `bias`:

    cnn.B.conv1, norm1, conv2, norm2   one block each, on [channels, time, frequency]; norms are over [bins, channels]
    rnn.L.forward|backward             LSTMs: input and recurrent matrices, gates in torch's order (i, f, g, o)
    dnn.L.linear, norm                 `norm.mean` and `norm.variance` where batch-norm keeps running statistics
    ctc                                the encoder's head
    embedding, attention, gru, readout, output     the decoder; gates in torch's order (r, z, n)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import MEL_COUNT, FeatureSettings
from sottovoce.models.checks import check_counts, check_probabilities, check_size, check_token_count
from sottovoce.models.log_mel import check_feature_settings

POOLING = 4  # frames that become one encoder step: 40 ms
KERNEL = 3
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The architecture and its loss. `tokens` counts the blank, which also begins and ends every text.

    The loss is mu·CE + (1 − mu)·CTC, in local training for the first `ctc_epochs` epochs, and CE
    alone afterwards; None is for ever. `as_released`: features are SpeechBrain's, and padding is part of the speech.
    Each mel filter is normalised by `feature_mean` and `feature_deviation` then or, without, in each utterance alone.
    `ears`, as saved models call them: how our own features are normalised; None is as everywhere.
    """

    tokens: int
    channels: tuple[int, ...] = (128, 200)
    rnn_layers: int = 5
    rnn_width: int = 1024
    dnn_layers: int = 2
    dnn_width: int = 1024
    embedding: int = 128
    decoder_width: int = 1024
    location_channels: int = 10
    location_reach: int = 100
    dropout: float = 0.15
    norm: Literal["layer", "batch"] = "layer"
    mu: float = 0.7
    label_smoothing: float = 0.1
    ctc_epochs: int | None = None
    as_released: bool = False
    feature_mean: tuple[float, ...] | None = None
    feature_deviation: tuple[float, ...] | None = None
    ears: FeatureSettings | None = None

    def __post_init__(self) -> None:
        check_feature_settings(self.ears, as_released=self.as_released)
        check_counts(self, "rnn_layers", "rnn_width", "dnn_layers", "dnn_width", "embedding", "decoder_width")
        check_counts(self, "location_channels", "location_reach")
        if not self.channels or min(self.channels) < 1 or MEL_COUNT >> len(self.channels) < 1:
            raise InputError(f"model: channels={self.channels}, expected one to six positive numbers")
        check_token_count(self.tokens)
        check_probabilities(self, "dropout")
        if self.norm not in ("layer", "batch"):
            raise InputError(f"model: norm={self.norm!r}, expected layer or batch")
        for name in ("mu", "label_smoothing"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise InputError(f"model: {name}={value}, expected a number in [0, 1]")
        for name in ("feature_mean", "feature_deviation"):
            if (values := getattr(self, name)) is not None and not (self.as_released and len(values) == MEL_COUNT):
                raise InputError(f"model: {len(values)} numbers as {name}, expected {MEL_COUNT}, and as_released")
        if not all(map(math.isfinite, (*(self.feature_mean or ()), *(self.feature_deviation or ())))):
            raise InputError("model: feature_mean or feature_deviation has a number that is not finite")
        if self.feature_deviation is not None and min(self.feature_deviation) <= 0:
            raise InputError("model: feature_deviation has a number that is not positive")
        if self.ctc_epochs is not None:
            check_counts(self, "ctc_epochs", least=0)

    @property
    def layer_count(self) -> int:
        return self.rnn_layers + self.dnn_layers

    @property
    def rnn_input(self) -> int:
        return (MEL_COUNT >> len(self.channels)) * self.channels[-1]


SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "channels": (8, 16),
        "rnn_layers": 2,
        "rnn_width": 96,
        "dnn_width": 96,
        "embedding": 32,
        "decoder_width": 96,
    },
    "small": {"channels": (32, 48), "rnn_layers": 3, "rnn_width": 256, "dnn_width": 256, "decoder_width": 256},
    "template": {"channels": (128,), "rnn_layers": 4, "rnn_width": 512, "dnn_width": 512, "decoder_width": 512},
    "gao": {},  # 158,907,410 parameters with 500 tokens
    "speechbrain": {"channels": (128, 200, 256)},
}


def named_settings(size: str, *, tokens: int, **changes: Any) -> Settings:
    """The settings of a named size, as they were released unless changed.

    >>> named_settings("template", tokens=250, dropout=0.0).rnn_input
    5120
    """
    check_size(size, SIZES, where="model: ")
    return Settings(**{**SIZES[size], "tokens": tokens, **changes})


def parameter_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, in the order of the network."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    before, bins = 1, MEL_COUNT
    for block, channels in enumerate(settings.channels):
        for number, inputs in ((1, before), (2, channels)):
            shapes[f"cnn.{block}.conv{number}.weight"] = (channels, inputs, KERNEL, KERNEL)
            shapes[f"cnn.{block}.conv{number}.bias"] = (channels,)
            shapes[f"cnn.{block}.norm{number}.weight"] = (bins, channels)
            shapes[f"cnn.{block}.norm{number}.bias"] = (bins, channels)
        before, bins = channels, bins // 2
    width, inputs = settings.rnn_width, settings.rnn_input
    for layer in range(settings.rnn_layers):
        for direction in DIRECTIONS:
            linear(f"rnn.{layer}.{direction}.input", inputs, 4 * width)
            linear(f"rnn.{layer}.{direction}.recurrent", width, 4 * width)
        inputs = 2 * width
    width = settings.dnn_width
    for layer in range(settings.dnn_layers):
        linear(f"dnn.{layer}.linear", inputs, width)
        kept = ("weight", "bias", "mean", "variance") if settings.norm == "batch" else ("weight", "bias")
        shapes |= {f"dnn.{layer}.norm.{name}": (width,) for name in kept}
        inputs = width
    linear("ctc", width, settings.tokens)
    decoder = settings.decoder_width
    shapes["embedding.weight"] = (settings.tokens, settings.embedding)
    linear("attention.key", width, decoder)
    linear("attention.query", decoder, decoder)
    shapes["attention.score.weight"] = (1, decoder)
    shapes["attention.places.weight"] = (settings.location_channels, 1, 2 * settings.location_reach + 1)
    linear("attention.location", settings.location_channels, decoder)
    linear("attention.value", width, decoder)
    linear("gru.input", settings.embedding + decoder, 3 * decoder)
    linear("gru.recurrent", decoder, 3 * decoder)
    linear("readout", 2 * decoder, decoder)
    linear("output", decoder, settings.tokens)
    return shapes


def running_statistics(settings: Settings) -> frozenset[str]:
    """Batch-norm's running means and variances: moved by what a step has seen, not by a gradient."""
    return frozenset(name for name in parameter_shapes(settings) if name.endswith((".mean", ".variance")))


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    """As SpeechBrain begins: torch's own first values, and orthogonal recurrent matrices."""
    shapes = parameter_shapes(settings)
    return {name: _first(name, shape, shapes, settings, generator) for name, shape in shapes.items()}


def _first(
    name: str,
    shape: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    settings: Settings,
    generator: torch.Generator,
) -> Tensor:
    stem, _, last = name.rpartition(".")
    if ".norm" in name:
        return torch.ones(shape) if last in ("weight", "variance") else torch.zeros(shape)
    if name == "embedding.weight":
        return torch.empty(shape).normal_(generator=generator)
    if last == "weight" and stem.endswith(".recurrent"):
        return nn.init.orthogonal_(torch.empty(shape), generator=generator)
    if stem.startswith(("rnn.", "gru.")):  # torch bounds all of a cell by its width, not by its inputs
        fan_in = settings.rnn_width if stem.startswith("rnn.") else settings.decoder_width
    else:
        fan_in = math.prod(shapes[f"{stem}.weight"][1:])
    limit = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)
