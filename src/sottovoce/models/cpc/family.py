"""Contrastive predictive coding as a family: it reads no text, writes nothing down, and hands its encoder on.

Shapes: U utterances, T steps, D width, R rivals of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.models import module
from sottovoce.models.cpc import shared as sharing
from sottovoce.models.cpc import stacked as stacking
from sottovoce.models.cpc.contrast import contrasted
from sottovoce.models.cpc.loss import accuracies, draw_places, losses
from sottovoce.models.cpc.settings import SIZES, Settings, init, parameter_shapes
from sottovoce.models.family import Family, Parameters, Stacked
from sottovoce.models.module import with_corrections
from sottovoce.models.speech_lstm import network
from sottovoce.models.speech_lstm.network import heard, narrow
from sottovoce.models.utterances import Features, Recordings


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size of the encoder, and what the paper leaves open; see `Settings`."""

    family: str = "cpc"
    size: str = "ramesh"
    ahead: int = 12
    candidates: int = 128

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise InputError(f"size={self.size!r}, expected one of {', '.join(SIZES)}")
        self.settings()

    def settings(self, *, tokens: int = 1) -> Settings:
        return Settings(encoder=SIZES[self.size], ahead=self.ahead, candidates=self.candidates)


KINDS = {
    "encoder.dense": "encoder: dense layers",
    "encoder.lstm.input": "encoder: LSTM, input",
    "encoder.lstm.recurrent": "encoder: LSTM, recurrent",
    "prediction": "predictions of later steps",
}


def layers(settings: Settings) -> int:
    return settings.encoder.layers + settings.ahead


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    """Every distance must have a step to predict, or utterances would be learned from unequally."""
    return None if settings.encoder.steps(samples) > settings.ahead else "too short for all predictions"


def draw(
    settings: Settings,
    utterances: Sequence[int],
    *,
    samples: Sequence[int],
    generator: torch.Generator,
    shared: torch.Generator | None = None,
) -> list[Tensor]:
    """The places of each step's rivals."""
    return [
        draw_places(count, max(settings.encoder.steps(length), 1), settings.candidates - 1, generator=generator)
        for count, length in zip(utterances, samples, strict=True)
    ]


def hear(recordings: Recordings, *, settings: Settings, dtype: torch.dtype = torch.float32) -> Features:
    return heard(recordings, settings=settings.encoder, dtype=dtype)


def loss(parameters: Parameters, features: Features, *, settings: Settings, draws: Tensor | None) -> Tensor:
    """The mean over utterances."""
    return losses(*contrasted(parameters, features, settings=settings, draws=draws), scale=settings.scale).mean()


def figures(parameters: Parameters, features: Features, *, settings: Settings) -> dict[str, Tensor]:
    """Besides the loss: how often the true step is found, and how often by who guesses."""
    found = contrasted(parameters, features, settings=settings, draws=None)
    loss = losses(*found, scale=settings.scale).mean()
    return {"loss": loss, "accuracy": accuracies(*found).mean(), "chance": loss.new_tensor(1 / settings.candidates)}


def encode(parameters: Parameters, features: Features, *, settings: Settings) -> tuple[Tensor, Tensor]:
    return network.encode(with_corrections(parameters), features, settings=settings.encoder)


SHARED: Stacked[Settings, Tensor] = Stacked(join=sharing.join, losses=sharing.losses, bytes=sharing.bytes_of)
STACKED: Stacked[Settings, Tensor] = Stacked(join=sharing.join, losses=stacking.losses, bytes=stacking.bytes_of)

FAMILY = Family(
    name="cpc",
    Options=Options,
    Settings=Settings,
    tiny={"size": "tiny"},
    shapes=parameter_shapes,
    layers=layers,
    init=init,
    place=module.place,
    kinds=KINDS,
    corrected=module.corrected,
    of_tokens=frozenset(),
    texts=False,
    unusable=unusable,
    draw=draw,
    loss=loss,
    figures=figures,
    hear=hear,
    narrow=narrow,
    mask=None,  # what is masked would have to be predicted, and one masked step is like another
    encode=encode,
    stacked=STACKED,
    shared=SHARED,
)
