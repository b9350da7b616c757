"""SGD, Adam, AdaGrad and Adadelta take torch's own steps to the bit. Their formulas: `test_golden`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sottovoce.base.seeds import torch_stream
from sottovoce.optimisers import SGD, Adadelta, AdaGrad, Adam, Optimiser, restore_state

RATES = (0.1, 0.1, 0.03, 0.7)
# AdaGrad's eps stands under the root. torch's is added to it, and is but what turns 0/0 into 0.
FLOOR = torch.finfo(torch.float32).tiny ** 0.5
CASES = [
    (SGD(), torch.optim.SGD, {"foreach": True}),
    (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (SGD(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (Adam(), torch.optim.Adam, {"fused": True}),
    (Adam(b1=0.8, b2=0.99, eps=1e-4), torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-4, "fused": True}),
    (AdaGrad(), torch.optim.Adagrad, {"initial_accumulator_value": 0.1 + 1e-7, "eps": FLOOR, "fused": True}),
    (AdaGrad(initial_accumulator_value=0.0, eps=0.0), torch.optim.Adagrad, {"eps": FLOOR, "fused": True}),
    (Adadelta(rho=0.95, eps=1e-8), torch.optim.Adadelta, {"rho": 0.95, "eps": 1e-8, "foreach": True}),
]


def draw(*names: str | int) -> torch.Tensor:
    return torch.randn(1000, generator=torch_stream(1, *names))


@pytest.mark.parametrize(("optimiser", "theirs", "settings"), CASES, ids=lambda case: repr(case)[:60])
def test_steps_of_a_flat_vector_are_those_of_torch(
    optimiser: Optimiser, theirs: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    ours, parameter = draw("parameters"), draw("parameters").requires_grad_()
    state, reference = optimiser.init([ours]), theirs([parameter], lr=1.0, **settings)
    for step, lr in enumerate(RATES):
        gradient = draw("gradients", step)
        optimiser.step([ours], [gradient], state, lr=lr)
        parameter.grad, reference.param_groups[0]["lr"] = gradient, lr
        reference.step()
        assert torch.equal(ours, parameter)
    assert not torch.equal(ours, draw("parameters"))


def test_a_state_saved_before_torch_made_the_steps_is_taken_over() -> None:
    """Names and shapes are the same. The numbers: Adam's first step from zero, m = 0.1·g and v = 0.001·g²."""
    g, parameters = draw("gradients", 0), [draw("parameters")]
    saved = {"count": torch.tensor(1), "first_moment.0": 0.1 * g, "second_moment.0": 0.001 * g**2}
    restored, fresh, moved = Adam().init(parameters), Adam().init(parameters), [parameters[0].clone()]
    Adam().step(moved, [g], fresh, lr=0.0)
    restore_state(restored, tensors=saved)
    after = [[parameters[0].clone()], [parameters[0].clone()]]
    for tensors, state in zip(after, (restored, fresh), strict=True):
        Adam().step(tensors, [draw("gradients", 1)], state, lr=0.1)
    torch.testing.assert_close(after[0], after[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strided", [torch.zeros(4, 3).T, torch.zeros(4, 6)[:, :3]], ids=["transposed", "part"])
def test_tensors_that_are_not_contiguous_are_a_bug(strided: torch.Tensor) -> None:
    for parameter, gradient in ((strided, strided.clone()), (torch.zeros(strided.shape), strided)):
        with pytest.raises(AssertionError, match="expected contiguous tensors"):
            Adam().step([parameter], [gradient], Adam().init([parameter]), lr=0.1)
