"""Adadelta (Zeiler 2012; torch.optim.Adadelta)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_step, zeros_for
from sottovoce.optimisers.ranges import check_range


@final
@dataclass(frozen=True, kw_only=True)
class Adadelta(Optimiser):
    """θ ← θ − lr·d with d = g·√(m + eps)/√(s + eps), s a running mean of g² and m one of d², rho being its memory.

    SpeechBrain's recipes train centrally with lr 1, rho 0.95 and eps 1e-8.
    """

    rho: float = 0.9
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range(self, "rho", low=0, below=1)
        check_range(self, "eps", low=0)

    def init(self, parameters: Tensors) -> State:
        return State({"squares": zeros_for(parameters), "moves": zeros_for(parameters)})

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        state.advance()
        squares, moves = state.slots["squares"], state.slots["moves"]
        torch._foreach_mul_(squares, self.rho)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - self.rho)
        ratios = list(torch._foreach_add(moves, self.eps))
        torch._foreach_div_(ratios, list(torch._foreach_add(squares, self.eps)))
        torch._foreach_sqrt_(ratios)
        torch._foreach_mul_(ratios, list(gradients))
        torch._foreach_mul_(moves, self.rho)
        torch._foreach_addcmul_(moves, ratios, ratios, value=1 - self.rho)
        torch._foreach_add_(parameters, ratios, alpha=-lr)
        return None
