"""Rescaled LayerNorms: the same function, other gradients."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.models.transformer.network import forward
from sottovoce.models.transformer.settings import Settings, init, norm_readers, rescaled_norms

SETTINGS = Settings(layers=2, width=8, tokens=5, heads=2, features=6, dropout=0.0, layer_drop=0.0)
FEATURES_BTF = torch.randn(2, 30, 6, generator=torch_stream(1, "features"))
LENGTHS_B = torch.tensor([30, 24])


def trained_like(dtype: torch.dtype) -> dict[str, Tensor]:
    """A model in which no LayerNorm is all ones and no bias all zeros."""
    start, generator = init(SETTINGS, generator=torch_stream(1, "init")), torch_stream(1, "moved")
    return {name: (p + 0.3 * torch.randn(p.shape, generator=generator)).to(dtype) for name, p in start.items()}


def outputs(parameters: Mapping[str, Tensor]) -> Tensor:
    features_BTF = FEATURES_BTF.to(parameters["conv.weight"].dtype)
    return forward(parameters, features_BTF, LENGTHS_B, settings=SETTINGS)[0]


def sgd_updates(parameters: Mapping[str, Tensor], *, lr: float = 0.1) -> dict[str, Tensor]:
    """By how much one step of SGD moves each tensor. The loss weighs log-probabilities so that nothing cancels."""
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    log_probs_BTV = outputs(leaves)
    loss = -(log_probs_BTV * torch.linspace(0.5, 1.5, SETTINGS.tokens).to(log_probs_BTV)).mean()
    gradients = torch.autograd.grad(loss, [*leaves.values()])
    return {name: lr * g for name, g in zip(leaves, gradients, strict=True)}


@settings(deadline=None, max_examples=30)
@given(factor=st.floats(1 / 32, 32))
def test_the_function_is_the_same(factor: float) -> None:
    parameters = trained_like(torch.float64)
    rescaled = rescaled_norms(parameters, factor=factor, settings=SETTINGS)
    torch.testing.assert_close(outputs(rescaled), outputs(parameters), rtol=1e-10, atol=1e-10)
    assert [*rescaled] == [*parameters], "in the model's order: the layout of a flat vector hangs on it"


def test_a_power_of_two_changes_no_bit_of_the_outputs() -> None:
    """It only moves exponents: every product W·y rounds as before, also in float32."""
    parameters = trained_like(torch.float32)
    rescaled = rescaled_norms(parameters, factor=8.0, settings=SETTINGS)
    assert torch.equal(outputs(rescaled), outputs(parameters))


def test_norms_move_more_and_their_readers_less_by_the_factor() -> None:
    """L'(v, V) = L(f·v, V/f) at v = w/f, V = f·W: the chain rule gives ∂L'/∂v = f·∂L/∂w and ∂L'/∂V = (1/f)·∂L/∂W.

    SGD's update is lr times that. All other tensors see the same function of themselves and move as before.
    """
    factor, parameters = 6.0, trained_like(torch.float64)
    before = sgd_updates(parameters)
    after = sgd_updates(rescaled_norms(parameters, factor=factor, settings=SETTINGS))
    readers = norm_readers(SETTINGS)
    scales = {f"{norm}.{part}": factor for norm in readers for part in ("weight", "bias")}
    scales |= dict.fromkeys(readers.values(), 1 / factor)
    assert len(readers) == 2 * SETTINGS.layers + 1
    for name, update in before.items():
        assert update.norm() > 1e-9, name
        torch.testing.assert_close(after[name], scales.get(name, 1.0) * update, rtol=1e-9, atol=1e-12, msg=name)


def test_the_inverse_factor_undoes_it_and_the_input_is_left_alone() -> None:
    parameters = trained_like(torch.float64)
    kept = {name: p.clone() for name, p in parameters.items()}
    there = rescaled_norms(parameters, factor=4.0, settings=SETTINGS)
    back = rescaled_norms(there, factor=0.25, settings=SETTINGS)
    for name, p in kept.items():
        assert torch.equal(back[name], p), name
        assert torch.equal(parameters[name], p), name


def test_a_post_norm_model_is_refused() -> None:
    post = replace(SETTINGS, norm="post")
    with pytest.raises(InputError, match="norm='post'"):
        rescaled_norms(init(post, generator=torch_stream(1, "init")), factor=2.0, settings=post)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_keeps_no_function_is_refused(factor: float) -> None:
    with pytest.raises(InputError, match="factor="):
        rescaled_norms(trained_like(torch.float64), factor=factor, settings=SETTINGS)
