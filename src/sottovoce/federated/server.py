"""The server: one optimiser step against the noised mean of the clients' updates, and an average of its models.

Everything here happens after the noise, so whatever it returns is public.

Shapes: P flat length, H tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Layout
from sottovoce.optimisers import (
    LAMB,
    Optimiser,
    Schedule,
    build_optimiser,
    build_schedule,
    restore_state,
    state_tensors,
    tensor_norms,
)

EMA = "ema"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The server's optimiser and learning rate. `ema` is the share of the old average kept at each step, or None.

    With `ema` the averaged model is what is evaluated and saved as the run's result; training goes on from the last.
    """

    optimiser: Mapping[str, Any]
    schedule: Mapping[str, Any]
    ema: float | None = None

    def __post_init__(self) -> None:
        if self.ema is not None and not 0 <= self.ema < 1:
            raise InputError(f"server: ema={self.ema}, expected a share in [0, 1), or none")
        self.built_optimiser()
        self.built_schedule()

    def built_optimiser(self) -> Optimiser:
        return build_optimiser(**self.optimiser)

    def built_schedule(self) -> Schedule:
        return build_schedule(**self.schedule)


@dataclass(frozen=True)
class ServerStep:
    """What a step was like; public."""

    lr: float
    norms_H: Tensor
    trust_ratios_H: Tensor | None


class Server:
    """The server's model, float32 and flat, and its optimiser."""

    def __init__(self, settings: ServerSettings, layout: Layout, parameters_P: Tensor) -> None:
        self.layout, self.parameters_P = layout, parameters_P
        self._optimiser, self._schedule, self._ema = settings.built_optimiser(), settings.built_schedule(), settings.ema
        self._views = [*layout.views(parameters_P).values()]
        self._state = self._optimiser.init(self._views)
        self._average_P = None if settings.ema is None else parameters_P.clone()

    @torch.no_grad()
    def step(self, pseudo_gradient_P: Tensor, *, step: int) -> ServerStep:
        """Move the model against the mean update of round `step`."""
        gradients, lr = [*self.layout.views(pseudo_gradient_P).values()], self._schedule(step)
        norms_H = tensor_norms(gradients)
        trust_ratios_H = self._optimiser.step(self._views, gradients, self._state, lr=lr)
        return ServerStep(lr, norms_H, trust_ratios_H)

    def multipliers(self, moved: ServerStep) -> Tensor | None:
        """[2, H]: the smallest and the largest p of each tensor in that step, which is the last (Eq. 10).

        p is what LAMB multiplies an element of the mean update by, beside the learning rate; None for other optimisers.
        """
        if not isinstance(self._optimiser, LAMB) or moved.trust_ratios_H is None:
            return None
        return self._optimiser.scale_range(self._state) * moved.trust_ratios_H

    @torch.no_grad()
    def average(self) -> None:
        """Count the model that a round ends with into the average, where there is one."""
        if self._average_P is not None:
            assert self._ema is not None
            self._average_P.lerp_(self.parameters_P, 1 - self._ema)

    @property
    def result_P(self) -> Tensor:
        """The model that is evaluated: the average where there is one."""
        return self.parameters_P if self._average_P is None else self._average_P

    def tensors(self) -> dict[str, Tensor]:
        """All but the parameters that a checkpoint must keep."""
        average = {} if self._average_P is None else {EMA: self._average_P}
        return state_tensors(self._state) | average

    @torch.no_grad()
    def restore(self, parameters_P: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.parameters_P.copy_(parameters_P)
        own = dict(tensors)
        if self._average_P is not None:
            if EMA not in own:
                raise InputError("the checkpoint has no average of the server's models: it was saved without ema")
            self._average_P.copy_(own.pop(EMA))
        restore_state(self._state, tensors=own)
