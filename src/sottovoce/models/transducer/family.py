"""The transducer as a family: what a recipe may choose of it, its loss, and how it is read off.

Shapes: U utterances, T encoder steps, L tokens of the longest text, D width, V outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import module, rnnt
from sottovoce.models.attention_search import Found, Search
from sottovoce.models.family import Family, Parameters, Recognition
from sottovoce.models.module import with_corrections
from sottovoce.models.speech_lstm.network import encode, heard, narrow
from sottovoce.models.speech_lstm.settings import Encoder, encoder_shapes
from sottovoce.models.transducer import search as searching
from sottovoce.models.transducer.network import SIZES, Settings, init, named_settings, parameter_shapes, predict
from sottovoce.models.transducer.stream import stream
from sottovoce.models.utterances import Features, Recordings


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size."""

    family: str = "transducer"
    size: str = "ramesh"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise InputError(f"size={self.size!r}, expected one of {', '.join(SIZES)}")

    def settings(self, *, tokens: int) -> Settings:
        return named_settings(self.size, tokens=tokens)


KINDS = {
    "encoder.dense": "encoder: dense layers",
    "encoder.lstm.input": "encoder: LSTM, input",
    "encoder.lstm.recurrent": "encoder: LSTM, recurrent",
    "embedding": "embedding of tokens",
    "predictor.input": "prediction network: LSTM, input",
    "predictor.recurrent": "prediction network: LSTM, recurrent",
    "output": "joint",
}


def corrected(name: str) -> bool:
    """Every matrix but what belongs to a single token."""
    return name.endswith(".weight") and not name.startswith("embedding.")


def inherited(other: Any, settings: Settings) -> frozenset[str]:
    """The encoder, from any family that has one of this kind; refused where it is another than these settings say."""
    encoder = getattr(other, "encoder", None)
    if not isinstance(encoder, Encoder):
        return frozenset()
    if encoder != settings.encoder:
        raise InputError(f"the model to start from has {encoder}, expected {settings.encoder}")
    return frozenset(encoder_shapes(encoder))


def layers(settings: Settings) -> int:
    return settings.encoder.layers + settings.predictor_layers


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    return None if settings.encoder.steps(samples) else "too short for one encoder step"


def draw(
    settings: Settings,
    utterances: Sequence[int],
    *,
    samples: Sequence[int],
    generator: torch.Generator,
    shared: torch.Generator | None = None,
) -> list[None]:
    """Chance decides nothing in this network."""
    return [None] * len(utterances)


def hear(recordings: Recordings, *, settings: Settings, dtype: torch.dtype = torch.float32) -> Features:
    return heard(recordings, settings=settings.encoder, dtype=dtype)


def loss(parameters: Parameters, features: Features, *, settings: Settings, draws: None) -> Tensor:
    """-log p(text | speech), the mean over utterances."""
    weights = with_corrections(parameters)
    encoded_UTD, lengths_U = encode(weights, features, settings=settings.encoder)
    predicted_ULD = predict(weights, features.tokens_UL, settings=settings)
    texts = (lengths_U, features.tokens_UL, features.token_lengths_U)
    output = (weights["output.weight"], weights["output.bias"])
    return rnnt.mean(rnnt.joint_losses(encoded_UTD, predicted_ULD, *output, *texts), lengths_U)


def encoded(parameters: Parameters, features: Features, *, settings: Settings) -> tuple[Tensor, Tensor]:
    return encode(with_corrections(parameters), features, settings=settings.encoder)


def search(parameters: Parameters, features: Features, *, settings: Settings, how: Search) -> list[list[Found]]:
    weights = with_corrections(parameters)
    encoded_UTD, lengths_U = encode(weights, features, settings=settings.encoder)
    return searching.search(weights, encoded_UTD, lengths_U, settings=settings, how=how)


def samples_per_frame(settings: Settings) -> int:
    return settings.encoder.step_samples


FAMILY = Family(
    name="transducer",
    Options=Options,
    Settings=Settings,
    tiny={"size": "tiny"},
    shapes=parameter_shapes,
    layers=layers,
    init=init,
    place=module.place,
    kinds=KINDS,
    corrected=corrected,
    of_tokens=frozenset({"embedding.weight", "output.weight", "output.bias"}),
    inherited=inherited,
    unusable=unusable,
    draw=draw,
    loss=loss,
    hear=hear,
    narrow=narrow,
    encode=encoded,
    recognition=Recognition(
        samples_per_frame=samples_per_frame,
        search=search,
        beam=Search(width=10, temperature=1.0, end_threshold=None, longest_shift=None, normalised=False),
        stream=stream,
        options=frozenset({"temperature"}),
    ),
)
