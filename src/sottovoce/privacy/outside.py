"""Parts of the privacy chain from outside this package, which a recipe names as `module:Name`.

    clip_rule   (update_P, plan) ─► update_P            done to one user's update before it is clipped
    weights     (figures) ─► ω                          how much one user counts
    sampler     (step, plan, generator=…) ─► indices    who is in a cohort

Whatever the first two return is bounded here, an update by C and a weight by 1, so that neither can break the
sensitivity, if it looks at one user alone: that no code can see, and the guarantee says that it rests on it. What a
sampler hides of anybody no accountant knows, so that with one there is no guarantee at all.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.importing import build_from_settings, import_named
from sottovoce.base.parsing import quote

PARTS = ("clip_rule", "weights", "sampler")


class OutsideSampler(Protocol):
    """Draws the cohort of a step, by what is public of the plan and by chance from `generator`."""

    def __call__(self, step: int, plan: Any, *, generator: np.random.Generator) -> Iterable[int]: ...


def build_outside(what: str, part: Mapping[str, Any]) -> Any:
    """The part that a recipe describes as `{name: "module:Name", …}`: a frozen dataclass that can be called."""
    name = part.get("name")
    if not isinstance(name, str) or ":" not in name:
        raise InputError(f"{what}: name={quote(name)}, expected module:Name, a class of your own")
    made = import_named(name)
    fits = isinstance(made, type) and dataclasses.is_dataclass(made) and "__call__" in vars(made)
    if not fits or not made.__dataclass_params__.frozen:
        raise InputError(f"{what} {name}: expected a frozen dataclass with a __call__")
    return build_from_settings(what, made, name, {key: value for key, value in part.items() if key != "name"})


@dataclass(frozen=True, kw_only=True)
class OutsideParts:
    """The parts of one plan. `forgiving`, as releases are: one that fails on a user leaves that user out, not all."""

    clip_rule: Callable[[Tensor, Any], Tensor] | None
    weights: Callable[[object], float] | None
    sampler: OutsideSampler | None
    forgiving: bool

    @classmethod
    def built(cls, parts: Mapping[str, Mapping[str, Any] | None], *, forgiving: bool) -> "OutsideParts":
        made = {what: None if part is None else build_outside(what, part) for what, part in parts.items()}
        return cls(**made, forgiving=forgiving)

    def weight(self, figures: object) -> float:
        """In [0, 1] whatever `weights` returns; 1 where there are none."""
        if self.weights is None:
            return 1.0
        try:
            return within_one(self.weights(figures))
        except Exception:
            if self.forgiving:
                return 0.0
            raise

    def ruled(self, rule: Callable[[Tensor, Any], Tensor], update_P: Tensor, plan: Any) -> Tensor:
        """What `rule` makes of one user's update; NaN, which counts as zero, where it fails and is forgiven."""
        try:
            ruled_P = rule(update_P, plan)
            if ruled_P.shape != update_P.shape:
                raise InputError(f"{rule!r}: expected an update of the shape it was given")
        except Exception:
            if self.forgiving:
                return torch.full_like(update_P, torch.nan)
            raise
        return ruled_P


def within_one(weight: float) -> float:
    """`weight` as it may count: in [0, 1], and 0 where it is no number.

    >>> within_one(3.0), within_one(-1.0), within_one(float("nan"))
    (1.0, 0.0, 0.0)
    """
    return 0.0 if math.isnan(weight) else min(max(float(weight), 0.0), 1.0)


def checked_cohort(drawn: Iterable[int], *, population_size: int) -> NDArray[np.int64]:
    """The users that a sampler from outside has drawn, ascending; refuses whom there is not, or is there twice."""
    cohort = np.asarray(drawn if isinstance(drawn, np.ndarray) else list(drawn))
    if not cohort.size:
        return np.empty(0, dtype=np.int64)
    whole = cohort.ndim == 1 and np.issubdtype(cohort.dtype, np.integer)
    if not whole or not 0 <= cohort.min() <= cohort.max() < population_size or len(np.unique(cohort)) < len(cohort):
        raise InputError(f"sampler: expected users from 0 to {population_size - 1}, each at most once")
    return np.sort(cohort).astype(np.int64)


def described(part: Mapping[str, Any]) -> str:
    """As it is told to people.

    >>> described({"name": "mine:Smooth", "gamma": 0.5})
    'mine:Smooth(gamma=0.5)'
    """
    settings = ", ".join(f"{name}={value}" for name, value in part.items() if name != "name")
    return f"{part['name']}({settings})" if settings else str(part["name"])


def rests_on(plan: Mapping[str, Any]) -> str | None:
    """What a guarantee rests on that is not ours, in words, by what a ledger's header says of its plan.

    >>> print(rests_on({"clip_rule": {"name": "mine:Smooth"}, "privacy_unit": "speaker"}))
    clipping by mine:Smooth, which is not part of this package: this holds if it looks at the data of one speaker alone
    """
    rule, weights = plan.get("clip_rule"), plan.get("weights")
    whose = [f"clipping by {described(rule)}"] if rule else []
    whose += [f"clipping by {plan['rule']}"] if plan.get("rule") else []
    whose += [f"weights by {described(weights)}"] if weights else []
    if not whose:
        return None
    are, they = ("is", "it looks") if len(whose) == 1 else ("are", "they look")
    unit = plan.get("privacy_unit") or "user"
    return (
        f"{' and '.join(whose)}, which {are} not part of this package: this holds if {they} at the data of one {unit} "
        "alone"
    )
