"""AdaGrad (optax.adagrad)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_step
from sottovoce.optimisers.ranges import check_range


@final
@dataclass(frozen=True, kw_only=True)
class AdaGrad(Optimiser):
    """θ ← θ - lr·g / √(s + eps) with s ← s + g², and no move where s + eps is 0.

    Pseudo-gradients are small: at 1e-3 and below, the starting sum 0.1 makes this plain SGD with lr/√0.1. The code
    released by Pelikan et al. has its own AdaGrad, g·(1/√s + 1e-8) from a starting sum of 0, which is
    `AdaGrad(initial_accumulator_value=0, eps=0)` up to 1e-8·g.
    """

    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def __post_init__(self) -> None:
        check_range(self, "initial_accumulator_value", "eps", low=0)

    def init(self, parameters: Tensors) -> State:
        return State({"squares": [torch.full_like(p, self.initial_accumulator_value) for p in parameters]})

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        state.advance()
        squares = state.slots["squares"]
        torch._foreach_addcmul_(squares, gradients, gradients)
        roots = list(torch._foreach_add(squares, self.eps))
        # 0/0 where no gradient has come yet: the smallest normal float32 turns it into 0 and leaves all else alone.
        torch._foreach_clamp_min_(roots, torch.finfo(torch.float32).tiny)
        torch._foreach_sqrt_(roots)
        torch._foreach_addcdiv_(parameters, gradients, roots, value=-lr)
        return None
