"""What there is to choose of contrastive predictive coding, and the shapes of its tensors.

encoder.…          that of `speech_lstm`, which other families inherit
prediction.L       W_k and b_k for k = L + 1, from a context to the step that comes k later; of no use afterwards
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import speech_lstm
from sottovoce.models.checks import check_counts
from sottovoce.models.speech_lstm import EncoderSettings, encoder_shapes, linear_shapes

MOST_CANDIDATES = 65_536  # of one step, each of which is drawn and compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`ahead` is K, the furthest step that is predicted; `candidates` is N, the true step among them."""

    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    ahead: int = 12
    candidates: int = 128

    def __post_init__(self) -> None:
        check_counts(self, "ahead")
        check_counts(self, "candidates", least=2)
        if self.candidates > MOST_CANDIDATES:
            raise InputError(f"model: candidates={self.candidates}, expected at most {MOST_CANDIDATES:,}")

    @property
    def layer_count(self) -> int:
        return self.encoder.layers + self.ahead

    @property
    def scale(self) -> float:
        """What scores are multiplied by: 1/κ."""
        return 1 / math.sqrt(self.encoder.dense_width)


SIZES = speech_lstm.SIZES


def parameter_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, in the order of the network."""
    shapes = encoder_shapes(settings.encoder)
    for layer in range(settings.ahead):
        shapes |= linear_shapes(f"prediction.{layer}", settings.encoder.lstm_width, settings.encoder.dense_width)
    return shapes


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    return speech_lstm.first_values(parameter_shapes(settings), generator=generator)


def predictors(weights: Mapping[str, Tensor], *, settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """W_k and b_k, for k from 1 on."""
    names = (f"prediction.{layer}" for layer in range(settings.ahead))
    return [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names]
