"""Two walks over a flat update: the norm of each layer, and adding each layer times its own factor.

Everything clipping needs of the hardware is here. On a CUDA device with Triton both walks are one kernel each
(`segments_triton`), whatever the number of layers or clients; elsewhere they are loops over the parameters.

Shapes: P flat length, N clients, H layers. Updates are [P] or [N, P]; norms and scales [H] or [N, H], float64.
"""

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from sottovoce.flat.kernels import triton_kernels
from sottovoce.flat.layout import Layers

# Within these, a scale and its products with ordinary float32 values are far from overflow and underflow.
_SAFE_IN_FLOAT32 = (2.0**-60, 2.0**60)
# What a processor scales at a time, where all layers have one factor: a quarter of a megabyte stays in its cache.
_CACHED = 2**16


def layer_norms(update: Tensor, layers: Layers) -> Tensor:
    """The L2 norm of each layer, accumulated in float64: no float32 value overflows or underflows there.

    Not finite exactly where the layer holds a NaN, an infinity or (float64 only) values beyond 1e150.
    """
    if update.dim() == 2 and not len(update):  # a cohort of nobody
        return update.new_zeros(0, len(layers.names), dtype=torch.float64)
    kernels = _kernels(update)
    if kernels is not None:
        return kernels.layer_norms_on_gpu(update, layers)  # type: ignore[no-any-return]
    if update.dim() == 2:  # user by user: fast on a CPU, and nobody's bits depend on who else is in the stack
        return torch.stack([layer_norms(row, layers) for row in update])
    parts = layers.layout.parts(update)
    if update.device.type == "cpu":
        norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float64))  # one call for a loop in C++
    else:
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    if layers.are_tensors:
        return norms
    squares = norms.new_zeros(len(layers.names))
    index = torch.tensor(layers.of_parameter, device=update.device)
    return squares.index_add_(0, index, norms.square()).sqrt()


def add_scaled(total: Tensor, update: Tensor, scales: Tensor, layers: Layers, *, grid: float | None = None) -> None:
    """total += scale_h · update_h, summed over clients. A scale of zero gives zero, even times NaN or infinity.

    With a `grid` (a power of two), each product is rounded towards zero to a multiple of it before it is added.
    """
    layers.layout.check(total)
    kernels = _kernels(update)
    if kernels is not None:
        kernels.add_scaled_on_gpu(total, update, scales, layers, grid=grid)
        return
    if update.dim() == 2:
        for row, its_scales in zip(update, scales, strict=True):
            add_scaled(total, row, its_scales, layers, grid=grid)
        return
    if _has_one_factor(total, update, scales, grid):
        factor = scales[0].float()
        for target, part in zip(torch.split(total, _CACHED), torch.split(update, _CACHED), strict=True):
            target.add_(part * factor)
        layers.layout.clear_padding(total)
        return
    for target, value in _values(total, update, scales, layers, grid):
        target.add_(value)


def _has_one_factor(total: Tensor, update: Tensor, scales: Tensor, grid: float | None) -> bool:
    """Whether one walk over all layers gives the bits of one over each: asked on a CPU only, like the next question."""
    if grid is not None or update.dtype != torch.float32 or not _float32_suffices(update, scales[0], total.dtype):
        return False
    return bool((scales == scales[0]).all())


def scaled(update: Tensor, scales: Tensor, layers: Layers, *, dtype: torch.dtype, grid: float | None = None) -> Tensor:
    """scale_h · update_h as a new tensor of `dtype`, by the same arithmetic as `add_scaled`."""
    result = torch.zeros_like(update, dtype=dtype)
    if update.dim() == 2:
        for target, row, its_scales in zip(result, update, scales, strict=True):
            target.copy_(scaled(row, its_scales, layers, dtype=dtype, grid=grid))
        return result
    for target, value in _values(result, update, scales, layers, grid):
        target.copy_(value)
    return result


def _values(
    into: Tensor, update: Tensor, scales: Tensor, layers: Layers, grid: float | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter's window on `into`, and scale · update in its type, rounded once."""
    parts = layers.layout.parts(update)
    for target, part, layer in zip(layers.layout.parts(into), parts, layers.of_parameter, strict=True):
        scale = scales[layer]
        if grid is None and _float32_suffices(part, scale, into.dtype):
            yield target, part.float() * scale.float()
            continue
        value = torch.where(scale == 0, 0.0, part.double() * scale)
        yield target, (value if grid is None else value.div_(grid).trunc_().mul_(grid)).to(into.dtype)


def _float32_suffices(part: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Asked on a CPU only: any other device would have to be waited for."""
    if scale.device.type != "cpu" or dtype != torch.float32 or part.dtype == torch.float64:
        return False
    low, high = _SAFE_IN_FLOAT32
    return low <= float(scale) <= high


def _kernels(update: Tensor) -> ModuleType | None:
    return triton_kernels("sottovoce.flat.segments_triton") if update.is_cuda else None
