"""ReLU and dropout in one walk over memory, for the widest tensor of the model.

y = max(x, 0)·keep/(1 − p) is all that the gradient needs: it flows where y > 0. So nothing is kept but y, which the
next matrix product keeps anyway. On a CUDA device with Triton one kernel does it, with sixteen random bits an element
(the general one spends a whole Philox round of 128 on each); elsewhere it is torch's.

The `keyed_` functions (Triton's only) are for stacked clients, x being [N, L, D]: what is dropped of a row follows from
its own key and the place in the row, whichever rows there are and however long.

p is rounded to a 65,536th.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.flat.kernels import has_triton


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """max(x, 0), with each element dropped with probability `dropout` and the others scaled up for it."""
    if not dropout:
        return F.relu(x)
    if x.is_cuda and has_triton():
        seed = torch.randint(2**31 - 1, (1,), device=x.device)  # from the device's generator, also under a CUDA graph
        dropped: Tensor = _relu_dropout_op(x, seed, dropout)
        return dropped
    return F.dropout(F.relu(x), dropout)


def keyed_relu_dropout(x_NLD: Tensor, keys_N: Tensor, dropout: float) -> Tensor:
    """`relu_dropout` of each row, from its own key."""
    dropped: Tensor = _relu_dropout_op(x_NLD, keys_N, dropout)
    return dropped


def keyed_dropout(x_NLD: Tensor, keys_N: Tensor, dropout: float) -> Tensor:
    """Each row's elements dropped with probability `dropout`, from its own key, and the others scaled up for it."""
    dropped: Tensor = _dropout_op(x_NLD, keys_N, dropout)
    return dropped


# Rows are as many as keys: one for the whole tensor, or one for each client.


@torch.library.custom_op("sottovoce::relu_dropout", mutates_args=())
def _relu_dropout_op(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    from sottovoce.models.transformer import relu_dropout_triton

    return relu_dropout_triton.forward(x, keys, dropout, relu=True)


@_relu_dropout_op.register_fake
def _(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("sottovoce::relu_dropout_backward", mutates_args=())
def _backward_op(gradient: Tensor, y: Tensor, dropout: float) -> Tensor:
    from sottovoce.models.transformer import relu_dropout_triton

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


@torch.library.custom_op("sottovoce::dropout", mutates_args=())
def _dropout_op(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    from sottovoce.models.transformer import relu_dropout_triton

    return relu_dropout_triton.forward(x, keys, dropout, relu=False)


@_dropout_op.register_fake
def _(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember_keys(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dropout = inputs[2]


def _same_mask(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    """Dropout is linear: the gradient loses what x has lost."""
    (keys,) = ctx.saved_tensors
    return _dropout_op(gradient, keys, ctx.dropout), None, None


_dropout_op.register_autograd(_same_mask, setup_context=_remember_keys)
