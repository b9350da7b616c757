"""The server: one optimiser step against the noised mean of the clients' updates, and an average of its models.

Everything here happens after the noise, so whatever it returns is public.

Shapes: P flat length, H tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.flat.layout import Layout
from sottovoce.optimisers import (
    LAMB,
    Optimiser,
    Schedule,
    State,
    build_optimiser,
    build_schedule,
    check_rotates,
    restore_state,
    rotate_state,
    state_tensors,
    tensor_norms,
)

EMA = "ema"


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors that are trained in the same steps, by their places, and what the optimiser remembers of them.

    It counts the steps that trained them: in the others nothing of theirs moves, no moment decays.
    """

    places: tuple[int, ...]
    state: State


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
        self._groups = [
            _Group(places, self._optimiser.init([self._views[place] for place in places]))
            for places in _places_by_steps(layout)
        ]
        self._average_P = None if settings.ema is None else parameters_P.clone()

    @torch.no_grad()
    def step(self, pseudo_gradient_P: Tensor, *, step: int) -> ServerStep:
        """Move the model against the mean update of round `step`: what the layout does not hold of it."""
        gradients, lr = [*self.layout.views(pseudo_gradient_P).values()], self._schedule(step)
        norms_H = tensor_norms(gradients)
        held, ratios = self.layout.held_at(step), dict[int, Tensor]()
        for group in self._groups:
            if self.layout.names[group.places[0]] in held:
                continue
            views, own = ([tensors[place] for place in group.places] for tensors in (self._views, gradients))
            found = self._optimiser.step(views, own, group.state, lr=lr)
            if found is not None:
                ratios |= zip(group.places, found.unbind(), strict=True)
        one = torch.ones_like(norms_H[0])
        every = [ratios.get(place, one) for place in range(len(self._views))]
        return ServerStep(lr, norms_H, torch.stack(every) if ratios else None)

    def check_can_change_basis(self) -> None:
        """Refuse an optimiser of which it is not known how (`change_basis`)."""
        for group in self._groups:
            check_rotates(group.state)

    @torch.no_grad()
    def change_basis(self, *, rows: str, columns: str, basis_RR: Tensor, rows_RI: Tensor) -> None:
        """Make b·x and a' of b and a, the tensors `columns` and `rows`, where a' spans what a does and b·x·a' is b·a.

        In the average of models too, which stays that of the products; and what the optimiser remembers of b turns.
        """
        a, b = self.layout.names.index(rows), self.layout.names.index(columns)
        models = [self.parameters_P] if self._average_P is None else [self.parameters_P, self._average_P]
        basis_RR = basis_RR.to(self.parameters_P.device)
        for model_P in models:
            views = self.layout.views(model_P)
            views[rows].copy_(rows_RI)
            views[columns].copy_(views[columns].to(basis_RR) @ basis_RR)
        for group in self._groups:
            check_invariant(a not in group.places, f"{rows} is trained: what the optimiser knows of it would not fit")
            if b in group.places:
                rotate_state(group.state, group.places.index(b), basis_RR=basis_RR)

    def multipliers(self, moved: ServerStep) -> Tensor | None:
        """[2, H]: the smallest and the largest p of each tensor in that step, which is the last (Eq. 10).

        p is what LAMB multiplies an element of the mean update by, beside the learning rate; None for other optimisers.
        """
        if not isinstance(self._optimiser, LAMB) or moved.trust_ratios_H is None:
            return None
        (group,) = self._groups
        return self._optimiser.scale_range(group.state) * moved.trust_ratios_H

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
        states = [state_tensors(group.state) for group in self._groups]
        if len(states) == 1:
            return states[0] | average
        return {f"{number}.{name}": own for number, state in enumerate(states) for name, own in state.items()} | average

    @torch.no_grad()
    def restore(self, parameters_P: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.parameters_P.copy_(parameters_P)
        own = dict(tensors)
        if self._average_P is not None:
            if EMA not in own:
                raise InputError("the checkpoint has no average of the server's models: it was saved without ema")
            self._average_P.copy_(own.pop(EMA))
        for number, group in enumerate(self._groups):
            start = "" if len(self._groups) == 1 else f"{number}."
            found = {name.removeprefix(start): tensor for name, tensor in own.items() if name.startswith(start)}
            restore_state(group.state, tensors=found)


def _places_by_steps(layout: Layout) -> list[tuple[int, ...]]:
    """The places of tensors that the same steps train; not of those that none does."""
    found: dict[tuple[bool, ...], list[int]] = {}
    for place, name in enumerate(layout.names):
        found.setdefault(tuple(name not in held for held in layout.held or ((),)), []).append(place)
    return [tuple(places) for steps, places in found.items() if any(steps)]
