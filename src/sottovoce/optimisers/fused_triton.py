"""The steps of `weights` as Triton kernels: sums for the norms, then one step, each byte moved once.

The flat vector is cut into chunks that never cross a tensor (`segments_triton.chunk_table`); one program works on one
chunk. Partial sums have fixed places, so that the same gradient gives the same bits every time.

Shapes: P flat length, H parameter tensors. "..." is nothing (one model) or N (stacked clients, a row each).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sottovoce.flat.layout import ALIGNMENT, Layers
from sottovoce.flat.segments_triton import CHUNK, WARPS, chunk_table
from sottovoce.flat.triton import tl, triton


def sums(
    gradient: Tensor, master: Tensor | None, layers: Layers, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor, Tensor]:
    """Σg², Σθ² and Σg·θ of every tensor, in float64, each [..., H]. Without a master the last two are zero."""
    layers.layout.check(gradient)
    table = chunk_table(layers, gradient.device, chunk)
    rows, count = gradient.numel() // gradient.shape[-1], len(layers.names)
    partial = torch.zeros(3, rows, count, table.most_per_layer, dtype=torch.float64, device=gradient.device)
    _sums[(len(table.starts), rows)](
        gradient, gradient if master is None else master, partial,
        table.starts, table.lengths, table.slots, layers.layout.flat_size, count * table.most_per_layer,
        MASTER=master is not None, ALIGNED=ALIGNMENT, CHUNK=chunk, num_warps=WARPS,
    )  # fmt: skip
    squares, parameter_squares, products = partial.sum(-1).view(3, *gradient.shape[:-1], count).unbind()
    return squares, parameter_squares, products


@dataclass(frozen=True)
class LarsTerms:
    """What LARS adds to SGD: its momentum [..., P], trust ratios [..., H] and settings."""

    momentum: Tensor
    ratios: Tensor
    momentum_factor: float
    weight_decay: float


def fused_step(
    master: Tensor,
    working: Tensor | None,
    gradient: Tensor,
    layers: Layers,
    *,
    scale: Tensor,
    lr: float,
    lars: LarsTerms | None,
) -> None:
    """LARS: m ← factor·m + lr·ratio·(scale·g + weight_decay·θ), θ ← θ - m. Without `lars`, SGD. `scale` is [...].

    `working`, where there is one, becomes the new master in its own type.
    """
    momentum = None if lars is None else lars.momentum
    for flat in (master, working, gradient, momentum):
        assert flat is None or (flat.shape == master.shape and flat.is_contiguous())
    table = chunk_table(layers, master.device, CHUNK)
    # A pointer that the kernel never follows must still be some tensor.
    _step[(len(table.starts), master.numel() // master.shape[-1])](
        master,
        master if working is None else working,
        gradient,
        master if momentum is None else momentum,
        scale.float(),
        master if lars is None else lars.ratios.float(),
        table.starts, table.lengths, table.layers, layers.layout.flat_size, len(layers.names),
        float(lr), float(lars.momentum_factor if lars else 0.0), float(lars.weight_decay if lars else 0.0),
        COPY=working is not None, LARS=lars is not None,
        ALIGNED=ALIGNMENT, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    gradient, master, partial, starts, lengths, slots, row_stride, slots_of_row,
    MASTER: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.multiple_of(row * row_stride + tl.load(starts + chunk), ALIGNED)
    length = tl.multiple_of(tl.load(lengths + chunk), ALIGNED)
    slot = partial + row * slots_of_row + tl.load(slots + chunk)
    plane = tl.num_programs(1).to(tl.int64) * slots_of_row
    index = tl.arange(0, CHUNK)
    inside = index < length
    g = tl.load(gradient + start + index, mask=inside, other=0.0).to(tl.float64)
    tl.store(slot, tl.sum(g * g, axis=0))
    if MASTER:
        p = tl.load(master + start + index, mask=inside, other=0.0).to(tl.float64)
        tl.store(slot + plane, tl.sum(p * p, axis=0))
        tl.store(slot + 2 * plane, tl.sum(g * p, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    master, working, gradient, momentum, scale, ratios, starts, lengths, layers, row_stride, layer_count,
    lr, momentum_factor, weight_decay,
    COPY: tl.constexpr, LARS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.multiple_of(row * row_stride + tl.load(starts + chunk), ALIGNED)
    length = tl.multiple_of(tl.load(lengths + chunk), ALIGNED)
    index = tl.arange(0, CHUNK)
    inside = index < length
    move = tl.load(gradient + start + index, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + row)
    p = tl.load(master + start + index, mask=inside, other=0.0)
    if LARS:
        gain = lr * tl.load(ratios + row * layer_count + tl.load(layers + chunk))
        m = tl.load(momentum + start + index, mask=inside, other=0.0)
        move = momentum_factor * m + gain * (move + weight_decay * p)
        tl.store(momentum + start + index, move, mask=inside)
    else:
        move = lr * move
    p = p - move
    tl.store(master + start + index, p, mask=inside)
    if COPY:
        tl.store(working + start + index, p.to(working.dtype.element_ty), mask=inside)
