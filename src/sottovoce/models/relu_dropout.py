"""ReLU and dropout in one walk over memory, for the widest tensor of the model.

y = max(x, 0)·keep/(1 − p) is all that the gradient needs: it flows where y > 0. So nothing is kept but y, which the
next matrix product keeps anyway. On a CUDA device with Triton one kernel does it, with sixteen random bits an element
(the general one spends a whole Philox round of 128 on each); elsewhere it is torch's.

p is rounded to a 65,536th.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """max(x, 0), with each element dropped with probability `dropout` and the others scaled up for it."""
    if not dropout:
        return F.relu(x)
    if x.is_cuda and _has_triton():
        seed = torch.randint(2**31 - 1, (1,), device=x.device)  # from the device's generator, also under a CUDA graph
        dropped: Tensor = _relu_dropout_op(x, seed, dropout)
        return dropped
    return F.dropout(F.relu(x), dropout)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


@torch.library.custom_op("sottovoce::relu_dropout", mutates_args=())
def _relu_dropout_op(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    from sottovoce.models import relu_dropout_triton

    return relu_dropout_triton.forward(x, seed, dropout)


@_relu_dropout_op.register_fake
def _(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("sottovoce::relu_dropout_backward", mutates_args=())
def _backward_op(gradient: Tensor, y: Tensor, dropout: float) -> Tensor:
    from sottovoce.models import relu_dropout_triton

    return relu_dropout_triton.backward(gradient, y, dropout)


@_backward_op.register_fake
def _(gradient: Tensor, y: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(y)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dropout = inputs[2]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (y,) = ctx.saved_tensors
    return _backward_op(gradient, y, ctx.dropout), None, None


_relu_dropout_op.register_autograd(_gradient, setup_context=_remember)
