"""ε of a ledger's events, computed anew by dp-accounting's own accountants: for whoever does not trust our loops.

Only the events are ours. dp-accounting has no bound for cohorts of fixed size by privacy loss distributions, nor by
Rényi accounting for replacing somebody under Poisson sampling: there the other accountant stands alone. Chains of
correlated noise are accounted for as the releases that they are worth (`events.expand_rows`), which is our step.
"""

import importlib.metadata
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sottovoce.privacy.events import Event, GaussianRelease, Neighbouring, NoGuarantee, accounted
from sottovoce.privacy.pld import CAREFUL, SMALLEST_DELTA, compose_pld, predicted_cost
from sottovoce.privacy.rdp import ORDERS, neighbouring_of

# An ε that is stated must not be below what comes out here, but for rounding: ours is rounded up, and the rest are the
# last digits of sums of up to 10⁷ float64 numbers.
TOLERANCE = 1e-6
DP_ACCOUNTING = "dp-accounting"

_RELATIONS: dict[Neighbouring, str] = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE"}


@dataclass(frozen=True)
class RecomputedEpsilon:
    """ε at δ by dp-accounting, by each accountant that has a bound; None where it has none."""

    delta: float
    pld: float | None
    rdp: float | None

    @property
    def bound(self) -> float | None:
        """The smaller one, which is proved; None where there is neither."""
        return min((one for one in (self.pld, self.rdp) if one is not None), default=None)

    def proves(self, claimed: float) -> bool:
        """Whether an ε that is stated at this δ holds by dp-accounting alone."""
        return self.bound is not None and claimed >= self.bound * (1 - TOLERANCE)


@dataclass(frozen=True)
class CheckedClaim:
    """An ε that is stated at a δ, and what dp-accounting computes."""

    name: str
    claimed: float
    found: RecomputedEpsilon

    @property
    def is_proved(self) -> bool:
        return self.found.proves(self.claimed)

    def as_json(self) -> dict[str, Any]:
        found = {"delta": self.found.delta, "pld": self.found.pld, "rdp": self.found.rdp}
        return {"claim": self.name, "epsilon": self.claimed, "dp_accounting": found, "proved": self.is_proved}


def dp_accounting_version() -> str:
    return importlib.metadata.version(DP_ACCOUNTING)


def recompute_epsilons(event: Event, deltas: Sequence[float]) -> tuple[RecomputedEpsilon, ...]:
    """ε of `event` at each δ, by dp-accounting's PLDAccountant and RdpAccountant; both infinite without a guarantee.

    >>> from sottovoce.privacy.events import poisson_release, repeated
    >>> (found,) = recompute_epsilons(repeated(poisson_release(2.048, sampling_rate=0.0295), 2006), [1e-9])
    >>> round(found.pld, 2), round(found.rdp, 2)
    (4.22, 4.45)
    """
    parts = [(part, count) for part, count in accounted(event) if count]
    if any(isinstance(part, NoGuarantee) for part, _ in parts):
        return tuple(RecomputedEpsilon(delta, math.inf, math.inf) for delta in deltas)
    releases = [(part, count) for part, count in parts if isinstance(part, GaussianRelease)]
    relation = neighbouring_of(event) or "add_remove"
    with _without_warnings():
        pld, rdp = _pld_accountant(event, releases, relation), _rdp_accountant(releases, relation)
        return tuple(
            RecomputedEpsilon(
                delta,
                None if pld is None or delta < SMALLEST_DELTA else _finite(pld.get_epsilon(delta)),
                None if rdp is None else _finite(rdp.get_epsilon(delta)),
            )
            for delta in deltas
        )


def _finite(epsilon: float) -> float | None:
    return float(epsilon) if math.isfinite(epsilon) else None


def _pld_accountant(event: Event, releases: list[tuple[GaussianRelease, int]], relation: Neighbouring) -> Any:
    """None where ours has no distribution either: none is known, or its grid would take too long."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    if not releases or compose_pld(event).distribution is None:
        return None
    made = PLDAccountant(
        dp_accounting.NeighboringRelation[_RELATIONS[relation]], predicted_cost(event).interval(CAREFUL)
    )
    for release, count in releases:
        # Told who is replaced, it doubles the sensitivity itself.
        made.compose(_dp_event(release, multiplier=release.noise_multiplier), count)
    return made


def _rdp_accountant(releases: list[tuple[GaussianRelease, int]], relation: Neighbouring) -> Any:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    made = RdpAccountant(ORDERS, dp_accounting.NeighboringRelation[_RELATIONS[relation]])
    for release, count in releases:
        event = _dp_event(release, multiplier=release.effective_multiplier)
        if not made.supports(event):
            return None
        made.compose(event, count)
    return made


def _dp_event(release: GaussianRelease, *, multiplier: float) -> Any:
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    if release.sampling == "fixed_size":
        return dp_accounting.SampledWithoutReplacementDpEvent(release.population_size, release.cohort_size, gaussian)
    return (
        gaussian
        if release.sampling_rate == 1.0
        else dp_accounting.PoissonSampledDpEvent(release.sampling_rate, gaussian)
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """dp-accounting warns of each order whose series does not converge; without it the bound is as valid."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
