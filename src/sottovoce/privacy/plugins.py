"""Plug-ins: parts of the privacy chain from outside this package, which a recipe names as `module:Name`.

    clip_rule   (update_P, plan) ─► update_P            applied to one user's update before it is clipped
    weights     (figures) ─► ω                          the weight of one user
    sampler     (step, plan, generator=…) ─► indices    who is in a cohort

What the first two return is bounded here, an update by C and a weight by 1, so neither can break the sensitivity as
long as it looks at one user alone. No code can check that; the guarantee states it as a condition. A sampler's
amplification is unknown to every accountant, so with one there is no guarantee.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.importing import build_from_settings, import_named
from sottovoce.base.parsing import quote

if TYPE_CHECKING:
    from torch import Tensor

PLUGIN_KEYS = ("clip_rule", "weights", "sampler")


class PluginSampler(Protocol):
    """Draws the cohort of a step, by what is public of the plan and by chance from `generator`."""

    def __call__(self, step: int, plan: Any, *, generator: np.random.Generator) -> Iterable[int]: ...


def build_plugin(what: str, part: Mapping[str, Any]) -> Any:
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
class Plugins:
    """The plug-ins of one plan. In a release (`is_release`) one that fails on a user leaves out that user alone."""

    clip_rule: "Callable[[Tensor, Any], Tensor] | None"
    weights: Callable[[object], float] | None
    sampler: PluginSampler | None
    is_release: bool

    @classmethod
    def build(cls, parts: Mapping[str, Mapping[str, Any] | None], *, is_release: bool) -> "Plugins":
        made = {what: None if part is None else build_plugin(what, part) for what, part in parts.items()}
        return cls(**made, is_release=is_release)

    def weight(self, figures: object) -> float:
        """In [0, 1] whatever `weights` returns; 1 where there are none."""
        if self.weights is None:
            return 1.0
        try:
            return clamp_weight(self.weights(figures))
        except Exception:
            if self.is_release:
                return 0.0
            raise

    def apply_rule(self, rule: "Callable[[Tensor, Any], Tensor]", update_P: "Tensor", plan: Any) -> "Tensor":
        """What `rule` makes of one user's update; in a release NaN, which counts as zero, where it fails."""
        try:
            ruled_P = rule(update_P, plan)
            if ruled_P.shape != update_P.shape:
                raise InputError(f"{rule!r}: expected an update of the shape it was given")
        except Exception:
            if self.is_release:
                return update_P.new_full(update_P.shape, math.nan)
            raise
        return ruled_P


def clamp_weight(weight: float) -> float:
    """`weight` within [0, 1], and 0 where it is no number.

    >>> clamp_weight(3.0), clamp_weight(-1.0), clamp_weight(float("nan"))
    (1.0, 0.0, 0.0)
    """
    return 0.0 if math.isnan(weight) else min(max(float(weight), 0.0), 1.0)


def check_cohort(drawn: Iterable[int], *, population_size: int) -> NDArray[np.int64]:
    """The users that a plug-in has drawn, ascending; refuses unknown and repeated ones."""
    cohort = np.asarray(drawn if isinstance(drawn, np.ndarray) else list(drawn))
    if not cohort.size:
        return np.empty(0, dtype=np.int64)
    whole = cohort.ndim == 1 and np.issubdtype(cohort.dtype, np.integer)
    if not whole or not 0 <= cohort.min() <= cohort.max() < population_size or len(np.unique(cohort)) < len(cohort):
        raise InputError(f"sampler: expected users from 0 to {population_size - 1}, each at most once")
    return np.sort(cohort).astype(np.int64)


def format_plugin(part: Mapping[str, Any]) -> str:
    """A plug-in with its settings.

    >>> format_plugin({"name": "mine:Smooth", "gamma": 0.5})
    'mine:Smooth(gamma=0.5)'
    """
    settings = ", ".join(f"{name}={value}" for name, value in part.items() if name != "name")
    return f"{part['name']}({settings})" if settings else str(part["name"])


def format_plugin_condition(plan: Mapping[str, Any]) -> str | None:
    """The condition that plug-ins put on a guarantee, from a plan as a ledger's header has it; None without any.

    >>> print(format_plugin_condition({"clip_rule": {"name": "mine:Smooth"}, "privacy_unit": "speaker"}))
    clipping by mine:Smooth, which is not part of this package: this holds if it looks at the data of one speaker alone
    """
    rule, weights = plan.get("clip_rule"), plan.get("weights")
    parts = [f"clipping by {format_plugin(rule)}"] if rule else []
    parts += [f"clipping by {plan['rule']}"] if plan.get("rule") else []
    parts += [f"weights by {format_plugin(weights)}"] if weights else []
    if not parts:
        return None
    are, they = ("is", "it looks") if len(parts) == 1 else ("are", "they look")
    unit = plan.get("privacy_unit") or "user"
    condition = f"this holds if {they} at the data of one {unit} alone"
    return f"{' and '.join(parts)}, which {are} not part of this package: {condition}"
