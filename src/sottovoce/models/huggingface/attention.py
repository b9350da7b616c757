"""Attention with an embedding of the distance between two frames (Wav2Vec2-BERT), in less memory.

Scores are (q·k + q·e) times a scale, with e the embedding of how far two frames are apart. transformers keeps the
second term, a matrix [T, T] for every head of every utterance, and the embeddings of all pairs of frames. Here both are
computed again on the way back: queries, keys and values are what is kept.

Shapes: B utterances, H heads, T frames, d numbers of a head, E distances, X = B·H.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def adapt_attention(module: nn.Module, kind: str) -> None:
    """Let the attention layers of `module` keep less, where its `kind` has such distances."""
    if kind != "wav2vec2-bert":
        return
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    for layer in module.modules():
        if isinstance(layer, Wav2Vec2BertSelfAttention) and layer.position_embeddings_type == "relative_key":
            layer.forward = partial(_attend, layer)


def _attend(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
    """The layer's `forward`, which has no weights to return."""
    batch, frames, _width = hidden_states.shape
    q_BHTd, k_BHTd, v_BHTd = (
        project(hidden_states).view(batch, frames, layer.num_heads, layer.head_size).transpose(1, 2)
        for project in (layer.linear_q, layer.linear_k, layer.linear_v)
    )
    places_T = torch.arange(frames, device=hidden_states.device)
    left, right = layer.left_max_position_embeddings, layer.right_max_position_embeddings
    places_TT = (places_T - places_T[:, None]).clamp(-left, right) + left
    found_BHTd = attend_by_distance(
        q_BHTd,
        k_BHTd,
        v_BHTd,
        layer.distance_embedding.weight,
        places_TT=places_TT,
        mask=attention_mask,
        scale=layer.head_size**-0.5,
        dropout=layer.dropout.p if layer.training else 0.0,
    )
    return layer.linear_out(found_BHTd.transpose(1, 2).reshape(batch, frames, -1)), None


def attend_by_distance(
    q_BHTd: Tensor,
    k_BHTd: Tensor,
    v_BHTd: Tensor,
    embedding_Ed: Tensor,
    *,
    places_TT: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """What every frame takes from the others, [B, H, T, d].

    `places_TT` has the row of the embedding for two frames. `mask` is True where a frame may be looked at, or a number
    that is added to its score.
    """
    # Computed again, dropout would be drawn again; and an exported graph needs no way back.
    if dropout or torch.compiler.is_exporting():
        bias_BHTT = torch.einsum("bhqd,qkd->bhqk", q_BHTd, embedding_Ed[places_TT]) * scale
        bias_BHTT = _masked(bias_BHTT, mask)
        return functional.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, bias_BHTT, dropout, scale=scale)
    found: Tensor = _Attention.apply(q_BHTd, k_BHTd, v_BHTd, embedding_Ed, places_TT, mask, scale)  # type: ignore[no-untyped-call]
    return found


def _masked(bias_BHTT: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias_BHTT
    if mask.dtype == torch.bool:
        return bias_BHTT.masked_fill(~mask, torch.finfo(bias_BHTT.dtype).min)
    return bias_BHTT + mask


def _bias(q_BHTd: Tensor, table_TTd: Tensor, mask: Tensor | None) -> Tensor:
    """The term of distances [B, H, T, T]: for each frame one product with the embeddings of its distances."""
    batch, heads, frames, _ = q_BHTd.shape
    bias_XTT = q_BHTd.new_empty(batch * heads, frames, frames)
    torch.bmm(q_BHTd.flatten(0, 1).transpose(0, 1), table_TTd.mT, out=bias_XTT.transpose(0, 1))
    return _masked(bias_XTT.view(batch, heads, frames, frames), mask)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTd: Tensor,
        k_BHTd: Tensor,
        v_BHTd: Tensor,
        embedding_Ed: Tensor,
        places_TT: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_BHTd, k_BHTd, v_BHTd, embedding_Ed, places_TT, mask)
        ctx.scale = scale
        bias_BHTT = _bias(q_BHTd, embedding_Ed[places_TT] * scale, mask)
        return functional.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, bias_BHTT, scale=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTd: Tensor) -> tuple[Tensor | None, ...]:
        *given, embedding_Ed, places_TT, mask = ctx.saved_tensors
        scale, table_TTd = ctx.scale, embedding_Ed[places_TT] * ctx.scale
        inputs = [own.detach().requires_grad_() for own in (*given, _bias(given[0], table_TTd, mask))]
        with torch.enable_grad():
            q_BHTd, k_BHTd, v_BHTd, bias_BHTT = inputs
            found_BHTd = functional.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, bias_BHTT, scale=scale)
        dq_BHTd, dk_BHTd, dv_BHTd, dbias_BHTT = torch.autograd.grad(found_BHTd, inputs, gradient_BHTd)
        if mask is not None and mask.dtype == torch.bool:
            dbias_BHTT = dbias_BHTT.masked_fill(~mask, 0.0)
        dbias_TXT = dbias_BHTT.flatten(0, 1).transpose(0, 1)
        dq_BHTd = dq_BHTd + torch.bmm(dbias_TXT, table_TTd).transpose(0, 1).view(dq_BHTd.shape)
        d_embedding_Ed = None
        if ctx.needs_input_grad[3]:
            dtable_TTd = torch.bmm(dbias_TXT.mT, given[0].flatten(0, 1).transpose(0, 1)) * scale
            d_embedding_Ed = torch.ops.aten.embedding_dense_backward(
                dtable_TTd, places_TT, len(embedding_Ed), -1, False
            )
        return dq_BHTd, dk_BHTd, dv_BHTd, d_embedding_Ed, None, None, None
