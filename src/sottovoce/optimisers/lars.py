"""LARS: layer-wise adaptive rate scaling, You et al. 2017 (optax.lars)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sottovoce.optimisers.norms import per_tensor, tensor_norms, trust_ratios
from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_step, zeros_for
from sottovoce.optimisers.ranges import check_range


@final
@dataclass(frozen=True, kw_only=True)
class LARS(Optimiser):
    """θ ← θ - m with m ← momentum·m + lr·ratio·u, u = g + weight_decay·θ, ratio = trust_coefficient·‖θ‖/(‖u‖ + eps).

    Norms are taken per parameter tensor. The learning rate is inside the momentum, as in optax: a change of rate acts
    on new gradients only.

    What a learning rate means: one gradient moves a tensor by lr·trust_coefficient of its own norm, and a steady one
    by 1/(1-momentum) times that. "LARS lr 0.5" of Pelikan et al. is optax's lr beside trust_coefficient 0.001 and
    momentum 0.9, so 0.05 % and 0.5 %. Their released code passes an eps of 1e-8;
    it matters only to tensors with a gradient norm near that.
    """

    momentum: float = 0.9
    trust_coefficient: float = 0.001
    weight_decay: float = 0.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "momentum", low=0, below=1)
        check_range(self, "trust_coefficient", "weight_decay", "eps", low=0)

    def init(self, parameters: Tensors) -> State:
        return State({"momentum": zeros_for(parameters)})

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        state.advance()
        updates = gradients
        if self.weight_decay:
            updates = torch._foreach_add(gradients, parameters, alpha=self.weight_decay)
        norms = [tensor_norms(tensors, stacked=stacked) for tensors in (parameters, updates)]
        ratios = trust_ratios(*norms, coefficient=self.trust_coefficient, eps=self.eps)
        momenta = state.slots["momentum"]
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_addcmul_(momenta, updates, per_tensor(ratios, updates), value=lr)
        torch._foreach_sub_(parameters, momenta)
        return ratios
