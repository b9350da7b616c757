"""The transducer: its settings, its prediction network, its joint.

    speech ─► encoder ─► f ─┐
                            ├─► tanh(f + g) ─► output ─► the blank: next step; a token: write it, and ask again
    tokens ─► embedding ─► LSTMs ─► g ─┘

Output 0 is the blank, and what stands before a text's first token.

Shapes: U utterances, B rows (utterances, or hypotheses of a search), T encoder steps, L tokens, D width, V outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.models import lstm, speech_lstm
from sottovoce.models.checks import check_counts, check_size, check_token_count
from sottovoce.models.ctc import BLANK
from sottovoce.models.family import Parameters
from sottovoce.models.lstm import LstmState
from sottovoce.models.speech_lstm import EncoderSettings, encoder_shapes, linear_shapes, lstm_cells, lstm_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The architecture. `tokens` counts the blank. The prediction network is as wide as the encoder, to be added."""

    tokens: int
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    embedding: int = 1024
    predictor_layers: int = 2

    def __post_init__(self) -> None:
        check_token_count(self.tokens)
        check_counts(self, "embedding", "predictor_layers")

    @property
    def layer_count(self) -> int:
        return self.encoder.layers + self.predictor_layers


# With an encoder of the same name; 71,120,837 parameters with 2,501 outputs as in the paper.
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"embedding": 32, "predictor_layers": 1},
    "small": {"embedding": 128, "predictor_layers": 1},
    "ramesh": {},
}


def named_settings(size: str, *, tokens: int) -> Settings:
    """The settings of a named size.

    >>> named_settings("ramesh", tokens=2501).encoder.lstm_width
    1024
    """
    check_size(size, SIZES, where="model: ")
    return Settings(tokens=tokens, encoder=speech_lstm.SIZES[size], **SIZES[size])


def parameter_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, in the order of the network."""
    width = settings.encoder.lstm_width
    return {
        **encoder_shapes(settings.encoder),
        "embedding.weight": (settings.tokens, settings.embedding),
        **lstm_shapes("predictor", settings.embedding, width, layers=settings.predictor_layers),
        **linear_shapes("output", width, settings.tokens),
    }


def init(settings: Settings, *, generator: torch.Generator) -> dict[str, Tensor]:
    return speech_lstm.first_values(parameter_shapes(settings), generator=generator)


def predict(weights: Parameters, tokens_UL: Tensor, *, settings: Settings) -> Tensor:
    """g at every place of the texts, before the first token too: [U, L+1, D]."""
    given_UL = F.pad(tokens_UL, (1, 0), value=BLANK).to(weights["embedding.weight"].device, non_blocking=True)
    return predict_next(weights, given_UL, settings=settings)[0]


def predict_next(
    weights: Parameters, tokens_BL: Tensor, state: LstmState | None = None, *, settings: Settings
) -> tuple[Tensor, LstmState]:
    """g behind each of `tokens_BL`, and the state behind the last of them."""
    given_BLE = F.embedding(tokens_BL, weights["embedding.weight"])
    return lstm.forwards(given_BLE, lstm_cells(weights, "predictor", layers=settings.predictor_layers), state)


def joint(weights: Parameters, encoded: Tensor, predicted: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the outputs, where f and g are of one place or can be spread over it."""
    scores = F.linear((encoded + predicted).tanh(), weights["output.weight"], weights["output.bias"])
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return (precise if temperature == 1 else precise / temperature).log_softmax(dim=-1)
