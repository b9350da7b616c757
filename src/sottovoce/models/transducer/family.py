"""The transducer as a family: what a recipe may choose of it, its loss, and how it is read off.

Shapes: U utterances, T encoder steps, L tokens of the longest text, D width, V outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import Features
from sottovoce.models import rnnt
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.checks import check_size
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import Family, Inspection, Parameters, Presentation, Recognition, Transfer
from sottovoce.models.speech_lstm import FRONT_END, EncoderSettings, Input, encode_features, encoder_shapes
from sottovoce.models.trainable import with_corrections
from sottovoce.models.transducer.network import (
    SIZES,
    Prediction,
    Settings,
    init,
    named_settings,
    parameter_shapes,
    predict,
)
from sottovoce.models.transducer.onnx import EXPORT
from sottovoce.models.transducer.search import recognise_stream, search_transducer


@dataclass(frozen=True, kw_only=True)
class Options:
    """A named size, and what differs from the paper's: see `speech_lstm` for the `input`, `network` for the rest."""

    family: str = "transducer"
    size: str = "ramesh"
    input: Input | None = None  # None is not written, so that older recipes are written as they always were
    prediction: Prediction | None = None  # likewise

    def __post_init__(self) -> None:
        check_size(self.size, SIZES)

    def settings(self, *, tokens: int) -> Settings:
        return named_settings(
            self.size, tokens=tokens, input=self.input or "spectra", prediction=self.prediction or "lstm"
        )


KINDS = {
    "encoder.dense": "encoder: dense layers",
    "encoder.lstm.input": "encoder: LSTM, input",
    "encoder.lstm.recurrent": "encoder: LSTM, recurrent",
    "embedding": "embedding of tokens",
    "predictor.input": "prediction network: LSTM, input",
    "predictor.recurrent": "prediction network: LSTM, recurrent",
    "predictor.context": "prediction network: the last two tokens",
    "predictor.projection": "prediction network: projection",
    "output": "joint",
}


def is_lora_target(name: str) -> bool:
    """Every matrix but what belongs to a single token."""
    return name.endswith(".weight") and not name.startswith("embedding.")


def inherited(other: Any, settings: Settings) -> frozenset[str]:
    """The encoder, from any family that has one of this kind; refused where it is another than these settings say."""
    encoder = getattr(other, "encoder", None)
    if not isinstance(encoder, EncoderSettings):
        return frozenset()
    if encoder != settings.encoder:
        raise InputError(f"the model to start from has {encoder}, expected {settings.encoder}")
    return frozenset(encoder_shapes(encoder))


def unusable(settings: Settings, samples: int, tokens: Sequence[int]) -> str | None:
    return None if settings.encoder.steps(samples) else "too short for one encoder step"


def draw(settings: Settings, utterances: Sequence[int], **_: Any) -> list[None]:
    """Chance decides nothing in this network."""
    return [None] * len(utterances)


def loss(parameters: Parameters, features: Features, *, settings: Settings, draws: None) -> Tensor:
    """-log p(text | speech), the mean over utterances."""
    weights = with_corrections(parameters)
    encoded_UTD, lengths_U = encode_features(weights, features, settings=settings)
    predicted_ULD = predict(weights, features.tokens_UL, settings=settings)
    texts = (lengths_U, features.tokens_UL, features.token_lengths_U)
    output = (weights["output.weight"], weights["output.bias"])
    return rnnt.mean(rnnt.joint_losses(encoded_UTD, predicted_ULD, *output, *texts), lengths_U)


def search(
    parameters: Parameters, features: Features, *, settings: Settings, how: SearchOptions
) -> list[list[Hypothesis]]:
    weights = with_corrections(parameters)
    encoded_UTD, lengths_U = encode_features(weights, features, settings=settings)
    return search_transducer(weights, encoded_UTD, lengths_U, settings=settings, how=how)


FAMILY = Family(
    name="transducer",
    Options=Options,
    Settings=Settings,
    smoke_options={"size": "tiny"},
    shapes=parameter_shapes,
    init=init,
    unusable=unusable,
    draw=draw,
    loss=loss,
    front_end=FRONT_END,
    recognition=Recognition(
        samples_per_frame=attrgetter("encoder.step_samples"),
        search=search,
        beam=SearchOptions(width=10, temperature=1.0, end_threshold=None, longest_shift=None, normalised=False),
        stream=recognise_stream,
        options=frozenset({"temperature"}),
    ),
    presentation=Presentation(kinds=KINDS),
    transfer=Transfer(
        token_tensors=frozenset({"embedding.weight", "output.weight", "output.bias"}),
        inherited=inherited,
        is_lora_target=is_lora_target,
        layer_count=attrgetter("layer_count"),
    ),
    inspection=Inspection(encode=encode_features),
    export=EXPORT,
)
