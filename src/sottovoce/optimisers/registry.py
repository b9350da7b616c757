"""Optimisers and schedules by the names that recipes use: ours, or anybody's as `module:Class`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from sottovoce.base.errors import InputError
from sottovoce.base.importing import build_from_settings, import_named, suggest_nearest
from sottovoce.base.parsing import quote
from sottovoce.optimisers.elementwise import SGD, Adadelta, AdaGrad, Adam
from sottovoce.optimisers.layerwise import LAMB, LARS
from sottovoce.optimisers.optimiser import Optimiser
from sottovoce.optimisers.schedules import (
    Constant,
    ExponentialDecay,
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
    return _build("optimiser", _known(OPTIMISERS, name, what="optimiser", kind=Optimiser), name, settings)


def build_schedule(name: str = "", **settings: Any) -> Schedule:
    """The schedule called `name`.

    >>> build_schedule("constant", lr=0.4)
    Constant(lr=0.4)
    """
    return _build("schedule", _known(SCHEDULES, name, what="schedule", kind=Schedule), name, settings)


def _known(registry: Mapping[str, type[T]], name: object, *, what: str, kind: Any) -> Mapping[str, type[T]]:
    """`registry`, and the class that `name` means where it is written as `module:Class`."""
    if not isinstance(name, str):  # a recipe may say anything
        raise InputError(f"{what}: name={quote(name)}, expected one of {', '.join(registry)}")
    if ":" not in name:
        return registry
    made = import_named(name)
    fits = isinstance(made, type) and issubclass(made, kind) and dataclasses.is_dataclass(made)
    if not fits:
        raise InputError(f"{name}: expected a frozen dataclass derived from {kind.__name__}")
    return {**registry, name: made}


def _build(kind: str, registry: Mapping[str, type[T]], name: str, settings: Mapping[str, Any]) -> T:
    if name not in registry:
        raise InputError(f"unknown {kind} {name!r}{suggest_nearest(name, registry)}")
    return build_from_settings(kind, registry[name], name, settings)
