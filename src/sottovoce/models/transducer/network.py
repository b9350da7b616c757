"""The transducer: its settings, its prediction network, its joint.

    speech ─► encoder ─► f ─┐
                            ├─► tanh(f + g) ─► output ─► the blank: next step; a token: write it, and ask again
    tokens ─► embedding ─► LSTMs ─► g ─┘

Output 0 is the blank, and what stands before a text's first token. A `stateless` prediction network reads the last two
tokens alone (Ghodsi et al. 2020), as other runtimes have it:

    the last two tokens ─► embeddings side by side ─► dense layer, ReLU ─► linear layer ─► g

Shapes: U utterances, B rows (utterances, or hypotheses of a search), T encoder steps, L tokens, E width of an
embedding, D width, V outputs, C tokens before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.models import lstm, speech_lstm
from sottovoce.models.checks import check_counts, check_size, check_token_count
from sottovoce.models.ctc import BLANK
from sottovoce.models.family import Parameters
from sottovoce.models.lstm import LstmState
from sottovoce.models.speech_lstm import (
    EncoderSettings,
    Input,
    encoder_shapes,
    linear_shapes,
    lstm_cells,
    lstm_shapes,
    named_encoder,
)

Prediction = Literal["lstm", "stateless"]
PredictionState = tuple[Tensor, ...]  # of rows, along the second axis: of LSTMs [layers, B, D], or tokens [C, B]
CONTEXT = 2  # tokens that a stateless prediction network reads
MOST_AT_ONCE = 5  # tokens in one step: nobody says more in 30 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The architecture. `tokens` counts the blank. The prediction network is as wide as the encoder, to be added."""

    tokens: int
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    embedding: int = 1024
    predictor_layers: int = 2  # of LSTMs
    prediction: Prediction = "lstm"

    def __post_init__(self) -> None:
        check_token_count(self.tokens)
        check_counts(self, "embedding", "predictor_layers")

    @property
    def is_stateless(self) -> bool:
        return self.prediction == "stateless"

    @property
    def layer_count(self) -> int:
        return self.encoder.layers + (2 if self.is_stateless else self.predictor_layers)

    @property
    def most_at_once(self) -> int:
        """The most tokens that a search writes in one step; of a stateless network one, as other runtimes search."""
        return 1 if self.is_stateless else MOST_AT_ONCE


# With an encoder of the same name; 71,120,837 parameters with 2,501 outputs as in the paper.
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"embedding": 32, "predictor_layers": 1},
    "small": {"embedding": 128, "predictor_layers": 1},
    "ramesh": {},
}


def named_settings(size: str, *, tokens: int, input: Input = "spectra", prediction: Prediction = "lstm") -> Settings:
    """The settings of a named size.

    >>> named_settings("ramesh", tokens=2501).encoder.lstm_width
    1024
    """
    check_size(size, SIZES, where="model: ")
    return Settings(tokens=tokens, encoder=named_encoder(size, input=input), prediction=prediction, **SIZES[size])


def parameter_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, in the order of the network."""
    width = settings.encoder.lstm_width
    return {
        **encoder_shapes(settings.encoder),
        "embedding.weight": (settings.tokens, settings.embedding),
        **_predictor_shapes(settings),
        **linear_shapes("output", width, settings.tokens),
    }


def _predictor_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    embedding, width = settings.embedding, settings.encoder.lstm_width
    if not settings.is_stateless:
        return lstm_shapes("predictor", embedding, width, layers=settings.predictor_layers)
    return {
        **linear_shapes("predictor.context", CONTEXT * embedding, embedding),
        **linear_shapes("predictor.projection", embedding, width),
    }


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    return speech_lstm.first_values(parameter_shapes(settings), generator=generator)


def predict(weights: Parameters, tokens_UL: Tensor, *, settings: Settings) -> Tensor:
    """g at every place of the texts, before the first token too: [U, L+1, D]."""
    given_UL = F.pad(tokens_UL, (1, 0), value=BLANK).to(weights["embedding.weight"].device, non_blocking=True)
    return predict_next(weights, given_UL, settings=settings)[0]


def predict_next(
    weights: Parameters, tokens_BL: Tensor, state: PredictionState | None = None, *, settings: Settings
) -> tuple[Tensor, PredictionState]:
    """g behind each of `tokens_BL`, and the state behind the last of them."""
    if settings.is_stateless:
        before_BC = tokens_BL.new_full((len(tokens_BL), CONTEXT - 1), BLANK) if state is None else state[0].T
        given_BL = torch.cat([before_BC, tokens_BL], dim=1)
        return predict_from_context(weights, given_BL), (given_BL[:, 1 - CONTEXT :].T,)
    given_BLE = F.embedding(tokens_BL, weights["embedding.weight"])
    before = None if state is None else LstmState(*state)
    return lstm.forwards(given_BLE, lstm_cells(weights, "predictor", layers=settings.predictor_layers), before)


def predict_from_context(weights: Parameters, given_BL: Tensor) -> Tensor:
    """g of a stateless network behind each token that has another before it: [B, L-1, D]."""
    embedded_BLE = F.embedding(given_BL, weights["embedding.weight"])
    pairs_BLE = torch.cat([embedded_BLE[:, :-1], embedded_BLE[:, 1:]], dim=2)
    context_BLE = F.linear(pairs_BLE, weights["predictor.context.weight"], weights["predictor.context.bias"]).relu()
    return F.linear(context_BLE, weights["predictor.projection.weight"], weights["predictor.projection.bias"])


def joint(weights: Parameters, encoded: Tensor, predicted: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the outputs, where f and g are of one place or can be spread over it."""
    scores = F.linear((encoded + predicted).tanh(), weights["output.weight"], weights["output.bias"])
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return (precise if temperature == 1 else precise / temperature).log_softmax(dim=-1)
