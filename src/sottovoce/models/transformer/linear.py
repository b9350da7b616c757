"""What touches weights and what keeps frames to their utterance, for one model and for N clients stacked.

A tensor with a leading client axis belongs to each client alone; one without it is shared by all.

Shapes: N clients, L frames of a row, D model width.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPSILON = 1e-5


class LowRank(NamedTuple):
    """The matrix weight + b·a, never multiplied out: weight [out, in], a [r, in], b [out, r] (Hu et al. 2022)."""

    weight: Tensor
    a: Tensor
    b: Tensor


Matrix = Tensor | LowRank


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x·weightᵀ + bias; with weights of N clients [N, out, in], each row of x [N, L, in] by its own.

    Of weight, bias and a low-rank pair each may be the clients' own or shared by all.
    """
    if isinstance(weight, LowRank):
        return linear(x, weight.weight, bias) + linear(linear(x, weight.a), weight.b)
    if weight.ndim == 2:
        if bias is None or bias.ndim == 1:
            return F.linear(x, weight, bias)
        return F.linear(x, weight) + by_row(bias)
    product: Tensor = _StackedProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return product if bias is None else product + by_row(bias)


class _StackedProduct(torch.autograd.Function):
    """x·weightᵀ of every client; the weights' gradient comes out as the weights lie, not transposed as bmm's would."""

    @staticmethod
    def forward(ctx: Any, x_NLI: Tensor, weight_NOI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NLI, weight_NOI)
        return torch.bmm(x_NLI, weight_NOI.mT)

    @staticmethod
    def backward(ctx: Any, gradient_NLO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NLI, weight_NOI = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            torch.bmm(gradient_NLO, weight_NOI) if of_x else None,
            torch.bmm(gradient_NLO.mT, x_NLI) if of_weight else None,
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.ndim == bias.ndim == 1:
        return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPSILON)
    return torch.addcmul(by_row(bias), F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPSILON), by_row(weight))


def by_row(vector: Tensor) -> Tensor:
    """A vector as it meets rows [N, L, D]: each client's own [N, D] → [N, 1, D], a shared one [D] as it is."""
    return vector[:, None] if vector.ndim == 2 else vector


# Frames of a line up to which a CPU trains attention in bfloat16 as two products of matrices: torch's own takes two to
# four times as long backwards there, and is as fast from here on, where scores begin to fill the memory.
PLAIN_FRAMES = 1_000


def attend_lines(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, dropout: float) -> Tensor:
    """Attention of [B, heads, T, d] within lines, to the frames that `mask` [B, 1, 1, T] keeps."""
    if q.is_cuda or q.dtype != torch.bfloat16 or not q.requires_grad or q.shape[-2] > PLAIN_FRAMES:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    hidden_B11T = torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, -math.inf)
    scores = torch.add(hidden_B11T, q @ k.mT, alpha=q.shape[-1] ** -0.5)  # in float32, as the softmax is
    weights = F.dropout(scores.softmax(dim=-1), dropout, training=dropout > 0)
    return weights.to(v.dtype) @ v


def attend_segments(q: Tensor, k: Tensor, v: Tensor, *, ends: Tensor, longest: int, dropout: float) -> Tensor:
    """Attention within segments of frames that lie end to end, [frames, heads, d]: without padding on a GPU."""
    flash_takes = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if q.is_cuda and flash_takes:
        flash = torch.ops.aten._flash_attention_forward
        mixed: Tensor = flash(q, k, v, ends, ends, longest, longest, dropout, False, False)[0]
        return mixed
    if not ends.is_cuda:  # no shape has to be kept here: leave out empty segments
        ends = torch.unique_consecutive(ends)
        longest = int(ends.diff().max())
    return _attend_padded(q, k, v, ends=ends, longest=longest, dropout=dropout)


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, *, ends: Tensor, longest: int, dropout: float) -> Tensor:
    """The same with each segment in a line of its own: what is not finite in one stays there."""
    count, starts_S, ends_S = len(q), ends[:-1].long(), ends[1:].long()
    frame_SL = starts_S[:, None] + torch.arange(longest, device=q.device)
    inside_SL = frame_SL < ends_S[:, None]
    frame_SL = torch.where(inside_SL, frame_SL, 0)
    q, k, v = (part[frame_SL].masked_fill(~inside_SL[..., None, None], 0).transpose(1, 2) for part in (q, k, v))
    # A segment without frames attends to its first padding frame: a softmax over nothing would be NaN.
    mask_S11L = (inside_SL | (torch.arange(longest, device=q.device) == 0))[:, None, None]
    mixed_SLHd = attend_lines(q, k, v, mask=mask_S11L, dropout=dropout).transpose(1, 2)
    frames = torch.arange(count, device=q.device)
    segment = torch.searchsorted(ends_S, frames, right=True)
    return mixed_SLHd[segment, frames - starts_S[segment]]
