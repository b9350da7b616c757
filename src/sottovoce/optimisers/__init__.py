"""Optimisers over parameter lists and learning-rate schedules, with the formulas of optax.

Recipes call them by name: ours by a word, anybody's as `module:Class`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from sottovoce.base.errors import InputError
from sottovoce.base.importing import build_from_settings, import_named, suggest_nearest
from sottovoce.base.parsing import quote
from sottovoce.optimisers.elementwise import SGD, Adadelta, AdaGrad, Adam
from sottovoce.optimisers.layerwise import LAMB, LARS
from sottovoce.optimisers.optimiser import (
    Optimiser,
    State,
    check_rotates,
    restore_state,
    rotate_state,
    state_tensors,
    tensor_norms,
)
from sottovoce.optimisers.schedules import (
    Annealed,
    Constant,
    ExponentialDecay,
    NewBob,
    Schedule,
    StepDecay,
    WarmupCosine,
    WarmupInverseSqrt,
)

OPTIMISERS: Mapping[str, type[Optimiser]] = {
    "sgd": SGD,
    "adam": Adam,
    "adagrad": AdaGrad,
    "adadelta": Adadelta,
    "lars": LARS,
    "lamb": LAMB,
}

SCHEDULES: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "step": StepDecay,
    "exponential": ExponentialDecay,
    "warmup_cosine": WarmupCosine,
    "warmup_inverse_sqrt": WarmupInverseSqrt,
}

__all__ = ["OPTIMISERS", "SCHEDULES", "Annealed", "NewBob", "Optimiser", "Schedule", "State"]
__all__ += ["LAMB", "LARS", "SGD", "AdaGrad", "Adadelta", "Adam"]
__all__ += ["Constant", "ExponentialDecay", "StepDecay", "WarmupCosine", "WarmupInverseSqrt"]
__all__ += ["build_optimiser", "build_schedule", "check_rotates", "restore_state", "rotate_state"]
__all__ += ["state_tensors", "tensor_norms"]

T = TypeVar("T")


def build_optimiser(name: str = "", **settings: Any) -> Optimiser:
    """The optimiser called `name`.

    >>> build_optimiser("lars", momentum=0.8)
    LARS(momentum=0.8, trust_coefficient=0.001, weight_decay=0.0, eps=0.0)
    >>> build_optimiser("lars", trust=0.01)
    Traceback (most recent call last):
    sottovoce.base.errors.InputError: optimiser lars: unknown setting 'trust', did you mean 'trust_coefficient'? \
(known: momentum, trust_coefficient, weight_decay, eps)
    """
    return _build("optimiser", OPTIMISERS, Optimiser, name, settings)


def build_schedule(name: str = "", **settings: Any) -> Schedule:
    """The schedule called `name`.

    >>> build_schedule("constant", lr=0.4)
    Constant(lr=0.4)
    """
    return _build("schedule", SCHEDULES, Schedule, name, settings)


def _build(kind: str, known: Mapping[str, type[T]], base: Any, name: object, settings: Mapping[str, Any]) -> T:
    """One of the `known`, or of the class derived from `base` that `name` means where it is `module:Class`."""
    if not isinstance(name, str):  # a recipe may say anything
        raise InputError(f"{kind}: name={quote(name)}, expected one of {', '.join(known)}")
    if ":" in name:
        made = import_named(name)
        if not (isinstance(made, type) and issubclass(made, base) and dataclasses.is_dataclass(made)):
            raise InputError(f"{name}: expected a frozen dataclass derived from {base.__name__}")
        known = {**known, name: cast(type[T], made)}
    if name not in known:
        raise InputError(f"unknown {kind} {name!r}{suggest_nearest(name, known)}")
    return build_from_settings(kind, known[name], name, settings)
