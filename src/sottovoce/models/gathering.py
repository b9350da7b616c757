"""Gathers that are each other's gradient: nothing is added up, so no order of adding matters.

Shapes: a source [A, B, …] as its A·B items one behind the other.
"""

from typing import Any

import torch
from torch import Tensor


def gather(source: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """The items of `source` at `index`, in its shape, and zero where it is -1. Gradients flow back.

    No item stands twice in `index`, and `back`, in the shape of the source, says where in it each one is, or -1.

    >>> gather(torch.tensor([[1.0], [2.0]]), torch.tensor([[1, -1]]), torch.tensor([[-1], [0]]))
    tensor([[2., 0.]])
    """
    gathered: Tensor = _Gather.apply(source, index, back)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back, index)
        return _taken(source, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        back, _ = ctx.saved_tensors
        return _taken(gradient, back), None, None


def _taken(source: Tensor, index: Tensor) -> Tensor:
    flat = source.reshape(-1, *source.shape[2:])
    taken = flat.index_select(0, index.clamp(min=0).view(-1)).view(*index.shape, *source.shape[2:])
    return taken.masked_fill((index < 0).view(*index.shape, *[1] * (source.ndim - 2)), 0)
