"""Stacked CRDNNs are each what it is alone: losses, gradients, masks; and what cannot be stacked says so."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.models.crdnn.test_crdnn import CLOSE, PLAIN, golden_batch, own_weights
from tests.models.replaying_recorder import ReplayingRecorder
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.waveforms import Features, concatenate_features
from sottovoce.models import lstm
from sottovoce.models.crdnn.family import FAMILY, Draws, loss, stacked_losses
from sottovoce.models.crdnn.graphs import RecordedStacks
from sottovoce.models.crdnn.settings import Settings
from sottovoce.models.crdnn.stacked import arrange_lines, attention_kernels, draw_dropout_masks, gru_cell
from sottovoce.models.family import stacking_obstacle

DROPPED = replace(PLAIN, dropout=0.3)
BATCHES = ((0, 1), (), (1,), (1, 0, 1))  # golden utterances of four clients, one of which has no batch any more
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def models(count: int, settings: Settings) -> list[dict[str, Tensor]]:
    """As many models, all different."""
    noise = torch_stream(1, "models")
    return [
        {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
            for name, tensor in own_weights(settings).items()
        }
        for _ in range(count)
    ]


def batch_of(batches: Sequence[Sequence[int]]) -> tuple[Features, list[int]]:
    together = concatenate_features([golden_batch(*own) for own in batches if own])
    return together, [client for client, own in enumerate(batches) for _ in own]


def losses_of(
    own: Sequence[dict[str, Tensor]], batches: Sequence[Sequence[int]], settings: Settings, draws: list[Draws | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """[N], and the parameters that they depend on."""
    stack = {name: torch.stack([model[name] for model in own]).requires_grad_() for name in own[0]}
    together, rows_U = batch_of(batches)
    return stacked_losses(stack, together, rows_U=rows_U, clients=len(own), settings=settings, draws=draws), stack


@pytest.mark.parametrize("mu", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("settings", [PLAIN, DROPPED], ids=["no dropout", "dropout"])
def test_losses_and_gradients_are_those_of_clients_alone(settings: Settings, mu: float) -> None:
    """Also of clients that are past CTC beside others that are not."""
    settings, own = replace(settings, mu=mu), models(len(BATCHES), settings)
    draws = [Draws(number, with_ctc=number != 2) if batch else None for number, batch in enumerate(BATCHES)]
    found_N, stack = losses_of(own, BATCHES, settings, draws)
    gradients = torch.autograd.grad(found_N.sum(), list(stack.values()), allow_unused=True, materialize_grads=True)
    for client, (model, batch, drawn) in enumerate(zip(own, BATCHES, draws, strict=True)):
        if drawn is None:
            assert found_N[client] == 0
            assert not any(gradient[client].any() for gradient in gradients)
            continue
        alone = {name: tensor.requires_grad_() for name, tensor in model.items()}
        expected = loss(alone, golden_batch(*batch), settings=settings, draws=drawn)
        torch.testing.assert_close(found_N[client], expected, **CLOSE)
        expected_gradients = torch.autograd.grad(
            expected, list(alone.values()), allow_unused=True, materialize_grads=True
        )
        for name, gradient, own_gradient in zip(stack, gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient[client], own_gradient, **CLOSE, msg=f"{name} of client {client}")


@pytest.mark.parametrize("settings", [PLAIN, DROPPED], ids=["no dropout", "dropout"])
def test_one_client_with_one_utterance_is_pooled_as_alone(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked bins are equal: rounding says which is the largest and has the gradient, and the layout how to round."""
    own = {name: p.double() for name, p in FAMILY.init(settings, generator=torch_stream(5, "init")).items()}
    batch, layouts, conv2d = golden_batch(1), list[tuple[int, ...]](), F.conv2d
    batch.features_UTF[:, :, 20:60] = 0

    def seen(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layouts.append(x.stride())
        return conv2d(x, weight, bias)

    monkeypatch.setattr(F, "conv2d", seen)
    stack = {name: tensor[None].clone().requires_grad_() for name, tensor in own.items()}
    found_N = stacked_losses(stack, batch, rows_U=[0], clients=1, settings=settings, draws=[Draws(1)])
    alone = {name: tensor.requires_grad_() for name, tensor in own.items()}
    expected = loss(alone, batch, settings=settings, draws=Draws(1))
    torch.testing.assert_close(found_N[0], expected, **CLOSE)
    half = len(layouts) // 2
    assert layouts[:half] == layouts[half:]
    gradients = (torch.autograd.grad(of, list(to.values())) for of, to in ((found_N.sum(), stack), (expected, alone)))
    for name, gradient, own_gradient in zip(own, *gradients, strict=True):
        torch.testing.assert_close(gradient[0], own_gradient, **CLOSE, msg=name)


def test_what_is_not_trained_may_be_shared() -> None:
    own = models(2, PLAIN)
    stack = {name: torch.stack([tensor, tensor]) for name, tensor in own[0].items()}
    for name in ("cnn.0.conv1.weight", "rnn.0.forward.input.weight", "embedding.weight", "attention.places.weight"):
        stack[name] = own[0][name]
    together, rows_U = batch_of([(0,), (0,)])
    found_N = stacked_losses(stack, together, rows_U=rows_U, clients=2, settings=PLAIN, draws=[Draws(1), Draws(2)])
    expected = loss(own[0], golden_batch(0), settings=PLAIN, draws=Draws(1))
    torch.testing.assert_close(found_N, expected.expand(2), **CLOSE)


def test_a_client_that_is_not_finite_spoils_its_own_row() -> None:
    own = models(3, DROPPED)
    own[1]["rnn.0.forward.input.bias"][3] = torch.nan
    found_N, stack = losses_of(own, [(0,), (0, 1), (1,)], DROPPED, [Draws(1), Draws(2), Draws(3)])
    assert found_N.isfinite().tolist() == [True, False, True]
    for gradient in torch.autograd.grad(found_N.sum(), list(stack.values())):
        assert gradient[[0, 2]].isfinite().all()


def test_masks_hang_on_nobody_else() -> None:
    """Longer utterances, more of them, and more clients beside it change nothing of what a client drops."""
    drawn = []
    for batches, place in (([(1,)], 0), ([(0, 1, 0), (1,)], 1)):
        together, rows_U = batch_of(batches)
        lines = arrange_lines(together, rows_U=rows_U, clients=len(batches))
        masks = draw_dropout_masks(lines, [9, 7][-len(batches) :], settings=DROPPED, dtype=torch.float64, decoded=True)
        (given_LNWD,) = masks.decoder
        drawn.append([*(mask[place, 0] for mask in masks.encoder), given_LNWD[:, place, 0]])
    for alone, beside in zip(*drawn, strict=True):
        torch.testing.assert_close(beside[: len(alone)], alone, rtol=0, atol=0)


def test_the_recurrence_has_the_gradients_that_it_says() -> None:
    chance = torch_stream(2, "gates")
    gates, recurrent = (
        torch.randn(shape, generator=chance, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 4, 2, 12), (4, 12, 3))
    )
    assert torch.autograd.gradcheck(lstm.recur, (gates, recurrent))


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_a_convolution_over_steps_is_a_product(steps: int) -> None:
    """With kernels that reach further than there are steps, as far, and less far."""
    chance = torch_stream(3, "attention")
    kernels, attention = (
        torch.randn(shape, generator=chance, dtype=torch.float64) for shape in ((2, 5, 1, 7), (2, 3, steps))
    )
    found = torch.bmm(attention, attention_kernels(kernels, steps)).view(2, 3, steps, 5)
    for client in range(2):
        expected = F.conv1d(attention[client][:, None], kernels[client], padding=3)
        torch.testing.assert_close(found[client], expected.transpose(1, 2), **CLOSE)


