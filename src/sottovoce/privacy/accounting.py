"""ε and δ of an event, by both accountants side by side.

PLD is the headline (tight), RDP is the paper's and the one the ledger can follow step by step. Both are upper bounds,
so the smaller one holds; where a PLD would cost too much, or none is known, `pld` is None and says why.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import Event, Neighbouring, poisson_release, repeated
from sottovoce.privacy.pld import CAREFUL, SMALLEST_DELTA, Pld, PldCap, compose_pld
from sottovoce.privacy.rdp import RunningEpsilon as RunningEpsilon
from sottovoce.privacy.rdp import check_delta, delta_of_curve, epsilon_of_curve, event_curve, neighbouring_of


@dataclass(frozen=True)
class Epsilon:
    """ε at one δ. `rdp` is infinite and `pld` None when the event has no guarantee."""

    delta: float
    neighbouring: Neighbouring | None
    rdp: float
    rdp_order: float | None
    rdp_orders_unconverged: tuple[float, ...]  # of dp-accounting's series; integrated numerically instead
    pld: float | None
    pld_interval: float | None
    pld_reason: str | None  # why `pld` is None

    @property
    def headline(self) -> float:
        """The smaller of the two bounds."""
        return self.rdp if self.pld is None else min(self.pld, self.rdp)


@dataclass(frozen=True)
class Delta:
    """δ at one ε, by both accountants."""

    epsilon: float
    neighbouring: Neighbouring | None
    rdp: float
    rdp_order: float | None
    pld: float | None
    pld_reason: str | None

    @property
    def headline(self) -> float:
        """The smaller of the two bounds."""
        return self.rdp if self.pld is None else min(self.pld, self.rdp)


@lru_cache(maxsize=512)
def epsilon(event: Event, delta: float, *, cap: PldCap = CAREFUL) -> Epsilon:
    """The ε for which `event` is (ε, δ)-private.

    Guarantee: both bounds hold for the neighbouring relation in the result, under composition in any order.
    No noise or no bound for the sampling raises InputError; NoGuarantee gives ε = ∞.

    >>> spent = epsilon(repeated(poisson_release(2.048, sampling_rate=0.0295), 2006), 1e-9)
    >>> round(spent.pld, 2), round(spent.rdp, 2), spent.rdp_order
    (4.22, 4.45, 9.0)
    """
    check_delta(delta)
    curve = event_curve(event)
    rdp, order = epsilon_of_curve(curve.values, delta=delta)
    by_pld, interval, reason = None, None, None
    if delta < SMALLEST_DELTA:
        reason = f"delta={delta:g} is below what a PLD resolves ({SMALLEST_DELTA:g})"
    else:
        distribution = compose_pld(event, cap=cap)
        by_pld, interval, reason = distribution.epsilon(delta), distribution.interval, distribution.reason
        if by_pld is None and reason is None:
            reason = _unresolved(distribution, delta)
        if by_pld is not None and by_pld > rdp:
            by_pld, reason = None, f"its grid of {interval:.3g}, the finest within the cap, is too coarse to beat RDP"
    return Epsilon(delta, neighbouring_of(event), rdp, order, curve.unconverged, by_pld, interval, reason)


def poisson_epsilon(
    noise_multiplier: float, *, sampling_rate: float, central_steps: int, delta: float, cap: PldCap = CAREFUL
) -> Epsilon:
    """ε of `central_steps` Poisson-sampled Gaussian releases: the usual run."""
    step = poisson_release(noise_multiplier, sampling_rate=sampling_rate)
    return epsilon(repeated(step, central_steps), delta, cap=cap)


def delta(event: Event, epsilon: float, *, cap: PldCap = CAREFUL) -> Delta:
    """The δ for which `event` is (ε, δ)-private: the other way round.

    Guarantee: as of `epsilon`; NoGuarantee gives δ = 1.
    """
    if not epsilon >= 0:
        raise InputError(f"epsilon={epsilon}: expected a number, at least 0")
    rdp, order = delta_of_curve(event_curve(event).values, epsilon=epsilon)
    distribution = compose_pld(event, cap=cap)
    by_pld, reason = None, distribution.reason
    if distribution.distribution is not None:
        by_pld = float(distribution.deltas(np.array([epsilon]))[0])
        if by_pld < SMALLEST_DELTA:
            by_pld, reason = None, f"δ is below what a PLD resolves ({SMALLEST_DELTA:g})"
    return Delta(epsilon, neighbouring_of(event), rdp, order, by_pld, reason)


def pld_epsilon(event: Event, delta: float, *, cap: PldCap = CAREFUL) -> float | None:
    """ε by PLD alone, for searches; None where there is no PLD."""
    if delta < SMALLEST_DELTA:
        return None
    return compose_pld(event, cap=cap).epsilon(delta)


def rdp_epsilon(event: Event, delta: float) -> float:
    """ε by RDP alone, for searches and budgets."""
    check_delta(delta)
    return epsilon_of_curve(event_curve(event).values, delta=delta)[0]


def _unresolved(composed: Pld, delta: float) -> str:
    if composed.rounding >= delta:
        return f"so many steps leave {composed.rounding:.2g} of rounding in δ, which is not below delta={delta:g}"
    return "its losses are so large that their exponentials leave float64"
