"""LARS (You et al. 2017, optax.lars) and LAMB (You et al. 2020, optax.lamb): norms are taken per parameter tensor."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_range, check_step, tensor_norms, zeros_for


@final
@dataclass(frozen=True, kw_only=True)
class LARS(Optimiser):
    """θ ← θ - m with m ← momentum·m + lr·ratio·u, u = g + weight_decay·θ, ratio = trust_coefficient·‖θ‖/(‖u‖ + eps).

    The learning rate is inside the momentum, as in optax: a change of rate acts on new gradients only. One gradient
    moves a tensor by lr·trust_coefficient of its own norm, and a steady one by 1/(1-momentum) times that. "LARS lr 0.5"
    of Pelikan et al. is optax's lr beside trust_coefficient 0.001 and momentum 0.9, so 0.05 % and 0.5 %. Their released
    code passes an eps of 1e-8; it matters only to tensors with a gradient norm near that.
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
        torch._foreach_addcmul_(momenta, updates, _per_tensor(ratios, updates), value=lr)
        torch._foreach_sub_(parameters, momenta)
        return ratios


@final
@dataclass(frozen=True, kw_only=True)
class LAMB(Optimiser):
    """θ ← θ - lr·ratio·u with u = m̂ / (√(v̂ + eps_root) + eps) + weight_decay·θ and ratio = ‖θ‖/‖u‖.

    One step moves each tensor by lr of its own norm, however small the gradients. eps decides which *elements* share in
    that move: those with gradients far below it count by size, those far above by sign alone. With a clip bound of
    0.01 pseudo-gradients are near the default, so eps is a real setting.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    eps_root: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "b1", "b2", low=0, below=1)
        check_range(self, "eps", "eps_root", "weight_decay", low=0)

    def init(self, parameters: Tensors) -> State:
        return State({"first_moment": zeros_for(parameters), "second_moment": zeros_for(parameters)})

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        count, first, second = state.advance(), state.slots["first_moment"], state.slots["second_moment"]
        torch._foreach_lerp_(first, gradients, 1 - self.b1)
        torch._foreach_mul_(second, self.b2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.b2)
        # Bias corrections in double precision: optax has them in float32, which costs some 1e-5 of the first updates.
        denominators = torch._foreach_div(second, 1 - self.b2**count)
        if self.eps_root:
            torch._foreach_add_(denominators, self.eps_root)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_mul_(denominators, 1 - self.b1**count)
        updates = torch._foreach_div(first, denominators)
        del denominators
        if self.weight_decay:
            torch._foreach_add_(updates, parameters, alpha=self.weight_decay)
        norms = [tensor_norms(tensors, stacked=stacked) for tensors in (parameters, updates)]
        ratios = trust_ratios(*norms, coefficient=1.0, eps=0.0)
        torch._foreach_addcmul_(parameters, updates, _per_tensor(ratios, updates), value=-lr)
        return ratios

    @torch.no_grad()
    def scale_range(self, state: State) -> Tensor:
        """[2, H]: the smallest and the largest 1/(√(v̂ + eps_root) + eps) of each tensor, after a step."""
        corrections = 1 - self.b2 ** int(state.count)
        seconds = state.slots["second_moment"]
        ends = torch.stack([torch.stack([v.max(), v.min()]) for v in seconds], dim=1).double() / corrections
        return 1 / ((ends + self.eps_root).sqrt() + self.eps)


def trust_ratios(parameter_norms: Tensor, update_norms: Tensor, *, coefficient: float, eps: float) -> Tensor:
    """coefficient·‖θ‖ / (‖u‖ + eps) for every tensor (and client), and 1 where either norm is zero.

    As optax.scale_by_trust_ratio has it: 1, not `coefficient`, so that a tensor starting at zero can leave it.
    """
    ratios = coefficient * parameter_norms / (update_norms + eps)
    # masked_fill and not where: a scalar given to `where` is copied to the device, and the copy waits for it.
    return ratios.masked_fill((parameter_norms == 0) | (update_norms == 0), 1.0)


def _per_tensor(values: Tensor, tensors: Tensors) -> list[Tensor]:
    """values_H or values_CH as one factor for each of the `tensors`, which it broadcasts against."""
    if values.ndim == 1:
        return list(values.unbind())
    return [v_C.reshape(-1, *[1] * (t.ndim - 1)) for v_C, t in zip(values.unbind(dim=1), tensors, strict=True)]
