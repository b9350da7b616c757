"""Contrastive predictive coding as a family: it reads no text, writes no text, and hands its encoder on.

Shapes: U utterances, T steps, D width, R rivals of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.models.checks import check_size
from sottovoce.models.cpc.loss import accuracies, contrast, contrastive_losses, draw_places
from sottovoce.models.cpc.settings import SIZES, Settings, init, parameter_shapes
from sottovoce.models.cpc.stacked import join_draws, shared_bytes, shared_losses, stacked_bytes, stacked_losses
from sottovoce.models.family import Family, Inspection, Parameters, Presentation, Stacked, Stacking, Training, Transfer
from sottovoce.models.speech_lstm import FRONT_END, Input, encode_features, named_encoder


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size of the encoder, and what the paper leaves open; see `Settings`."""

    family: str = "cpc"
    size: str = "ramesh"
    ahead: int = 12
    candidates: int = 128
    input: Input | None = None  # None is not written, so that older recipes are written as they always were

    def __post_init__(self) -> None:
        check_size(self.size, SIZES)
        self.settings()

    def settings(self, *, tokens: int = 1) -> Settings:
        encoder = named_encoder(self.size, input=self.input or "spectra")
        return Settings(encoder=encoder, ahead=self.ahead, candidates=self.candidates)


KINDS = {
    "encoder.dense": "encoder: dense layers",
    "encoder.lstm.input": "encoder: LSTM, input",
    "encoder.lstm.recurrent": "encoder: LSTM, recurrent",
    "prediction": "predictions of later steps",
}


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    """Every distance must have a step to predict, or utterances would be learned from unequally."""
    return None if settings.encoder.steps(samples) > settings.ahead else "too short for all predictions"


def draw(
    settings: Settings, utterances: Sequence[int], *, samples: Sequence[int], generator: torch.Generator, **_: Any
) -> list[Tensor]:
    """The places of each step's rivals."""
    return [
        draw_places(count, max(settings.encoder.steps(length), 1), settings.candidates - 1, generator=generator)
        for count, length in zip(utterances, samples, strict=True)
    ]


def loss(parameters: Parameters, features: Features, *, settings: Settings, draws: Tensor | None) -> Tensor:
    """The mean over utterances."""
    return contrastive_losses(
        *contrast(parameters, features, settings=settings, draws=draws), scale=settings.scale
    ).mean()


def measure(parameters: Parameters, features: Features, *, settings: Settings) -> dict[str, Tensor]:
    """Besides the loss: how often the true step is found, and how often by guessing."""
    found = contrast(parameters, features, settings=settings, draws=None)
    loss = contrastive_losses(*found, scale=settings.scale).mean()
    return {"loss": loss, "accuracy": accuracies(*found).mean(), "chance": loss.new_tensor(1 / settings.candidates)}


FAMILY: Family[Settings, Tensor] = Family(
    name="cpc",
    Options=Options,
    Settings=Settings,
    smoke_options={"size": "tiny"},
    shapes=parameter_shapes,
    init=init,
    unusable=unusable,
    draw=draw,
    loss=loss,
    front_end=replace(
        FRONT_END, mask=None
    ),  # what is masked would have to be predicted, and all masked steps are equal
    stacking=Stacking(
        stacked=Stacked(join=join_draws, losses=stacked_losses, bytes=stacked_bytes),
        shared=Stacked(join=join_draws, losses=shared_losses, bytes=shared_bytes),
    ),
    presentation=Presentation(kinds=KINDS),
    transfer=Transfer(layer_count=attrgetter("layer_count")),
    training=Training(needs_text=False),
    inspection=Inspection(measure=measure, encode=encode_features),
)
