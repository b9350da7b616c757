"""LSTMs with a backward pass of their own, many at once: what cuDNN does not do, or launches too slowly.

cuDNN takes one set of weights at a time, and a host needs longer to launch its kernels than a large GPU to run them.
Here one batched product serves a step of all recurrences (directions, clients), in kernels whose shapes hang on nothing
but their inputs' shapes, so that they can be recorded:

    a_t = W x_t + b + R h_{t-1}      W x + b for all steps at once, before
    i, f, o = σ(a), g = tanh(a)      c_t = f c_{t-1} + i g        h_t = o tanh(c_t)

and backwards, with δ for the gradient of what follows it, one product a step and one for all steps at the end:

    δc_t = δh_t o (1 - tanh² c_t) + f_{t+1} δc_{t+1}      δh_{t-1} += Rᵀ δa_t      δR = Σ_t δa_t h_{t-1}ᵀ

A backward direction hears each line from its own end (`turned`), so no padding comes before speech.

Shapes: T steps, R recurrences, W lines of each, B = R·W, D width, G = 4·D gates in torch's order (i, f, g, o).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def turned_places(lengths: Tensor, steps: int) -> Tensor:
    """Where each step of a line lies when the line is heard from its own end, [*lengths, T]; behind it as it was."""
    steps_T = torch.arange(steps, device=lengths.device)
    return torch.where(steps_T < lengths[..., None], lengths[..., None] - 1 - steps_T, steps_T)


def recur(gates_TRWG: Tensor, recurrent_RGD: Tensor) -> Tensor:
    """Hidden states [T, R, W, D] from the inputs' share of the gates, and recurrent matrices."""
    return _Recurrence.apply(gates_TRWG, recurrent_RGD)  # type: ignore[no-any-return,no-untyped-call]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates_TRWG: Tensor, recurrent_RGD: Tensor) -> Tensor:
        steps, count, width, gates = gates_TRWG.shape
        hidden_TRWD = gates_TRWG.new_zeros(steps + 1, count, width, gates // 4)  # the state before the first step too
        cells, active = [gates_TRWG.new_zeros(count * width, gates // 4)], []
        for step, inputs_RWG in enumerate(gates_TRWG):
            hidden_BG = torch.bmm(hidden_TRWD[step], recurrent_RGD.mT).flatten(0, 1)
            hidden_BD, cell_BD, active_BG = _cell(inputs_RWG.flatten(0, 1), hidden_BG, cells[-1])
            hidden_TRWD[step + 1] = hidden_BD.view(count, width, -1)
            cells.append(cell_BD)
            active.append(active_BG)
        ctx.save_for_backward(recurrent_RGD, hidden_TRWD)
        ctx.cells, ctx.active = cells, active
        return hidden_TRWD[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_TRWD: Tensor) -> tuple[Tensor, Tensor]:
        recurrent_RGD, hidden_TRWD = ctx.saved_tensors
        steps, count, width, _ = outer_TRWD.shape
        gates_TRWG = recurrent_RGD.new_empty(steps, count, width, recurrent_RGD.shape[1])
        hidden_RWD, cell_BD = outer_TRWD[-1], None
        for step in reversed(range(steps)):
            gates_BG, cell_BD = _cell_backward(
                hidden_RWD.flatten(0, 1), cell_BD, ctx.cells[step], ctx.cells[step + 1], ctx.active[step]
            )
            gates_TRWG[step] = gates_BG.view(count, width, -1)
            if step:
                hidden_RWD = torch.baddbmm(outer_TRWD[step - 1], gates_TRWG[step], recurrent_RGD)
        gates_RGM = gates_TRWG.permute(1, 3, 0, 2).flatten(2)
        return gates_TRWG, torch.bmm(gates_RGM, hidden_TRWD[:-1].transpose(0, 1).flatten(1, 2))


def _cell(inputs_BG: Tensor, hidden_BG: Tensor, cell_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h_t, c_t and the gates; on a GPU in one kernel, torch's own."""
    if inputs_BG.is_cuda:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._thnn_fused_lstm_cell(inputs_BG, hidden_BG, cell_BD)
        return found
    active_BG = inputs_BG + hidden_BG
    i, f, g, o = active_BG.chunk(4, dim=1)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    cell_BD = torch.addcmul(f * cell_BD, i, g)
    return o * cell_BD.tanh(), cell_BD, active_BG


def _cell_backward(
    hidden_BD: Tensor, cell_BD: Tensor | None, before_BD: Tensor, after_BD: Tensor, active_BG: Tensor
) -> tuple[Tensor, Tensor]:
    """δa_t and f_t δc_t, from δh_t, f_{t+1} δc_{t+1}, c_{t-1}, c_t and the gates."""
    if hidden_BD.is_cuda:
        kernel = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        gates_BG, cell_BD, _ = kernel(hidden_BD.contiguous(), cell_BD, before_BD, after_BD, active_BG, False)
        return gates_BG, cell_BD
    i, f, g, o = active_BG.chunk(4, dim=1)
    tanh_BD = after_BD.tanh()
    through_BD = hidden_BD * o * (1 - tanh_BD.square())
    cell_BD = through_BD if cell_BD is None else through_BD + cell_BD
    gates = (
        cell_BD * g * i * (1 - i),
        cell_BD * before_BD * f * (1 - f),
        cell_BD * i * (1 - g.square()),
        hidden_BD * tanh_BD * o * (1 - o),
    )
    return torch.cat(gates, dim=1), cell_BD * f
