"""Stochastic gradient descent, with momentum and Nesterov's look-ahead (optax.sgd)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_step, zeros_for
from sottovoce.optimisers.ranges import check_range


@final
@dataclass(frozen=True, kw_only=True)
class SGD(Optimiser):
    """θ ← θ - lr·m with m ← momentum·m + g. Without momentum there is no state at all.

    >>> parameters = [torch.tensor([1.0, 2.0])]
    >>> optimiser = SGD()
    >>> optimiser.step(parameters, [torch.tensor([2.0, 0.0])], optimiser.init(parameters), lr=0.5)
    >>> parameters
    [tensor([0., 2.])]
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range(self, "momentum", low=0, below=1)
        if self.nesterov and not self.momentum:
            raise InputError(f"SGD: nesterov=True with momentum={self.momentum}, expected momentum above 0")

    def init(self, parameters: Tensors) -> State:
        return State({"momentum": zeros_for(parameters)} if self.momentum else {})

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        state.advance()
        if not self.momentum:
            torch._foreach_add_(parameters, gradients, alpha=-lr)
            return None
        momenta = state.slots["momentum"]
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, gradients)
        if self.nesterov:  # moves by g + momentum·m: the gradient counts once more
            torch._foreach_add_(parameters, gradients, alpha=-lr)
            torch._foreach_add_(parameters, momenta, alpha=-lr * self.momentum)
        else:
            torch._foreach_add_(parameters, momenta, alpha=-lr)
        return None
