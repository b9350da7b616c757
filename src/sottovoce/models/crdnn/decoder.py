"""The decoder: a GRU that attends to the encoder's steps by content and by where it attended before.

    token ─► embedding ─┬─► GRU ─► query ─► attention over memory ─► context ─┬─► readout ─► output
    last context ───────┘     └───────────────────────────────────────────────┘

Shapes: B rows (utterances, or hypotheses of a search), T encoder steps, L tokens of a text, D width, A attention's
width, V tokens.

Token 0 is the blank, and begins and ends every text. The attention of the step before is looked at, not trained
through, as in the released code. `start_decoder` and `step_decoder` are what a search calls.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.models import ctc
from sottovoce.models.crdnn.settings import Settings
from sottovoce.models.ctc import BLANK
from sottovoce.models.family import Parameters
from sottovoce.models.trainable import with_corrections

BEGIN = END = BLANK


class DecoderState(NamedTuple):
    """What a row remembers; rows may be taken by `index_select` of every tensor. `keys_BTA` never change."""

    hidden_BD: Tensor
    context_BA: Tensor
    attention_BT: Tensor
    keys_BTA: Tensor


def start_decoder(parameters: Parameters, memory_BTD: Tensor, lengths_B: Tensor, *, settings: Settings) -> DecoderState:
    """Before the first token: attention is spread evenly over each row's own steps."""
    weights = with_corrections(parameters)
    lengths_B1 = lengths_B.to(memory_BTD.device, non_blocking=True).clamp(min=1)[:, None]
    zeros_BD = memory_BTD.new_zeros(len(memory_BTD), settings.decoder_width)
    return DecoderState(
        hidden_BD=zeros_BD,
        context_BA=zeros_BD,
        attention_BT=_inside(memory_BTD, lengths_B1) / lengths_B1.to(memory_BTD.dtype),
        keys_BTA=F.linear(memory_BTD, weights["attention.key.weight"], weights["attention.key.bias"]),
    )


def step_decoder(
    parameters: Parameters,
    memory_BTD: Tensor,
    lengths_B: Tensor,
    tokens_B: Tensor,
    state: DecoderState,
    *,
    settings: Settings,
) -> tuple[Tensor, DecoderState, Tensor]:
    """One token further: log-probabilities [B, V] of what follows `tokens_B`, the next state, the attention [B, T]."""
    weights = with_corrections(parameters)
    lengths_B1 = lengths_B.to(memory_BTD.device, non_blocking=True).clamp(min=1)[:, None]
    outside_BT = ~_inside(memory_BTD, lengths_B1)
    state = _advance(weights, memory_BTD, outside_BT, F.embedding(tokens_B, weights["embedding.weight"]), state)
    read_BD = torch.cat([state.context_BA, state.hidden_BD], dim=-1)
    return _written(weights, read_BD), state, state.attention_BT


def teacher_forced(
    parameters: Parameters,
    memory_UTD: Tensor,
    lengths_U: Tensor,
    tokens_UL: Tensor,
    *,
    settings: Settings,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [U, L+1, V] of each token and of the end, given those before, and the attention [U, L+1, T]."""
    weights = with_corrections(parameters)
    lengths_U, tokens_UL = (own.to(memory_UTD.device, non_blocking=True) for own in (lengths_U, tokens_UL))
    state = start_decoder(weights, memory_UTD, lengths_U, settings=settings)
    outside_UT = ~_inside(memory_UTD, lengths_U.clamp(min=1)[:, None])
    given_ULE = F.embedding(F.pad(tokens_UL, (1, 0), value=BEGIN), weights["embedding.weight"])
    read, attended = [], []
    for given_UE in given_ULE.unbind(1):
        state = _advance(weights, memory_UTD, outside_UT, given_UE, state, dropout=dropout)
        read.append(torch.cat([state.context_BA, state.hidden_BD], dim=-1))
        attended.append(state.attention_BT)
    return _written(weights, torch.stack(read, dim=1)), torch.stack(attended, dim=1)


def _inside(memory_BTD: Tensor, lengths_B1: Tensor) -> Tensor:
    return torch.arange(memory_BTD.shape[1], device=memory_BTD.device) < lengths_B1


def _advance(
    weights: Parameters,
    memory_BTD: Tensor,
    outside_BT: Tensor,
    given_BE: Tensor,
    state: DecoderState,
    *,
    dropout: float = 0.0,
) -> DecoderState:
    # Drawn step by step: steps behind a text change nothing of what is drawn for it.
    given_BD = F.dropout(torch.cat([given_BE, state.context_BA], dim=-1), dropout, training=dropout > 0)
    hidden_BD = _gru_cell(
        given_BD,
        state.hidden_BD,
        *(weights[f"gru.{part}.{kind}"] for kind in ("weight", "bias") for part in ("input", "recurrent")),
    )
    places = weights["attention.places.weight"]
    places_BCT = F.conv1d(state.attention_BT.detach()[:, None], places, padding=places.shape[-1] // 2)
    location_BTA = _linear(weights, "attention.location", places_BCT.transpose(1, 2))
    query_B1A = _linear(weights, "attention.query", hidden_BD)[:, None]
    attended_BTA = torch.tanh(state.keys_BTA + query_B1A + location_BTA)
    scores_BT = F.linear(attended_BTA, weights["attention.score.weight"])[:, :, 0]
    attention_BT = scores_BT.masked_fill(outside_BT, -torch.inf).softmax(dim=-1)
    context_BD = torch.bmm(attention_BT[:, None], memory_BTD)[:, 0]
    return DecoderState(hidden_BD, _linear(weights, "attention.value", context_BD), attention_BT, state.keys_BTA)


def _written(weights: Parameters, read: Tensor) -> Tensor:
    return ctc.log_softmax(_linear(weights, "output", _linear(weights, "readout", read)))


def _linear(weights: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


_gru_cell: Any = torch._VF.gru_cell  # what nn.GRUCell calls
