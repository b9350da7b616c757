"""Optimisers and schedules by the names that recipes use: ours, or anybody's as `module:Class`."""

import dataclasses
import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from sottovoce.errors import InputError
from sottovoce.optimisers.adadelta import Adadelta
from sottovoce.optimisers.adagrad import AdaGrad
from sottovoce.optimisers.adam import Adam
from sottovoce.optimisers.lamb import LAMB
from sottovoce.optimisers.lars import LARS
from sottovoce.optimisers.optimiser import Optimiser
from sottovoce.optimisers.schedules import (
    Constant,
    ExponentialDecay,
    Schedule,
    StepDecay,
    WarmupCosine,
    WarmupInverseSqrt,
)
from sottovoce.optimisers.sgd import SGD
from sottovoce.parsing import shown

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
    sottovoce.errors.InputError: optimiser lars: unknown setting 'trust', did you mean 'trust_coefficient'? \
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
        raise InputError(f"{what}: name={shown(name)}, expected one of {', '.join(registry)}")
    module, colon, attribute = name.partition(":")
    if not colon:
        return registry
    try:
        made: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"{name}: cannot be imported ({error})") from None
    fits = isinstance(made, type) and issubclass(made, kind) and dataclasses.is_dataclass(made)
    if not fits:
        raise InputError(f"{name}: expected a frozen dataclass derived from {kind.__name__}")
    return {**registry, name: made}


def _build(kind: str, registry: Mapping[str, type[T]], name: str, settings: Mapping[str, Any]) -> T:
    if name not in registry:
        raise InputError(f"unknown {kind} {name!r}{_nearest(name, registry)}")
    made = registry[name]
    assert dataclasses.is_dataclass(made)
    fields = {field.name: field for field in dataclasses.fields(made)}
    for setting in settings:
        if setting not in fields:
            raise InputError(f"{kind} {name}: unknown setting {setting!r}{_nearest(setting, fields)}")
    for setting, field in fields.items():
        if field.default is dataclasses.MISSING and setting not in settings:
            raise InputError(f"{kind} {name}: setting {setting!r} is missing")
    return made(**settings)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return (f", did you mean {near[0]!r}?" if near else ",") + f" (known: {', '.join(known)})"
