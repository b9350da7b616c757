"""The kernels of `keyed_attention`: FlashAttention's three walks (Dao 2023), with masks of our own.

One program works on a block of queries (or, for the gradients of keys and values, of keys) of one segment and head.
Scores are made anew in the gradients' walks, and so are the masks: a Philox round for every four keys.

Shapes: see `keyed_attention`; M queries of a block, K keys of a block, W channels of a head, rounded up.
"""

import math

import torch
from torch import Tensor

from sottovoce.flat.triton import tl, triton
from sottovoce.models.transformer.relu_dropout_triton import drop_scale, drop_threshold

# Else every new length of a row that happens to be odd, or to divide by 16, would be compiled anew.
_SIZES = ("row_frames",)


def attention_forward(qkv: Tensor, keys: Tensor, ends: Tensor, longest: int, dropout: float) -> tuple[Tensor, Tensor]:
    """What attention mixes [F, H, d], and the logarithm of each query's sum of weights [F, H]."""
    qkv = qkv.contiguous()
    frames, _, heads, channels = qkv.shape
    mixed = qkv.new_empty(frames, heads, channels)
    levels = qkv.new_empty(frames, heads, dtype=torch.float32)
    grid, sizes = _sizes(qkv, ends, longest)
    _mix[grid](qkv, mixed, levels, ends, keys, frames // len(keys), *_numbers(channels, dropout), **sizes)
    return mixed, levels


def attention_backward(
    gradient: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    levels: Tensor,
    keys: Tensor,
    ends: Tensor,
    longest: int,
    dropout: float,
) -> Tensor:
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    result = torch.empty_like(qkv)
    # Σ_k weight·(its gradient) of each query, which the softmax takes off.
    along = (gradient.float() * mixed.float()).sum(-1)
    grid, sizes = _sizes(qkv, ends, longest)
    tensors = (qkv, gradient, levels, along, result, ends, keys)
    for walk in (_queries_gradient, _keys_gradient):
        walk[grid](*tensors, qkv.shape[0] // len(keys), *_numbers(qkv.shape[-1], dropout), **sizes)
    return result


def _sizes(qkv: Tensor, ends: Tensor, longest: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    heads, channels = qkv.shape[2:]
    width = max(16, triton.next_power_of_2(channels))
    block = 64 if width * qkv.element_size() <= 256 else 32  # four blocks of them fit into a GPU's shared memory
    grid = (len(ends) - 1, heads, triton.cdiv(longest, block))
    return grid, {"HEADS": heads, "CHANNELS": channels, "WIDTH": width, "BLOCK": block, "num_warps": 4, "num_stages": 1}


def _numbers(channels: int, dropout: float) -> tuple[float, int, float]:
    return 1 / math.sqrt(channels), drop_threshold(dropout), drop_scale(dropout)


@triton.jit  # type: ignore[untyped-decorator]
def _block(  # type: ignore[no-untyped-def]
    tensor, frame, end, head, PART: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Where frames of one head lie in [F, parts, H, d], and which of these places there are."""
    channel = tl.arange(0, WIDTH)
    first = (frame.to(tl.int64) * PARTS + PART) * HEADS + head
    inside = (frame < end)[:, None] & (channel < CHANNELS)[None, :]
    return tensor + first[:, None] * CHANNELS + channel[None, :], inside


@triton.jit  # type: ignore[untyped-decorator]
def _kept(key, query, first_other, head, least, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M, K]: which weights of `query` (frames within the row) on BLOCK keys from `first_other` on are not dropped."""
    four = tl.arange(0, BLOCK // 4)
    zero = query[:, None] * 0 + four[None, :] * 0
    # The last counter tells these numbers from those of `relu_dropout`, which has the same key.
    a, b, c, d = tl.philox(key, zero + query[:, None], zero + (first_other + 4 * four)[None, :], zero + head, zero + 1)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (words >> 16).to(tl.int32) >= least


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    qkv, mixed, levels, ends, keys, row_frames, sharpness, least, scale,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.load(ends + tl.program_id(0))
    end = tl.load(ends + tl.program_id(0) + 1)
    head = tl.program_id(1)
    first = start + tl.program_id(2) * BLOCK
    if first < end:
        row = start // row_frames
        key = tl.load(keys + row)
        row_start = row * row_frames
        query = first + tl.arange(0, BLOCK)
        at, inside = _block(qkv, query, end, head, 0, HEADS, CHANNELS, WIDTH, 3)
        q_MW = tl.load(at, mask=inside, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        sum_MW = tl.zeros([BLOCK, WIDTH], tl.float32)
        for first_other in range(start, end, BLOCK):
            other = first_other + tl.arange(0, BLOCK)
            at, inside = _block(qkv, other, end, head, 1, HEADS, CHANNELS, WIDTH, 3)
            k_KW = tl.load(at, mask=inside, other=0.0)
            v_KW = tl.load(at + HEADS * CHANNELS, mask=inside, other=0.0)
            scores_MK = tl.dot(q_MW, tl.trans(k_KW), input_precision="ieee") * sharpness
            scores_MK = tl.where((other < end)[None, :], scores_MK, float("-inf"))
            higher = tl.maximum(top, tl.max(scores_MK, axis=1))
            weights_MK = tl.exp(scores_MK - higher[:, None])
            shrunk = tl.exp(top - higher)
            total = total * shrunk + tl.sum(weights_MK, axis=1)
            kept_MK = _kept(key, query - row_start, first_other - row_start, head, least, BLOCK)
            weights_MK = tl.where(kept_MK, weights_MK, 0.0).to(v_KW.dtype)
            sum_MW = tl.dot(weights_MK, v_KW, sum_MW * shrunk[:, None], input_precision="ieee")
            top = higher
        at, inside = _block(mixed, query, end, head, 0, HEADS, CHANNELS, WIDTH, 1)
        tl.store(at, (sum_MW * (scale / total)[:, None]).to(mixed.dtype.element_ty), mask=inside)
        tl.store(levels + query.to(tl.int64) * HEADS + head, top + tl.log(total), mask=query < end)


@triton.jit
def _weights_and_gradients(  # type: ignore[no-untyped-def]
    q_MW, k_KW, v_KW, gradient_MW, level_M, along_M, inside_K, kept_MK, sharpness, scale
):  # fmt: skip
    """What attention had for weights (dropped and scaled), and the gradient of the scores: both [M, K]."""
    scores_MK = tl.dot(q_MW, tl.trans(k_KW), input_precision="ieee") * sharpness
    weights_MK = tl.where(inside_K[None, :], tl.exp(scores_MK - level_M[:, None]), 0.0)
    of_weights_MK = tl.dot(gradient_MW, tl.trans(v_KW), input_precision="ieee")
    of_scores_MK = weights_MK * (tl.where(kept_MK, of_weights_MK * scale, 0.0) - along_M[:, None])
    return tl.where(kept_MK, weights_MK * scale, 0.0), of_scores_MK


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _queries_gradient(  # type: ignore[no-untyped-def]
    qkv, gradient, levels, along, result, ends, keys, row_frames, sharpness, least, scale,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.load(ends + tl.program_id(0))
    end = tl.load(ends + tl.program_id(0) + 1)
    head = tl.program_id(1)
    first = start + tl.program_id(2) * BLOCK
    if first < end:
        row = start // row_frames
        key = tl.load(keys + row)
        row_start = row * row_frames
        query = first + tl.arange(0, BLOCK)
        at, inside = _block(qkv, query, end, head, 0, HEADS, CHANNELS, WIDTH, 3)
        q_MW = tl.load(at, mask=inside, other=0.0)
        at, inside = _block(gradient, query, end, head, 0, HEADS, CHANNELS, WIDTH, 1)
        gradient_MW = tl.load(at, mask=inside, other=0.0)
        of_query = query.to(tl.int64) * HEADS + head
        level_M = tl.load(levels + of_query, mask=query < end, other=0.0)
        along_M = tl.load(along + of_query, mask=query < end, other=0.0)
        sum_MW = tl.zeros([BLOCK, WIDTH], tl.float32)
        for first_other in range(start, end, BLOCK):
            other = first_other + tl.arange(0, BLOCK)
            at, inside = _block(qkv, other, end, head, 1, HEADS, CHANNELS, WIDTH, 3)
            k_KW = tl.load(at, mask=inside, other=0.0)
            v_KW = tl.load(at + HEADS * CHANNELS, mask=inside, other=0.0)
            kept_MK = _kept(key, query - row_start, first_other - row_start, head, least, BLOCK)
            _, of_scores_MK = _weights_and_gradients(
                q_MW, k_KW, v_KW, gradient_MW, level_M, along_M, other < end, kept_MK, sharpness, scale
            )
            sum_MW = tl.dot(of_scores_MK.to(k_KW.dtype), k_KW, sum_MW, input_precision="ieee")
        at, inside = _block(result, query, end, head, 0, HEADS, CHANNELS, WIDTH, 3)
        tl.store(at, (sum_MW * sharpness).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _keys_gradient(  # type: ignore[no-untyped-def]
    qkv, gradient, levels, along, result, ends, keys, row_frames, sharpness, least, scale,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.load(ends + tl.program_id(0))
    end = tl.load(ends + tl.program_id(0) + 1)
    head = tl.program_id(1)
    first = start + tl.program_id(2) * BLOCK
    if first < end:
        row = start // row_frames
        key = tl.load(keys + row)
        row_start = row * row_frames
        other = first + tl.arange(0, BLOCK)
        to_store, stored = _block(result, other, end, head, 1, HEADS, CHANNELS, WIDTH, 3)
        at, inside = _block(qkv, other, end, head, 1, HEADS, CHANNELS, WIDTH, 3)
        k_KW = tl.load(at, mask=inside, other=0.0)
        v_KW = tl.load(at + HEADS * CHANNELS, mask=inside, other=0.0)
        of_keys_KW = tl.zeros([BLOCK, WIDTH], tl.float32)
        of_values_KW = tl.zeros([BLOCK, WIDTH], tl.float32)
        for first_query in range(start, end, BLOCK):
            query = first_query + tl.arange(0, BLOCK)
            at, inside = _block(qkv, query, end, head, 0, HEADS, CHANNELS, WIDTH, 3)
            q_MW = tl.load(at, mask=inside, other=0.0)
            at, inside = _block(gradient, query, end, head, 0, HEADS, CHANNELS, WIDTH, 1)
            gradient_MW = tl.load(at, mask=inside, other=0.0)  # zero beyond the end: nothing comes from there
            of_query = query.to(tl.int64) * HEADS + head
            level_M = tl.load(levels + of_query, mask=query < end, other=0.0)
            along_M = tl.load(along + of_query, mask=query < end, other=0.0)
            kept_MK = _kept(key, query - row_start, first - row_start, head, least, BLOCK)
            weights_MK, of_scores_MK = _weights_and_gradients(
                q_MW, k_KW, v_KW, gradient_MW, level_M, along_M, other < end, kept_MK, sharpness, scale
            )
            of_values_KW = tl.dot(
                tl.trans(weights_MK.to(gradient_MW.dtype)), gradient_MW, of_values_KW, input_precision="ieee"
            )
            of_keys_KW = tl.dot(tl.trans(of_scores_MK.to(q_MW.dtype)), q_MW, of_keys_KW, input_precision="ieee")
        tl.store(to_store, (of_keys_KW * sharpness).to(result.dtype.element_ty), mask=stored)
        tl.store(to_store + HEADS * CHANNELS, of_values_KW.to(result.dtype.element_ty), mask=stored)
