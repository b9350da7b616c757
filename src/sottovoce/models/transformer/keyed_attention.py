"""Attention within segments, with dropout of its weights from a key for each client of a stack. Triton's only.

The kernels of torch and of FlashAttention know one seed a call, and count segments from the first one of the stack: a
client's masks would hang on who stands before it. Here a mask follows from the client's key, the head, and the query
and the key frame within the client's own row. Gradients are added in a fixed order, so that they repeat to the bit.

Shapes: F frames of all rows, N rows of equally many frames, H heads, d channels of a head, S segments.
"""

from typing import Any

import torch
from torch import Tensor


def keyed_attention(qkv_F3Hd: Tensor, keys_N: Tensor, *, ends: Tensor, longest: int, dropout: float) -> Tensor:
    """[F, 3, H, d] → [F, H, d]. `ends` [S + 1] are 0 and the segments' ends, of which none is longer than `longest`.

    The segments cover all frames, and none spans two rows. p is rounded to a 65,536th.
    """
    mixed_FHd: Tensor = _attend(qkv_F3Hd, keys_N, ends, longest, dropout)[0]
    return mixed_FHd


@torch.library.custom_op("sottovoce::keyed_attention", mutates_args=())
def _attend(qkv: Tensor, keys: Tensor, ends: Tensor, longest: int, dropout: float) -> tuple[Tensor, Tensor]:
    from sottovoce.models.transformer import keyed_attention_triton

    return keyed_attention_triton.forward(qkv, keys, ends, longest, dropout)


@_attend.register_fake
def _(qkv: Tensor, keys: Tensor, ends: Tensor, longest: int, dropout: float) -> tuple[Tensor, Tensor]:
    frames, _, heads, channels = qkv.shape
    return qkv.new_empty(frames, heads, channels), qkv.new_empty(frames, heads, dtype=torch.float32)


@torch.library.custom_op("sottovoce::keyed_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    levels: Tensor,
    keys: Tensor,
    ends: Tensor,
    longest: int,
    dropout: float,
) -> Tensor:
    from sottovoce.models.transformer import keyed_attention_triton

    return keyed_attention_triton.backward(gradient, qkv, mixed, levels, keys, ends, longest, dropout)


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    levels: Tensor,
    keys: Tensor,
    ends: Tensor,
    longest: int,
    dropout: float,
) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, keys, ends, ctx.longest, ctx.dropout = inputs
    ctx.save_for_backward(qkv, *output, keys, ends)


def _gradient(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _attend_backward(gradient, *ctx.saved_tensors, ctx.longest, ctx.dropout), None, None, None, None


_attend.register_autograd(_gradient, setup_context=_remember)
