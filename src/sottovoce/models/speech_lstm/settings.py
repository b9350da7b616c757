"""The encoder's architecture: how large it is, the shapes of its tensors, their first values.

Tensors go by these names in every family that has it, each with `weight` and `bias`:

    encoder.dense.L              each followed by a ReLU
    encoder.lstm.L.input|recurrent    gates in torch's order (i, f, g, o)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sottovoce.audio.features import BIN_COUNT, HOP_SAMPLES, frame_count
from sottovoce.base.errors import InputError
from sottovoce.models.lstm import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
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

    def __post_init__(self) -> None:
        for name in ("stack", "dense_layers", "dense_width", "lstm_layers", "lstm_width"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"model: {name}={value}, expected at least 1")
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

    def steps(self, samples: int) -> int:
        """How many steps an utterance of so many samples has: whole stacks only."""
        return frame_count(samples) // self.stack


SIZES: Mapping[str, Encoder] = {
    "tiny": Encoder(dense_layers=2, dense_width=64, lstm_layers=2, lstm_width=96),
    "small": Encoder(dense_width=256, lstm_layers=3, lstm_width=384),
    "ramesh": Encoder(),  # 49,202,688 parameters
}


def encoder_shapes(settings: Encoder) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, in the order of the network."""
    shapes: dict[str, tuple[int, ...]] = {}
    inputs = settings.stack * BIN_COUNT
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


def cell_names(stem: str, *, layers: int) -> list[tuple[str, ...]]:
    """The names of each layer's weights, in the order of a `lstm.Cell`."""
    return [tuple(f"{stem}.{layer}.{name}" for name in NAMES) for layer in range(layers)]