@pytest.mark.parametrize("settings", [PLAIN, DROPPED], ids=["no dropout", "dropout"])
def test_recorded_stacks_are_the_plain_ones(settings: Settings) -> None:
    """Also padded to few shapes, with weights that have moved, and after the stack was made anew."""
    padding = {"frame_multiple": 4 * 8, "token_multiple": 4}
    recorded = partial(
        stacked_losses, record=RecordedStacks(lambda _: ReplayingRecorder()), settings=settings, **padding
    )
    for batches in (BATCHES, BATCHES[:1], BATCHES):
        own = models(len(batches), settings)
        draws = [Draws(number) if batch else None for number, batch in enumerate(batches)]
        stack = {name: torch.stack([model[name] for model in own]).requires_grad_() for name in own[0]}
        together, rows_U = batch_of(batches)
        for _ in range(2):
            found = []
            for function in (partial(stacked_losses, settings=settings), recorded):
                found_N = function(stack, together, rows_U=rows_U, clients=len(own), draws=draws)
                found.append([found_N, *torch.autograd.grad(found_N.sum(), list(stack.values()))])
            for plain, again in zip(*found, strict=True):
                torch.testing.assert_close(again, plain, **CLOSE)
            with torch.no_grad():
                for tensor in stack.values():
                    tensor.mul_(0.9)


