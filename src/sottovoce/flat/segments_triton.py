"""The walks of `segments` as Triton kernels: each reads the update once and writes nothing in between.

The flat vector is cut into chunks that never cross a layer. A table says where each chunk starts, how long it is
and to which layer it belongs; one program works on one chunk. Nothing waits for the host.

Shapes: P flat length, N clients, H layers.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sottovoce.base.errors import check_invariant
from sottovoce.flat.layout import ALIGNMENT, Layers
from sottovoce.flat.triton import tl, triton

CHUNK = 4096  # elements per program
WARPS = 8


@dataclass(frozen=True)
class _Chunks:
    """One row per chunk. `slot` is its place in a table [H, chunks of the largest layer] of partial sums."""

    starts: Tensor
    lengths: Tensor
    layers: Tensor
    slots: Tensor
    most_per_layer: int
    size: int


@lru_cache(maxsize=16)
def chunk_table(layers: Layers, device: torch.device, size: int) -> _Chunks:
    starts: list[int] = []
    lengths: list[int] = []
    chunk_layers: list[int] = []
    ranks: list[int] = []
    seen = [0] * len(layers.names)
    layout = layers.layout
    for offset, padded, layer in zip(layout.offsets, layout.padded_sizes, layers.of_parameter, strict=True):
        for start in range(0, padded, size):
            starts.append(offset + start)
            lengths.append(min(size, padded - start))
            chunk_layers.append(layer)
            ranks.append(seen[layer])
            seen[layer] += 1
    most = max(seen)
    slots = [layer * most + rank for layer, rank in zip(chunk_layers, ranks, strict=True)]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return _Chunks(on_device(starts), on_device(lengths), on_device(chunk_layers), on_device(slots), most, size)


@lru_cache(maxsize=64)
def _grid_on(device: torch.device, grid: float) -> Tensor:
    """Kernels take Python numbers as float32, in which a fine grid may underflow; hence a tensor."""
    return torch.tensor([grid, 1.0 / grid], dtype=torch.float64, device=device)


def layer_norms_on_gpu(update: Tensor, layers: Layers, *, chunk: int = CHUNK, warps: int = WARPS) -> Tensor:
    """See `segments.layer_norms`. Partial sums have fixed places, so the result is the same bits every time."""
    rows = _rows(update, layers)
    table = chunk_table(layers, update.device, chunk)
    count = len(layers.names)
    sums = torch.zeros(rows.shape[0], count, table.most_per_layer, dtype=torch.float64, device=update.device)
    _sum_squares[(len(table.starts), rows.shape[0])](
        rows, sums, table.starts, table.lengths, table.slots,
        rows.stride(0), count * table.most_per_layer,
        ALIGNED=ALIGNMENT, CHUNK=chunk, num_warps=warps,
    )  # fmt: skip
    return sums.sum(-1).sqrt_().view(*update.shape[:-1], count)


def add_scaled_on_gpu(
    total: Tensor,
    update: Tensor,
    scales: Tensor,
    layers: Layers,
    *,
    grid: float | None = None,
    chunk: int = CHUNK,
    warps: int = WARPS,
) -> None:
    """See `segments.add_scaled`. Clients are added in their order, so stacked and one by one give the same bits."""
    check_invariant(
        total.dim() == 1 and total.is_contiguous(), f"total is {tuple(total.shape)}: expected [P] without gaps"
    )
    rows = _rows(update, layers)
    table = chunk_table(layers, update.device, chunk)
    scales = scales.expand(*update.shape[:-1], len(layers.names)).contiguous()
    _add_scaled[(len(table.starts),)](
        total, rows, scales, _grid_on(update.device, grid or 1.0), table.starts, table.lengths, table.layers,
        rows.shape[0], rows.stride(0), len(layers.names),
        ROUND=grid is not None, ALIGNED=ALIGNMENT, CHUNK=chunk, num_warps=warps,
    )  # fmt: skip


def _rows(update: Tensor, layers: Layers) -> Tensor:
    """The update as [N, P]; rows may lie anywhere, elements of a row side by side and aligned."""
    layers.layout.check(update)
    rows = update if update.dim() == 2 else update.view(1, -1)
    aligned = rows.shape[0] == 1 or rows.stride(0) % ALIGNMENT == 0
    return rows if rows.stride(1) == 1 and aligned else rows.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _sum_squares(  # type: ignore[no-untyped-def]
    update, sums, starts, lengths, slots, row_stride, sums_stride,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    start = tl.multiple_of(tl.load(starts + chunk), ALIGNED)
    length = tl.multiple_of(tl.load(lengths + chunk), ALIGNED)
    index = tl.arange(0, CHUNK)
    value = tl.load(update + client * row_stride + start + index, mask=index < length, other=0.0).to(tl.float64)
    tl.store(sums + client * sums_stride + tl.load(slots + chunk), tl.sum(value * value, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _add_scaled(  # type: ignore[no-untyped-def]
    total, update, scales, grid, starts, lengths, layers, clients, row_stride, layer_count,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + chunk), ALIGNED)
    length = tl.multiple_of(tl.load(lengths + chunk), ALIGNED)
    layer = tl.load(layers + chunk)
    index = tl.arange(0, CHUNK)
    inside = index < length
    target = total + start + index
    result = tl.load(target, mask=inside, other=0.0)
    source = update + start + index
    scale_of_client = scales + layer
    for _ in range(clients):
        scale = tl.load(scale_of_client)
        value = tl.load(source, mask=inside, other=0.0).to(tl.float64)
        value = tl.where(scale == 0.0, 0.0, value * scale)
        if ROUND:
            cells = tl.floor(tl.abs(value) * tl.load(grid + 1)) * tl.load(grid)
            value = tl.where(value < 0.0, -cells, cells)
        result += value.to(result.dtype)
        source += row_stride
        scale_of_client += layer_count
    tl.store(target, result, mask=inside)
