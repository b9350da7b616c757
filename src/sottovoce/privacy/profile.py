"""The privacy profile ε(δ) of an event, and the Gaussian mechanism that it is compared with (μ of Gaussian DP).

μ-GDP says that no test tells a person's presence better than it tells N(μ, 1) from N(0, 1) (Dong, Roth, Su 2022). If
everybody is in every round, a run is such a Gaussian and μ is exact. Under sampling it is not: `fitted` is the smallest
μ whose Gaussian profile is not below ours at any of the points that are given, and says nothing between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import ndtr

from sottovoce.privacy.events import Event, GaussianRelease, accounted
from sottovoce.privacy.pld import CAREFUL, SMALLEST_DELTA, compose_pld
from sottovoce.privacy.rdp import epsilon_of_curve, event_curve

PROFILE_DELTAS = tuple(float(f"1e-{power}") for power in range(1, 11))

Profile = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class GaussianMu:
    """μ of Gaussian DP: `exact`, or `fitted` to the points of a profile."""

    mu: float
    how: Literal["exact", "fitted"]


def privacy_profile(event: Event, deltas: Sequence[float] = PROFILE_DELTAS) -> Profile:
    """Pairs (δ, ε) that all hold: for each δ the smaller bound of both accountants.

    >>> from sottovoce.privacy.events import poisson_release
    >>> [round(epsilon, 3) for _, epsilon in privacy_profile(poisson_release(1.0, sampling_rate=1.0), (1e-3, 1e-6))]
    [3.139, 4.887]
    """
    curve, composed = event_curve(event).values, compose_pld(event, cap=CAREFUL)
    found = []
    for delta in deltas:
        by_pld = None if delta < SMALLEST_DELTA else composed.epsilon(delta)
        by_rdp, _ = epsilon_of_curve(curve, delta=delta)
        found.append((delta, by_rdp if by_pld is None else min(by_pld, by_rdp)))
    return tuple(found)


def gaussian_mu(event: Event, profile: Profile) -> GaussianMu | None:
    """μ of the event, whose `profile` is given; None where nothing bounds it.

    >>> from sottovoce.privacy.events import poisson_release, repeated
    >>> gaussian_mu(repeated(poisson_release(2.0, sampling_rate=1.0), 4), ())
    GaussianMu(mu=1.0, how='exact')
    """
    parts = [(part, count) for part, count in accounted(event) if count]
    if parts and all(isinstance(part, GaussianRelease) and _is_of_everybody(part) for part, _ in parts):
        squares = (count / part.effective_multiplier**2 for part, count in parts if isinstance(part, GaussianRelease))
        return GaussianMu(math.sqrt(sum(squares)), "exact")
    if not profile or not all(math.isfinite(epsilon) for _, epsilon in profile):
        return None
    return GaussianMu(max(_mu_of_point(delta, epsilon) for delta, epsilon in profile), "fitted")


def _is_of_everybody(part: GaussianRelease) -> bool:
    return part.sampling_rate == 1.0 or (part.cohort_size is not None and part.cohort_size == part.population_size)


def _mu_of_point(delta: float, epsilon: float) -> float:
    """The smallest μ with which N(μ, 1) against N(0, 1) needs as much as ε at δ; rounded up."""
    if epsilon <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while _delta_of_mu(high, epsilon) < delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta_of_mu(middle, epsilon) < delta else (low, middle)
    return high


def _delta_of_mu(mu: float, epsilon: float) -> float:
    """δ of a μ-GDP mechanism at ε (Dong, Roth, Su 2022, Corollary 2.13)."""
    second = float(ndtr(-epsilon / mu - mu / 2))
    scaled = math.exp(epsilon + math.log(second)) if second > 0 else 0.0
    return float(ndtr(-epsilon / mu + mu / 2)) - scaled