def test_a_part_of_a_model_is_not_recorded() -> None:
    stack = {name: tensor[None] for name, tensor in models(1, PLAIN)[0].items()}
    stack["ctc.weight"].requires_grad_()
    assert not RecordedStacks(lambda _: ReplayingRecorder())(stack, PLAIN)


def test_stacks_are_recorded_for_long_training_on_a_gpu_alone() -> None:
    stacks = FAMILY.stacking.stacked
    assert stacks is not None
    assert stacks.accelerate is not None
    asked = partial(stacks.accelerate, stacks, batch_seconds=20)
    assert asked(steps=10**6, device=torch.device("cpu")) is stacks
    assert asked(steps=100, device=torch.device("cuda", 0)) is stacks
    assert asked(steps=10**6, device=torch.device("cuda", 0)).full


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"norm": "batch"}, "with norm=batch"), ({"as_released": True}, "with as_released"), ({}, None)],
)
def test_what_hangs_on_the_whole_batch_is_not_stacked(changes: dict[str, object], why: str | None) -> None:
    found = stacking_obstacle(FAMILY, replace(PLAIN, **changes))  # type: ignore[arg-type]
    assert found is None if why is None else why in str(found)


@needs_cuda
def test_torchs_kernels_are_the_cells_that_are_written_out_here() -> None:
    chance = torch_stream(4, "cells")

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, dtype=torch.float64)

    inputs, hidden, cell, back_hidden, back_cell = drawn(6, 12), drawn(6, 12), drawn(6, 3), drawn(6, 3), drawn(6, 3)
    found = {}
    for device in ("cpu", "cuda"):
        output, after, active = lstm._cell(*(t.to(device) for t in (inputs, hidden, cell)))
        kept = (cell.to(device), after, active)
        first = lstm._cell_backward(back_hidden.to(device), None, *kept)
        other = lstm._cell_backward(back_hidden.to(device), back_cell.to(device), *kept)
        given = [t.to(device).requires_grad_() for t in (drawn_NWG(inputs), drawn_NWG(hidden), cell.view(2, 3, 3))]
        gated = gru_cell(*given)
        pulled = torch.autograd.grad(gated.square().sum(), given)
        found[device] = [output, after, *first, *other, gated, *pulled]
    for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, **CLOSE)


def drawn_NWG(gates_BG: Tensor) -> Tensor:
    """An LSTM's gates as those of a GRU, for two clients with three utterances each."""
    return gates_BG[:, :9].reshape(2, 3, 9)


@needs_cuda
def test_on_cuda_losses_and_gradients_are_those_of_the_cpu() -> None:
    own, draws = models(len(BATCHES), PLAIN), [Draws(number) if batch else None for number, batch in enumerate(BATCHES)]
    together, rows_U = batch_of(BATCHES)
    found = {}
    for device in ("cpu", "cuda"):
        stack = {name: torch.stack([m[name] for m in own]).to(device).requires_grad_() for name in own[0]}
        features = replace(together, features_UTF=together.features_UTF.to(device))
        found_N = stacked_losses(stack, features, rows_U=rows_U, clients=len(own), settings=PLAIN, draws=draws)
        found[device] = [found_N, *torch.autograd.grad(found_N.sum(), list(stack.values()))]
    for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-7, atol=1e-7)
