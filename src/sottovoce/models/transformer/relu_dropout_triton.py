"""The walks of `relu_dropout` as Triton kernels.

One program works on eight stretches of one row's elements; four random words a lane give each stretch sixteen bits of
its own.
"""

import torch
from torch import Tensor

from sottovoce.flat.triton import tl, triton

LANES = 512
STRETCHES = 8
PER_PROGRAM = LANES * STRETCHES


def drop_threshold(dropout: float) -> int:
    return round(dropout * 65536)


def drop_scale(dropout: float) -> float:
    return 65536 / (65536 - drop_threshold(dropout))


def dropout_forward(x: Tensor, keys: Tensor, dropout: float, *, relu: bool) -> Tensor:
    """Of as many rows as there are keys."""
    x = x.contiguous()
    y = torch.empty_like(x)
    count = x.numel() // len(keys)
    _forward[(-(-count // PER_PROGRAM), len(keys))](
        x,
        y,
        keys,
        count,
        drop_threshold(dropout),
        drop_scale(dropout),
        RELU=relu,
        LANES=LANES,
        STRETCHES=STRETCHES,
        num_warps=4,
    )
    return y


def dropout_backward(gradient: Tensor, y: Tensor, dropout: float) -> Tensor:
    gradient = gradient.contiguous()
    result = torch.empty_like(y)
    count = y.numel()
    _backward[(-(-count // PER_PROGRAM),)](
        gradient, y, result, count, drop_scale(dropout), BLOCK=PER_PROGRAM, num_warps=8
    )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x, y, keys, count, threshold, scale, RELU: tl.constexpr, LANES: tl.constexpr, STRETCHES: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    row = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    a, b, c, d = tl.randint4x(tl.load(keys + row), program * LANES + lanes)
    x += row.to(tl.int64) * count
    y += row.to(tl.int64) * count
    first = program.to(tl.int64) * LANES * STRETCHES + lanes
    for stretch in tl.static_range(STRETCHES):
        word = a if stretch < 2 else (b if stretch < 4 else (c if stretch < 6 else d))
        bits = ((word >> (16 * (stretch % 2))) & 0xFFFF).to(tl.int32)
        index = first + stretch * LANES
        value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
        kept = bits >= threshold
        if RELU:
            kept = kept & (value > 0)
        tl.store(y + index, tl.where(kept, value * scale, 0.0).to(y.dtype.element_ty), mask=index < count)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(gradient, y, result, count, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    flows = tl.load(y + index, mask=inside, other=0.0) > 0
    value = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(result + index, tl.where(flows, value, 0.0).to(result.dtype.element_ty), mask=inside)
