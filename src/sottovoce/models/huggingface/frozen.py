"""Products and convolutions whose own weights are frozen: they keep for the way back what has a gradient, and no more.

Shapes: N clients, M rows of each, I inputs, O outputs, r rank, B utterances, C channels, T frames.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def corrected_product(x_NMI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_NrI: Tensor, b_NOr: Tensor) -> Tensor:
    """x·Wᵀ + bias + (x·aᵀ)·bᵀ, [N, M, O], where only x, a and b may have a gradient.

    The correction is added in place: it costs one pass over the outputs, and on the way back one over the inputs.
    """
    found: Tensor = _CorrectedProduct.apply(x_NMI, weight_OI, bias_O, a_NrI, b_NOr)  # type: ignore[no-untyped-call]
    return found


class _CorrectedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NMI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_NrI: Tensor, b_NOr: Tensor
    ) -> Tensor:
        inner_NMr = x_NMI @ a_NrI.mT
        ctx.save_for_backward(x_NMI if ctx.needs_input_grad[3] else None, weight_OI, a_NrI, b_NOr, inner_NMr)
        return functional.linear(x_NMI, weight_OI, bias_O).baddbmm_(inner_NMr, b_NOr.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NMO: Tensor) -> tuple[Tensor | None, ...]:
        x_NMI, weight_OI, a_NrI, b_NOr, inner_NMr = ctx.saved_tensors
        for_x, _, _, for_a, for_b = ctx.needs_input_grad
        d_inner_NMr = gradient_NMO @ b_NOr
        dx_NMI = (gradient_NMO @ weight_OI).baddbmm_(d_inner_NMr, a_NrI) if for_x else None
        da_NrI = d_inner_NMr.mT @ x_NMI if for_a else None
        db_NOr = gradient_NMO.mT @ inner_NMr if for_b else None
        return dx_NMI, None, None, da_NrI, db_NOr


def frozen_convolution(x_BCT: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    """`conv1d` with frozen weights; torch's keeps its inputs all the same."""
    found: Tensor = _FrozenConvolution.apply(x_BCT, weight, bias, how)  # type: ignore[no-untyped-call]
    return found


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCT: Tensor, weight: Tensor, bias: Tensor | None, how: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.how = x_BCT.shape, how
        return functional.conv1d(x_BCT, weight, bias, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BOT: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), how = ctx.saved_tensors, ctx.how
        shape_alone = gradient_BOT.new_zeros(1).expand(ctx.shape)  # no gradient of x depends on its values
        dx_BCT, _, _ = torch.ops.aten.convolution_backward(
            gradient_BOT,
            shape_alone,
            weight,
            None,
            how["stride"],
            how["padding"],
            how["dilation"],
            False,
            [0],
            how["groups"],
            (True, False, False),
        )
        return dx_BCT, None, None, None
