"""Weights in one flat vector behave as the tensors they are made of."""

import math

import pytest
import torch
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer.settings import init, named_settings
from sottovoce.optimisers import LAMB, LARS, SGD, Adam, Optimiser, tensor_norms
from sottovoce.optimisers.weights import Weights

SETTINGS = named_settings("tiny", tokens=30)
CPU = torch.device("cpu")


def initial() -> dict[str, Tensor]:
    return init(SETTINGS, generator=torch_stream(1, "init"))


def loaded(optimiser: Optimiser, *, dtype: torch.dtype = torch.float32) -> Weights:
    weights = Weights(Layout.of(initial()), optimiser, device=CPU, dtype=dtype)
    weights.load(initial())
    return weights


@pytest.mark.parametrize("optimiser", [LARS(), LAMB(weight_decay=0.1), Adam()], ids=lambda o: type(o).__name__)
def test_a_step_equals_the_step_over_single_tensors(optimiser: Optimiser) -> None:
    alone = [*initial().values()]
    state = optimiser.init(alone)
    weights = loaded(optimiser)
    for step in range(3):
        generator = torch_stream(1, "gradients", step)
        gradients = [torch.randn(p.shape, generator=generator) for p in alone]
        expected = dict(zip(initial(), tensor_norms(gradients).tolist(), strict=True))
        weights.set_gradients(gradients)
        norm, norms = weights.step(lr=0.1, max_norm=1.0)
        whole = math.hypot(*expected.values())
        assert norm == pytest.approx(whole, rel=1e-6)
        gradients = [g * min(1.0, 1.0 / whole) for g in gradients]
        assert dict(zip(weights.norm_names, norms.tolist(), strict=True)) == pytest.approx(expected)
        optimiser.step(alone, gradients, state, lr=0.1)
    for ours, theirs in zip(weights.masters.values(), alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_layer_left_out_has_a_zero_gradient() -> None:
    weights, parameters = loaded(LARS()), initial()
    weights.set_gradients([torch.ones_like(p) for p in parameters.values()])
    weights.set_gradients(
        [None if name.startswith("blocks.02.") else torch.ones_like(p) for name, p in parameters.items()]
    )
    _, norms = weights.step(lr=0.1, max_norm=1e9)
    zero = {name for name, norm in zip(weights.norm_names, norms.tolist(), strict=True) if norm == 0}
    assert zero == {name for name in parameters if name.startswith("blocks.02.")}


def test_bfloat16_copies_follow_their_masters_and_state_survives() -> None:
    first, second = (loaded(Adam(), dtype=torch.bfloat16) for _ in range(2))
    addresses = [copy.data_ptr() for copy in first.working.values()]
    gradients = [torch.ones_like(p) for p in initial().values()]
    first.set_gradients(gradients)
    first.step(lr=0.01, max_norm=1e9)
    for name, copy in first.working.items():
        assert torch.equal(copy, first.masters[name].bfloat16())
        assert copy.requires_grad
    second.load(first.masters)
    second.restore_optimiser({name: tensor.clone() for name, tensor in first.optimiser_tensors().items()})
    for weights in (first, second):
        weights.set_gradients(gradients)
        weights.step(lr=0.01, max_norm=1e9)
    for name, master in first.masters.items():
        assert torch.equal(master, second.masters[name])
    assert [copy.data_ptr() for copy in first.working.values()] == addresses


@pytest.mark.parametrize("optimiser", [SGD(), LARS(), Adam()], ids=lambda o: type(o).__name__)
def test_reset_forgets_the_client_before(optimiser: Optimiser) -> None:
    weights = loaded(optimiser, dtype=torch.bfloat16)
    server = weights.master.clone()
    gradients = [torch.randn(p.shape, generator=torch_stream(1, "g", n)) for n, p in enumerate(initial().values())]

    def update(client: Weights) -> Tensor:
        for _ in range(2):
            client.set_gradients(gradients)
            client.step(lr=0.1, max_norm=1.0)
        return server - client.master

    first = update(weights)
    weights.reset(server)
    assert torch.equal(weights.master, server)
    assert all(torch.equal(copy, weights.masters[name].bfloat16()) for name, copy in weights.working.items())
    assert torch.equal(update(weights), first)


def test_a_small_term_is_added_in_full_even_to_bfloat16_gradients() -> None:
    weights = loaded(SGD(), dtype=torch.bfloat16)
    before = weights.master.clone()
    weights.set_gradients([torch.ones_like(p) for p in initial().values()])
    weights.add_to_gradients(weights.layout.flatten({n: torch.full_like(p, 2**-12) for n, p in initial().items()}))
    weights.step(lr=1.0, max_norm=1e9)
    moved = weights.layout.views(before - weights.master)["output.bias"]
    torch.testing.assert_close(moved, torch.full_like(moved, 1 + 2**-12), rtol=1e-6, atol=0)
    # The next step starts from its own gradients alone.
    before = weights.master.clone()
    weights.set_gradients([torch.ones_like(p) for p in initial().values()])
    weights.step(lr=1.0, max_norm=1e9)
    assert (weights.layout.views(before - weights.master)["output.bias"] - 1).abs().max() < 1e-6
