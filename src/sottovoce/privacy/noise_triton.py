"""Seeded noise as one Triton kernel: drawn where it is added, so that only the sum itself is read and written.

Element i takes word i mod 4 of Philox-4x32-10 at counter ⌊i/4⌋ under a 64-bit key. It depends on nothing else: not on
chunks, nor on the number of programs, nor on what other ranks do. Two words give two normals (Box–Muller).

In float32, with uniforms (w + ½)/2³², no draw is farther than √(66·ln 2) = 6.76 standard deviations (an ideal one is,
once in 7·10¹⁰ draws), and one pair in 2²⁵ is exactly zero. torch's own draws on CUDA end at the same place. Triton's
`randn` ends at 5.68, which an ideal draw passes once in 7·10⁷, several times in every large model: hence our own.

Shapes: P flat length, H parameter tensors.
"""

from functools import lru_cache

import torch
from torch import Tensor

from sottovoce.base.errors import check_invariant
from sottovoce.flat.layout import ALIGNMENT, Layout, tensor_layers
from sottovoce.flat.segments_triton import CHUNK, WARPS, chunk_table
from sottovoce.flat.triton import tl, triton

_MOST_ELEMENTS = 2**34  # four for each of the 2³² counters


def add_normal(
    total: Tensor,
    *,
    std: float,
    key: Tensor,
    layout: Layout,
    factors: tuple[float, ...] | None = None,
    chunk: int = CHUNK,
    warps: int = WARPS,
) -> None:
    """total += std·factor_h·N(0, 1) on every parameter, in place; padding becomes zero. `key` is [1], int64."""
    walkable = total.dtype == torch.float32 and total.dim() == 1 and total.is_contiguous()
    check_invariant(walkable, f"total is {total.dtype} {tuple(total.shape)}: expected float32 [P] without gaps")
    check_invariant(key.dtype == torch.int64, f"key.dtype={key.dtype}: expected int64")
    check_invariant(layout.flat_size <= _MOST_ELEMENTS, f"{layout.flat_size} elements: the counter would start over")
    table = chunk_table(tensor_layers(layout), total.device, chunk)
    ends, scales = _parameter_table(layout, factors, total.device)
    _add_normal[(len(table.starts),)](
        total, key, table.starts, table.lengths, table.layers, ends, scales, float(std),
        ALIGNED=ALIGNMENT, CHUNK=chunk, num_warps=warps,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _parameter_table(layout: Layout, factors: tuple[float, ...] | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each parameter ends, padding left out, and its factor."""
    ends = [offset + size for offset, size in zip(layout.offsets, layout.sizes, strict=True)]
    scales = [1.0] * len(ends) if factors is None else factors
    check_invariant(len(scales) == len(ends), f"{len(scales)} factors for {len(ends)} parameters")
    return torch.tensor(ends, device=device), torch.tensor(scales, dtype=torch.float32, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _add_normal(  # type: ignore[no-untyped-def]
    total, key, starts, lengths, parameters, ends, factors, std,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + chunk), ALIGNED)
    length = tl.multiple_of(tl.load(lengths + chunk), ALIGNED).to(tl.int32)
    parameter = tl.load(parameters + chunk)
    counter = (start // 4).to(tl.uint32) + tl.arange(0, CHUNK // 4).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(key), counter, 0, 0, 0)
    n0, n1 = _normals(w0, w1)
    n2, n3 = _normals(w2, w3)
    noise = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
    index = tl.arange(0, CHUNK)
    target = total + start + index
    value = tl.load(target, mask=index < length, other=0.0) + std * tl.load(factors + parameter) * noise
    of_parameter = tl.minimum(tl.load(ends + parameter) - start, CHUNK).to(tl.int32)
    tl.store(target, tl.where(index < of_parameter, value, 0.0), mask=index < length)


@triton.jit
def _normals(a, b):  # type: ignore[no-untyped-def]
    """Box–Muller: the radius from one word, the angle from the other.

    Thirty bits of `b` are an angle between -45° and 45°, where short polynomials (Chebyshev fits, good to 2⁻²⁴) do
    for cosine and sine; one bit swaps the two and one turns the point round, which makes up the whole circle. With the
    library's functions, which must be ready for any angle, the compiled kernel is twice as long.
    """
    radius = tl.sqrt(-2.0 * tl.log(a.to(tl.float32) * 2.0**-32 + 2.0**-33))
    radius = tl.where(b.to(tl.int32, bitcast=True) < 0, -radius, radius)
    quarter = (b << 2).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32  # of a turn, within ±½
    square = quarter * quarter
    cosine = 1.0 + square * (-1.23369771 + square * (0.253603211 + square * -0.0204172833))
    sine = quarter * (1.57079632 + square * (-0.645963461 + square * (0.0796800364 + square * -0.00460166605)))
    swap = (b & 0x40000000) != 0
    return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)
