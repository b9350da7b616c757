"""SGD, Adam, AdaGrad and Adadelta: the functions of `torch.optim`, over our own `State`.

Its functions and not its objects: an object makes its state at its first step and reads gradients from `.grad`, while
ours must be saved at step 0, take gradients as they come and start anew for every client.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from sottovoce.base.errors import InputError
from sottovoce.optimisers.optimiser import Optimiser, State, Tensors, check_range, check_step

Listed = list[Tensor]
Slots = list[list[Tensor]]


class ElementwiseOptimiser(Optimiser):
    """One that asks nothing of a tensor as a whole: a flat vector may as well be one, and stacked clients too."""

    @abstractmethod
    def initial_values(self) -> dict[str, float]:
        """The name of each number that is kept for every element of a parameter, and what it starts from."""

    @abstractmethod
    def update(self, params: Listed, grads: Listed, slots: Slots, *, steps: int, **common: Any) -> None:
        """Moves `params` and `slots`, a list for each initial value. There were `steps` steps before this one."""

    def init(self, parameters: Tensors) -> State:
        values = self.initial_values()
        return State({name: [torch.full_like(p, value) for p in parameters] for name, value in values.items()})

    @torch.no_grad()
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        check_step(parameters, gradients, lr)
        # torch's fused kernels walk through memory and would not notice strides.
        assert all(tensor.is_contiguous() for tensor in (*parameters, *gradients)), "expected contiguous tensors"
        steps, slots = state.advance() - 1, [*state.slots.values()]
        self.update([*parameters], [*gradients], slots, steps=steps, lr=lr, weight_decay=0.0, maximize=False)
        return None


@final
@dataclass(frozen=True, kw_only=True)
class SGD(ElementwiseOptimiser):
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

    def initial_values(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def update(self, params: Listed, grads: Listed, slots: Slots, *, steps: int, **common: Any) -> None:
        if not slots:  # as torch does, without its bookkeeping: this is every client's local step
            torch._foreach_add_(params, grads, alpha=-common["lr"])
            return
        # Fused: torch's other way would write Nesterov's step into the gradients.
        sgd(
            params, grads, [*slots[0]], fused=True,
            momentum=self.momentum, dampening=0.0, nesterov=self.nesterov, **common,
        )  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True)
class Adam(ElementwiseOptimiser):
    """θ ← θ - lr·(m̂ / (√v̂ + eps) + weight_decay·θ). Weight decay above 0 makes it AdamW."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "b1", "b2", low=0, below=1)
        check_range(self, "eps", "weight_decay", low=0)

    def initial_values(self) -> dict[str, float]:
        return {"first_moment": 0.0, "second_moment": 0.0}

    def update(self, params: Listed, grads: Listed, slots: Slots, *, steps: int, **common: Any) -> None:
        if self.weight_decay:
            # Not torch's product with 1 - lr·weight_decay: rounding that number to float32 would bias a small decay.
            torch._foreach_add_(params, params, alpha=-common["lr"] * self.weight_decay)
        (first, second), counts = slots, _counts(steps, params, device=params[0].device)
        adam(
            params, grads, first, second, [], counts, fused=True,
            amsgrad=False, beta1=self.b1, beta2=self.b2, eps=self.eps, **common,
        )  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True)
class AdaGrad(ElementwiseOptimiser):
    """θ ← θ - lr·g / √(s + eps) with s ← s + g², and no move where s + eps is 0.

    Pseudo-gradients are small: at 1e-3 and below, the starting sum 0.1 makes this plain SGD with lr/√0.1. The code
    released by Pelikan et al. has its own AdaGrad, g·(1/√s + 1e-8) from a starting sum of 0, which is
    `AdaGrad(initial_accumulator_value=0, eps=0)` up to 1e-8·g.
    """

    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def __post_init__(self) -> None:
        check_range(self, "initial_accumulator_value", "eps", low=0)

    def initial_values(self) -> dict[str, float]:
        # torch's eps is added to √s: ours, which belongs under the root, is part of s from the start.
        return {"squares": self.initial_accumulator_value + self.eps}

    def update(self, params: Listed, grads: Listed, slots: Slots, *, steps: int, **common: Any) -> None:
        # 0/0 where no gradient has come yet: the root of the smallest normal number turns it into 0.
        floor, fused = torch.finfo(params[0].dtype).tiny ** 0.5, params[0].device.type == "cpu"
        counts = _counts(steps, params)
        adagrad(params, grads, slots[0], counts, fused=fused, foreach=not fused, lr_decay=0.0, eps=floor, **common)


@final
@dataclass(frozen=True, kw_only=True)
class Adadelta(ElementwiseOptimiser):
    """θ ← θ - lr·d with d = g·√(m + eps)/√(s + eps), s a running mean of g² and m one of d², rho being its memory.

    SpeechBrain's recipes train centrally with lr 1, rho 0.95 and eps 1e-8.
    """

    rho: float = 0.9
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range(self, "rho", low=0, below=1)
        check_range(self, "eps", low=0)

    def initial_values(self) -> dict[str, float]:
        return {"squares": 0.0, "moves": 0.0}

    def update(self, params: Listed, grads: Listed, slots: Slots, *, steps: int, **common: Any) -> None:
        (squares, moves), counts = slots, _counts(steps, params)
        adadelta(params, grads, squares, moves, counts, foreach=True, rho=self.rho, eps=self.eps, **common)


def _counts(steps: int, params: Listed, *, device: torch.device | None = None) -> Listed:
    """The steps before this one, as torch counts them for every tensor; on the CPU unless a fused kernel reads them."""
    return [*torch.full((len(params),), float(steps), device=device).unbind()]
