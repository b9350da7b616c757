"""LSTMs over padded lines: torch's own, and many at once with a backward pass of ours, which can be recorded.

cuDNN takes one set of weights at a time, and a large GPU runs its kernels faster than a host launches them. Here one
batched product serves a step of all recurrences (directions, clients), in kernels that CUDA graphs can record:

    a_t = W x_t + b + R h_{t-1}      W x + b for all steps at once, before
    i, f, o = σ(a), g = tanh(a)      c_t = f c_{t-1} + i g        h_t = o tanh(c_t)

and backwards one product a step and one for all steps at the end:

    δc_t = δh_t o (1 - tanh² c_t) + f_{t+1} δc_{t+1}      δh_{t-1} += Rᵀ δa_t      δR = Σ_t δa_t h_{t-1}ᵀ

A backward direction reads each line from its own end, so no padding comes before speech.

Shapes: N clients (1 for a model alone), W lines of each, T steps, I inputs, D width, G = 4·D gates in torch's order (i,
f, g, o), R = 2·N recurrences, the forward ones first, B = R·W.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def turned_places(lengths: Tensor, steps: int) -> Tensor:
    """Where each step of a line lies when the line is read from its own end, [*lengths, T]; behind it as it was."""
    steps_T = torch.arange(steps, device=lengths.device)
    return torch.where(steps_T < lengths[..., None], lengths[..., None] - 1 - steps_T, steps_T)


NAMES = ("input.weight", "recurrent.weight", "input.bias", "recurrent.bias")


class Cell(NamedTuple):
    """The weights of one LSTM, or with a leading axis those of several; in the order of `NAMES`."""

    input: Tensor
    recurrent: Tensor
    input_bias: Tensor
    recurrent_bias: Tensor


def stacked(cells: Sequence[Cell]) -> Cell:
    return Cell(*(torch.stack(weights) for weights in zip(*cells, strict=True)))


def bidirectional(x_NWTI: Tensor, turned_NWT: Tensor, cells: Cell) -> Tensor:
    """One layer in both directions, [N, W, T, 2D]; `cells` are those of all R recurrences."""
    clients, width, steps, _ = x_NWTI.shape
    read_RMI = torch.cat([x_NWTI, _turned(x_NWTI, turned_NWT)]).flatten(1, 2)
    bias_R1G = (cells.input_bias + cells.recurrent_bias)[:, None]
    gates_RMG = torch.baddbmm(bias_R1G, read_RMI, cells.input.mT)
    gates_TRWG = gates_RMG.view(2 * clients, width, steps, -1).permute(2, 0, 1, 3).contiguous()
    forward_NWTD, backward_NWTD = recur(gates_TRWG, cells.recurrent).permute(1, 2, 0, 3).chunk(2)
    return torch.cat([forward_NWTD, _turned(backward_NWTD, turned_NWT)], dim=-1)


def bidirectional_by_torch(x_WTI: Tensor, turned_WT: Tensor, cells: Sequence[Cell]) -> Tensor:
    """The same of one model, whose cells are two: [W, T, 2D]; not packed, which on a CPU takes three times as long."""
    forward_WTD, _ = forwards(x_WTI, cells[:1])
    backward_WTD, _ = forwards(_turned(x_WTI, turned_WT), cells[1:])
    return torch.cat([forward_WTD, _turned(backward_WTD, turned_WT)], dim=-1)


class LstmState(NamedTuple):
    """What LSTMs of several layers, or of several rows, remember: [layers, W, D] each."""

    hidden_LWD: Tensor
    cell_LWD: Tensor


def at_rest(x: Tensor, cells: Sequence[Cell]) -> LstmState:
    """Before the first step, for as many lines as `x` has."""
    zeros_LWD = x.new_zeros(len(cells), x.shape[0], cells[0].recurrent.shape[-1])
    return LstmState(zeros_LWD, zeros_LWD)


def forwards(x_WTI: Tensor, cells: Sequence[Cell], state: LstmState | None = None) -> tuple[Tensor, LstmState]:
    """Causal layers, by torch's own kernels: [W, T, D], and where they stand behind the last step."""
    before = at_rest(x_WTI, cells) if state is None else state
    if torch.compiler.is_exporting():
        return _by_layer(x_WTI, cells, before)
    weights = [weight for cell in cells for weight in cell]
    with warnings.catch_warnings():
        # cuDNN would have all weights in one piece: they are copied for it.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        # cuDNN keeps what its backward pass needs only in training.
        options = (True, len(cells), 0.0, torch.is_grad_enabled(), False, True)
        found_WTD, hidden_LWD, cell_LWD = _lstm(x_WTI, tuple(before), weights, *options)
    return found_WTD, LstmState(hidden_LWD, cell_LWD)


_lstm: Any = torch._VF.lstm  # what nn.LSTM calls


@torch.library.custom_op("sottovoce::lstm_layer", mutates_args=())
def lstm_layer(
    x_WTI: Tensor, hidden_WD: Tensor, cell_WD: Tensor, input: Tensor, recurrent: Tensor, bias_G: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One causal layer as a single operation: torch.export would unroll torch's own over the steps of an example."""
    weights = [input, recurrent, bias_G, torch.zeros_like(bias_G)]
    state = (hidden_WD[None], cell_WD[None])
    found_WTD, hidden_1WD, cell_1WD = _lstm(x_WTI, state, weights, True, 1, 0.0, False, False, True)
    return found_WTD, hidden_1WD[0].clone(), cell_1WD[0].clone()


@lstm_layer.register_fake
def _lstm_layer_shapes(
    x_WTI: Tensor, hidden_WD: Tensor, cell_WD: Tensor, input: Tensor, recurrent: Tensor, bias_G: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found_WTD = x_WTI.new_empty(x_WTI.shape[0], x_WTI.shape[1], recurrent.shape[1])
    return found_WTD, torch.empty_like(hidden_WD), torch.empty_like(cell_WD)


def _by_layer(x_WTI: Tensor, cells: Sequence[Cell], before: LstmState) -> tuple[Tensor, LstmState]:
    hidden, memory = [], []
    for cell, hidden_WD, cell_WD in zip(cells, before.hidden_LWD.unbind(), before.cell_LWD.unbind(), strict=True):
        weights = (cell.input, cell.recurrent, cell.input_bias + cell.recurrent_bias)
        x_WTI, hidden_WD, cell_WD = lstm_layer(x_WTI, hidden_WD, cell_WD, *weights)
        hidden.append(hidden_WD)
        memory.append(cell_WD)
    return x_WTI, LstmState(torch.stack(hidden), torch.stack(memory))


def _turned(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(-2, places[..., None].expand_as(x))


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
