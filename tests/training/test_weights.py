"""Weights in stacks behave as the tensors they are made of."""

import pytest
import torch

from sottovoce.models.ctc_transformer import init, named_settings
from sottovoce.optimisers import LAMB, LARS, Adam, Optimiser, clip_gradients, tensor_norms
from sottovoce.seeds import torch_stream
from sottovoce.training.weights import Weights

SETTINGS = named_settings("tiny", tokens=30)
CPU = torch.device("cpu")


@pytest.mark.parametrize("optimiser", [LARS(), LAMB(weight_decay=0.1), Adam()], ids=lambda o: type(o).__name__)
def test_a_step_equals_the_step_over_single_tensors(optimiser: Optimiser) -> None:
    parameters = init(SETTINGS, generator=torch_stream(1, "init"))
    alone = [p.clone() for p in parameters.values()]
    state = optimiser.init(alone)
    weights = Weights(parameters, optimiser, device=CPU, dtype=torch.float32)
    for step in range(3):
        generator = torch_stream(1, "gradients", step)
        gradients = [torch.randn(p.shape, generator=generator) for p in alone]
        weights.set_gradients(gradients)
        norm, norms = weights.clip(1.0)
        assert torch.allclose(norms, _by_name(weights, tensor_norms(gradients), parameters))
        assert norm == pytest.approx(clip_gradients(gradients, max_norm=1.0).item(), rel=1e-6)
        weights.step(lr=0.1)
        optimiser.step(alone, gradients, state, lr=0.1)
    for ours, theirs in zip(weights.masters.values(), alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def _by_name(weights: Weights, norms: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    value = dict(zip(parameters, norms.tolist(), strict=True))
    return torch.tensor([value[name] for name in weights.norm_names])


def test_a_layer_left_out_has_a_zero_gradient() -> None:
    parameters = init(SETTINGS, generator=torch_stream(1, "init"))
    weights = Weights(parameters, LARS(), device=CPU, dtype=torch.float32)
    weights.set_gradients([torch.ones_like(p) for p in parameters.values()])
    weights.set_gradients(
        [None if name.startswith("blocks.02.") else torch.ones_like(p) for name, p in parameters.items()]
    )
    _, norms = weights.clip(1e9)
    zero = {name for name, norm in zip(weights.norm_names, norms.tolist(), strict=True) if norm == 0}
    assert zero == {name for name in parameters if name.startswith("blocks.02.")}


def test_bfloat16_copies_follow_their_masters_and_state_survives() -> None:
    parameters = init(SETTINGS, generator=torch_stream(1, "init"))
    first = Weights(parameters, Adam(), device=CPU, dtype=torch.bfloat16)
    second = Weights(parameters, Adam(), device=CPU, dtype=torch.bfloat16)
    gradients = [torch.ones_like(p) for p in parameters.values()]
    first.set_gradients(gradients)
    first.step(lr=0.01)
    for name, copy in first.working.items():
        assert torch.equal(copy, first.masters[name].bfloat16())
        assert copy.requires_grad
    second.load(first.masters)
    second.restore_optimiser({name: tensor.clone() for name, tensor in first.optimiser_tensors().items()})
    for weights in (first, second):
        weights.set_gradients(gradients)
        weights.step(lr=0.01)
    for name, master in first.masters.items():
        assert torch.equal(master, second.masters[name])
