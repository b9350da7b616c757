"""Adadelta takes torch's own steps."""

import torch

from sottovoce.optimisers import Adadelta
from sottovoce.seeds import torch_stream


def test_steps_are_those_of_torch() -> None:
    """In float64, over steps in which both running means fill up."""
    generator = torch_stream(1, "adadelta")
    start = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    theirs, ours = start.clone().requires_grad_(), [start.clone()]
    reference = torch.optim.Adadelta([theirs], lr=0.7, rho=0.95, eps=1e-8)
    optimiser = Adadelta(rho=0.95, eps=1e-8)
    state = optimiser.init(ours)
    for _ in range(30):
        gradient = torch.randn(5, 7, generator=generator, dtype=torch.float64)
        theirs.grad = gradient.clone()
        reference.step()
        optimiser.step(ours, [gradient], state, lr=0.7)
    torch.testing.assert_close(ours[0], theirs.detach(), rtol=1e-12, atol=1e-12)
