"""Rényi accounting as in dp-accounting, vectorised for speed: the paper's ε, cheap enough to follow step by step.

An event's RDP curve (one value per order) is computed once and cached; after that a step costs one addition of
200 numbers. Orders below 1.01 are left out: the conversion to ε loses all its digits there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import (
    Composition,
    CorrelatedRelease,
    Event,
    GaussianRelease,
    Neighbouring,
    NoGuarantee,
    accounted,
    parts_of,
    to_dp_event,
)
from sottovoce.privacy.sampled_gaussian import integrate_log_moment, integrate_log_replaced_moment, log_moments

Curve = NDArray[np.float64]

# Low orders decide at little noise (z < 0.5), half steps up to 64 at ordinary noise, the sparse tail at small ε.
_LOW_FRACTIONS = (1.011, 1.015, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5)
ORDERS: Curve = np.concatenate(
    [
        _LOW_FRACTIONS,
        np.arange(2.0, 64.5, 0.5),
        np.arange(66.0, 130.0, 2.0),
        np.arange(136.0, 264.0, 8.0),
        np.arange(288.0, 544.0, 32.0),
        [768.0, 1024.0, 2048.0, 4096.0, 10240.0],
    ]
)
ORDERS.flags.writeable = False

# log A_α is a sum of up to 10⁴ terms near 1: its rounding must never read as "no privacy spent".
_ROUNDING_OF_LOG_A = 1e-14

_RELATIONS = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE"}  # dp-accounting's names
# What dp-accounting bounds, and `sampled_gaussian`; the rest is refused by name.
_BOUNDED = {("poisson", "add_remove"), ("poisson", "replace_one"), ("fixed_size", "replace_one")}


def neighbouring_of(event: Event) -> Neighbouring | None:
    """The one neighbouring relation of all releases in `event` (None if there are none); refuses what has no bound."""
    first: GaussianRelease | None = None
    for part, _ in accounted(event):
        if isinstance(part, NoGuarantee):
            continue
        if (part.sampling, part.neighbouring) not in _BOUNDED:
            raise InputError(
                f"sampling={part.sampling} with neighbouring={part.neighbouring}: no bound is known for this pair; "
                "expected poisson, or fixed_size with replace_one"
            )
        first = first or part
        _check_same_relation(first, part)
    return first.neighbouring if first else None


def _check_same_relation(first: GaussianRelease, part: GaussianRelease) -> None:
    if part.neighbouring != first.neighbouring:
        raise InputError(
            f"cannot compose sampling={first.sampling} (neighbouring={first.neighbouring}) with "
            f"sampling={part.sampling} (neighbouring={part.neighbouring}): expected one neighbouring relation"
        )


@dataclass(frozen=True)
class RdpCurve:
    """RDP of one release at each of `ORDERS`, and the orders at which dp-accounting's series did not converge.

    Those are integrated numerically where possible, and infinite otherwise.
    """

    values: Curve
    unconverged: tuple[float, ...]


@lru_cache(maxsize=512)
def release_curve(release: GaussianRelease) -> RdpCurve:
    """The RDP curve of one release (hundredths of a second the first time)."""
    neighbouring_of(release)
    q, z, is_replaced = release.sampling_rate, release.effective_multiplier, release.neighbouring == "replace_one"
    unsampled: Curve = ORDERS / (2 * z**2)
    unconverged: tuple[float, ...] = ()
    if release.sampling == "poisson" and is_replaced:
        values = unsampled
        if q is not None and q < 1:
            values = _per_order(lambda order: integrate_log_replaced_moment(q, release.noise_multiplier, order), ORDERS)
    elif q is not None and q < 1:
        values = log_moments(q, z, ORDERS) / (ORDERS - 1)
        unconverged = tuple(float(order) for order in ORDERS[np.isinf(values)])
        # The series is summed with its signs dropped: an upper bound, loose below 2 and divergent at times.
        low = ORDERS[: len(_LOW_FRACTIONS)]
        values[: len(low)] = np.minimum(values[: len(low)], _per_order(lambda o: integrate_log_moment(q, z, o), low))
    else:
        values = _by_dp_accounting(release)
        unconverged = tuple(float(order) for order in ORDERS[np.isinf(values)])
    # Sampling never costs privacy (Rényi divergence is jointly quasi-convex), whatever an amplification bound says.
    values = np.maximum(np.minimum(values, unsampled), 0.0) + _ROUNDING_OF_LOG_A / (ORDERS - 1)
    values.flags.writeable = False
    return RdpCurve(values, unconverged)


def _per_order(log_moment: Callable[[float], float], orders: Curve) -> Curve:
    return np.array([log_moment(order) / (order - 1) for order in orders.tolist()])


def _by_dp_accounting(release: GaussianRelease) -> Curve:
    import dp_accounting
    from dp_accounting import rdp as dp_rdp

    accountant = dp_rdp.RdpAccountant(ORDERS, dp_accounting.NeighboringRelation[_RELATIONS[release.neighbouring]])
    accountant.compose(to_dp_event(release))
    return np.asarray(accountant.rdp, dtype=np.float64)


def event_curve(event: Event) -> RdpCurve:
    """The RDP curve of a composition: curves add up. Infinite where something has no guarantee."""
    neighbouring_of(event)
    total = np.zeros_like(ORDERS)
    unconverged: set[float] = set()
    for part, count in accounted(event):
        if count == 0:
            continue
        if isinstance(part, NoGuarantee):
            return RdpCurve(np.full_like(ORDERS, np.inf), ())
        curve = release_curve(part)
        total += count * curve.values
        unconverged.update(curve.unconverged)
    return RdpCurve(total, tuple(sorted(unconverged)))


def epsilon_of_curve(values: Curve, *, delta: float) -> tuple[float, float | None]:
    """The smallest ε over all orders, and its order (Canonne, Kamath, Steinke 2020, Proposition 12)."""
    if not values.any():
        return 0.0, None
    if not np.isfinite(values).any():
        return math.inf, None
    epsilons = values + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    # KL bounds the total variation: δ ≥ √(1 − exp(−KL)) already holds with ε = 0.
    epsilons = np.where(delta**2 + np.expm1(-values) > 0, 0.0, np.maximum(epsilons, 0.0))
    best = int(np.argmin(epsilons))
    return float(epsilons[best]), float(ORDERS[best])


def delta_of_curve(values: Curve, *, epsilon: float) -> tuple[float, float | None]:
    """The smallest δ over all orders for a given ε, and its order."""
    if not values.any():
        return 0.0, None
    if not np.isfinite(values).any():
        return 1.0, None
    by_order = (ORDERS - 1) * (values - epsilon + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    by_total_variation = 0.5 * np.log(-np.expm1(-values))
    log_deltas = np.minimum(by_order, by_total_variation)
    best = int(np.argmin(log_deltas))
    return min(1.0, math.exp(float(log_deltas[best]))), float(ORDERS[best])


@final
class RunningEpsilon:
    """Cumulative RDP ε, release by release, in microseconds each.

    >>> from sottovoce.privacy.events import poisson_release
    >>> step = poisson_release(1.0, sampling_rate=0.01)
    >>> spent = RunningEpsilon(delta=1e-6)
    >>> after_one = spent.add(step)
    >>> spent.peek(step) > after_one == spent.epsilon
    True
    """

    def __init__(self, *, delta: float) -> None:
        check_delta(delta)
        self._delta = delta
        self._values = np.zeros_like(ORDERS)
        self._rows: dict[CorrelatedRelease, int] = {}  # chains cost by their length: not so much a row
        self._first: GaussianRelease | None = None

    @property
    def epsilon(self) -> float:
        """ε of everything added so far."""
        return self._epsilon(self._values, self._rows)

    def peek(self, event: Event, count: int = 1) -> float:
        """ε if `event` happened `count` more times; nothing is charged."""
        return self._epsilon(*self._after(event, count))

    def add(self, event: Event, count: int = 1) -> float:
        """Charges `event` `count` times and returns ε so far."""
        self._values, self._rows = self._after(event, count)
        releases = [part for part, _ in accounted(event) if isinstance(part, GaussianRelease)]
        self._first = self._first or next(iter(releases), None)
        return self.epsilon

    def _epsilon(self, values: Curve, rows: dict[CorrelatedRelease, int]) -> float:
        return epsilon_of_curve(values + event_curve(Composition(tuple(rows.items()))).values, delta=self._delta)[0]

    def _after(self, event: Event, count: int) -> tuple[Curve, dict[CorrelatedRelease, int]]:
        for part, _ in accounted(event):
            if self._first is not None and isinstance(part, GaussianRelease):
                _check_same_relation(self._first, part)
        rows = dict(self._rows)
        if count == 0:
            return self._values, rows
        alone: list[tuple[GaussianRelease | NoGuarantee, int]] = []
        for release, number in parts_of(event):
            if isinstance(release, CorrelatedRelease):
                rows[release] = rows.get(release, 0) + count * number
            else:
                alone.append((release, number))
        return self._values + count * event_curve(Composition(tuple(alone))).values, rows


def check_delta(delta: float) -> None:
    """δ is a probability, and neither 0 nor 1."""
    if not 0 < delta < 1:
        raise InputError(f"delta={delta}: expected a probability in (0, 1), well below one over the population")
