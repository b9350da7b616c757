"""Adam, with decoupled weight decay when that is set (optax.adam, optax.adamw)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_step, zeros_for
from sottovoce.optimisers.ranges import check_range


@final
@dataclass(frozen=True, kw_only=True)
class Adam(Optimiser):
    """θ ← θ - lr·(m̂ / (√(v̂ + eps_root) + eps) + weight_decay·θ). Weight decay above 0 makes it AdamW.

    The bias corrections are computed in double precision; optax does so in float32, and its first steps are off by
    some 1e-5 of the update for it.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "b1", "b2", low=0, below=1)
        check_range(self, "eps", "eps_root", "weight_decay", low=0)

    def init(self, parameters: Tensors) -> State:
        return init_moments(parameters)

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        count = update_moments(state, gradients, b1=self.b1, b2=self.b2)
        denominators = moment_roots(state, bias=1 - self.b2**count, eps=self.eps, eps_root=self.eps_root)
        if self.weight_decay:
            # Not a product with 1 - lr·weight_decay: rounding that number to float32 would bias a small decay.
            torch._foreach_add_(parameters, parameters, alpha=-lr * self.weight_decay)
        step_size = -lr / (1 - self.b1**count)
        torch._foreach_addcdiv_(parameters, state.slots["first_moment"], denominators, value=step_size)
        return None


def init_moments(parameters: Tensors) -> State:
    """Zero first and second moments, as Adam and LAMB keep them."""
    return State({"first_moment": zeros_for(parameters), "second_moment": zeros_for(parameters)})


def update_moments(state: State, gradients: Tensors, *, b1: float, b2: float) -> int:
    """m ← b1·m + (1-b1)·g, v ← b2·v + (1-b2)·g²; returns the number of this step, starting with 1."""
    first, second = state.slots["first_moment"], state.slots["second_moment"]
    torch._foreach_lerp_(first, gradients, 1 - b1)
    torch._foreach_mul_(second, b2)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - b2)
    return state.advance()


def moment_roots(state: State, *, bias: float, eps: float, eps_root: float) -> list[Tensor]:
    """√(v/bias + eps_root) + eps, as new tensors."""
    roots = list(torch._foreach_div(state.slots["second_moment"], bias))
    if eps_root:
        torch._foreach_add_(roots, eps_root)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    return roots
