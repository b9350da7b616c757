"""Accounting by privacy loss distributions on dp-accounting, under a cap on time and memory.

Losses lie on a grid, `interval` apart. The cost is the number of points, which is known in advance:

* one step covers the losses from ℓ(−κz) to ℓ(1 + κz), with ℓ(x) = log(1 − q + q·exp((2x − 1)/2z²)) and κ = 9.8 the
  point beyond which a Gaussian has mass e⁻⁵⁰: a range of about 1/2z² + κ/z + log q;
* T steps cover what Chernoff's bound leaves of T such ranges: [T·K(λ) + log(2/10⁻¹⁵)]/λ above, and the same with
  −λ below, for K the log moment generating function of one step's loss and λ up to 20 over its range.

Points = range/interval, so the interval that keeps to the cap is (cost per point × ranges)/cap. A coarser interval
only ever rounds losses up ("connect the dots"): ε stays a valid upper bound, and grows by about T·interval²/8.

dp-accounting counts the tails that it drops (10⁻¹⁵ of each composition) as infinite losses, but not what float64 rounds
off. `rounding` bounds that, and is added to every δ; u = 2⁻⁵³, and T steps of probabilities p become n points:

* a step's own probabilities have relative errors of a few u, and so T times as much of δ, which is next to nothing;
* a Fourier transform leaves an error of about u·√log₂n·‖p‖₂ in each frequency, and up to u·Σp = u in the lowest, which
  adds up all points. Their T-th powers have T times as much of it, and T·u more by computing the power. As weights of
  points in δ are at most 1, by Parseval δ has no more than T·u·(2 + √log₂n·‖p‖₂) of all this;
* convolving two parts is the same with T = 1.

These are the errors of roundings that are as often up as down (Higham, Mary 2019); in the worst case, in which all of
them conspire, they are √log₂n times as large. Sums over points lose at most (points·u) of δ, and as much of a loss.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import logsumexp

from sottovoce.privacy.events import Event, GaussianRelease, NoGuarantee, accounted
from sottovoce.privacy.sampled_gaussian import (
    GAUSSIAN_REACH,
    Array,
    largest_replaced_loss,
    log_density_ratio,
    replaced_losses,
    replaced_step_pld,
    sampled_step_pld,
)

# Measured on one core of a 2.x GHz server; both neighbours' distributions are counted. A step's points have become five
# times quicker since, but grids, and with them the digits of every published ε, follow from these numbers.
_SECONDS_PER_STEP_POINT = 2.5e-6
_SECONDS_PER_COMPOSED_POINT = 0.4e-6
_BYTES_PER_STEP_POINT = 250.0
_BYTES_PER_COMPOSED_POINT = 100.0

_LOG_TAIL = math.log(2 / 1e-15)  # and 10⁻¹⁵ of a composition
_CHERNOFF_ORDERS = np.arange(1, 21)
_FEWEST_STEP_POINTS = 2000  # much noise, tiny losses: the grid must still see them
_LARGEST_INTERVAL = 500.0  # exp(interval) must stay a float64
# dp-accounting takes steps of fewer points for sparse, and raises their number to the power of the steps.
_SPARSE_POINTS, _MOST_SPARSE_STEPS = 2000, 100_000
# Below it rounding would be most of δ.
SMALLEST_DELTA = 1e-12
_UNIT = 2.0**-53  # float64 rounds by at most so much of a number


@dataclass(frozen=True)
class PldCap:
    """How much one PLD may cost, as predicted for an ordinary core, and how fine its grid need ever be."""

    seconds: float = 1.0
    bytes: float = 5e8
    finest_interval: float = 1e-4


# The limit is 5 s and 1 GB: the predictions stay well inside it, for slower machines' sake.
CAREFUL = PldCap()
# Searches, tables and plots evaluate many: at most 0.01 more ε than CAREFUL at the noise one would choose.
QUICK = PldCap(seconds=0.1, bytes=1e8, finest_interval=1e-3)


@dataclass(frozen=True)
class PldCost:
    """What a PLD of an event would cost: seconds and bytes are `…_times_interval` over the interval."""

    step_range: float
    composed_range: float
    seconds_times_interval: float
    bytes_times_interval: float
    shortest_step_range: float

    def interval(self, cap: PldCap) -> float:
        """The finest interval that is useful and within the cap."""
        finest = min(cap.finest_interval, self.shortest_step_range / _FEWEST_STEP_POINTS)
        return max(finest, self.seconds_times_interval / cap.seconds, self.bytes_times_interval / cap.bytes)


def predicted_cost(event: Event) -> PldCost:
    """Ranges and cost of the event's PLD, before anything large is built."""
    step_total = composed_total = work = 0.0
    shortest = math.inf
    for release, count in _releases(event):
        step_range, composed_range = _loss_ranges(release, count)
        shortest = min(shortest, step_range)
        step_total += step_range
        composed_total += composed_range
        work += composed_total  # each further part is convolved with everything before it
    return PldCost(
        step_range=step_total,
        composed_range=composed_total,
        seconds_times_interval=_SECONDS_PER_STEP_POINT * step_total + _SECONDS_PER_COMPOSED_POINT * work,
        bytes_times_interval=_BYTES_PER_STEP_POINT * step_total + _BYTES_PER_COMPOSED_POINT * composed_total,
        shortest_step_range=shortest,
    )


@dataclass(frozen=True)
class Pld:
    """A composed privacy loss distribution and the interval it was built on; or why there is none.

    `rounding` is what float64 may have taken from δ.
    """

    distribution: Any | None
    interval: float | None
    reason: str | None
    rounding: float = 0.0

    def epsilon(self, delta: float) -> float | None:
        """The smallest ε with δ(ε) ≤ `delta`, rounded up; None where there is none that float64 can tell.

        Guarantee: an upper bound on the releases' own ε.
        """
        if self.distribution is None:
            return None
        points = _points(self.distribution)
        left = delta * (1 - points * _UNIT) - self.rounding
        if left <= 0:
            return None
        # Losses near 700 and above: their exponentials leave float64, and there is no answer.
        with np.errstate(over="ignore"):
            value = float(self.distribution.get_epsilon_for_delta(left))
        if not math.isfinite(value):
            return None
        # dp-accounting counts losses down from the largest, each time with a rounding of its own.
        return value + points * _UNIT * (value + points * (self.interval or 0.0)) if value > 0 else 0.0

    def deltas(self, epsilons: Array) -> Array:
        """δ at each of the ε, rounded up; infinite where float64 cannot tell. Guarantee: upper bounds."""
        assert self.distribution is not None
        with np.errstate(over="ignore"):
            found = np.asarray(self.distribution.get_delta_for_epsilon(epsilons), dtype=np.float64)
        found = np.maximum(found, 0.0) * (1 + _points(self.distribution) * _UNIT) + self.rounding
        return np.where(np.isfinite(found), found, np.inf)


def compose_pld(event: Event, *, cap: PldCap = CAREFUL) -> Pld:
    """The event's PLD on the finest grid within the cap."""
    for part, count in accounted(event):
        if count and isinstance(part, NoGuarantee):
            return Pld(None, None, f"no guarantee: {part.reason}")
        if count and isinstance(part, GaussianRelease) and part.sampling == "fixed_size":
            return Pld(None, None, "no tight PLD is known for cohorts of fixed size without replacement; RDP bounds it")
    releases = _releases(event)
    if not releases:
        from dp_accounting.pld import privacy_loss_distribution as dp_pld

        return Pld(dp_pld.identity(), None, None)
    cost = predicted_cost(event)
    interval = cost.interval(cap)
    within = f"within {cap.seconds:g} s and {cap.bytes / 1e9:g} GB"
    if interval > _LARGEST_INTERVAL:
        smallest = min(release.noise_multiplier for release, _ in releases)
        return Pld(
            None,
            None,
            f"noise_multiplier={smallest:g} is too small for a PLD {within}: its losses need a grid of {interval:.3g}, "
            f"beyond {_LARGEST_INTERVAL:g}",
        )
    steps = max(count for _, count in releases)
    if steps > _MOST_SPARSE_STEPS and cost.shortest_step_range < _SPARSE_POINTS * interval:
        return Pld(None, None, f"{steps} steps are too many for a PLD {within}: on a grid of {interval:.3g} they blur")
    composed, rounding = None, 0.0
    for release, count in releases:
        part, lost = _release_pld(release, count, interval)
        rounding += lost
        if composed is not None:
            first = max(_norm(composed), _norm(part))
            composed = composed.compose(part)
            rounding += _transform_rounding(composed, norm=first)
        else:
            composed = part
    return Pld(composed, interval, None, rounding)


def _releases(event: Event) -> list[tuple[GaussianRelease, int]]:
    return [(part, count) for part, count in accounted(event) if count and isinstance(part, GaussianRelease)]


def _release_pld(release: GaussianRelease, count: int, interval: float) -> tuple[Any, float]:
    """The distribution of `count` releases, and its rounding."""
    from dp_accounting.pld import privacy_loss_distribution as dp_pld

    z = release.effective_multiplier
    if release.sampling_rate == 1.0:
        whole = dp_pld.from_gaussian_mechanism(z / math.sqrt(count), value_discretization_interval=interval)
        return whole, 4 * _UNIT  # nothing was transformed
    assert release.sampling_rate is not None
    if release.neighbouring == "replace_one":
        step = replaced_step_pld(release.sampling_rate, release.noise_multiplier, interval=interval)
    else:
        step = sampled_step_pld(release.sampling_rate, z, interval=interval)
    composed = step.self_compose(count)
    return composed, count * _transform_rounding(composed, norm=_norm(step))


def _transform_rounding(composed: Any, *, norm: float) -> float:
    """What one Fourier transform to so many points takes from a δ: of probabilities with this Euclidean norm."""
    return _UNIT * (2 + math.sqrt(math.log2(max(_points(composed), 2))) * norm)


def _sides(distribution: Any) -> tuple[Any, Any]:
    """Losses of one who is removed, and of one who is added; dp-accounting keeps them to itself."""
    return distribution._pmf_remove, distribution._pmf_add


def _points(distribution: Any) -> int:
    return max(int(side.size) for side in _sides(distribution))


def _norm(distribution: Any) -> float:
    return max(float(np.linalg.norm(side.to_dense_pmf()._probs)) for side in _sides(distribution))


def _loss_ranges(release: GaussianRelease, count: int) -> tuple[float, float]:
    """Loss ranges of one step and of `count` steps, summed over removing and adding the user."""
    z, q = release.effective_multiplier, release.sampling_rate
    assert q is not None, "cohorts of fixed size have no PLD"
    if q == 1.0:
        mean = math.sqrt(count) / z  # T Gaussian steps are one, and its losses are N(±μ²/2, μ²)
        both = 2 * (mean**2 + 2 * GAUSSIAN_REACH * mean)
        return both, both
    normal = np.linspace(-GAUSSIAN_REACH, GAUSSIAN_REACH, 801)
    log_weight = -0.5 * normal**2 - logsumexp(-0.5 * normal**2)
    if release.neighbouring == "replace_one":
        z, high = release.noise_multiplier, largest_replaced_loss(q, release.noise_multiplier)
        outcomes = np.concatenate([z * normal, z * normal - 1])
        losses = np.clip(replaced_losses(outcomes, q, z), -high, high) + high
        log_losses = np.concatenate([math.log1p(-q) + log_weight, math.log(q) + log_weight])
        return 2 * high, _composed_range(losses, log_losses, count, 2 * high)
    absent, present = log_density_ratio(z * normal, q, z), log_density_ratio(1 + z * normal, q, z)
    low, high = float(absent[0]), float(present[-1])
    removed = np.concatenate([absent, present]) - low
    log_removed = np.concatenate([math.log1p(-q) + log_weight, math.log(q) + log_weight])
    composed = _composed_range(removed, log_removed, count, high - low)
    composed += _composed_range(high - absent, log_weight, count, high - low)
    return 2 * (high - low), composed


def _composed_range(losses: Array, log_weight: Array, count: int, step_range: float) -> float:
    """What Chernoff's bound leaves of `count` steps; losses are measured from the step's lowest."""
    rates = _CHERNOFF_ORDERS / step_range
    above = logsumexp(np.outer(rates, losses) + log_weight, axis=1)
    below = logsumexp(np.outer(-rates, losses) + log_weight, axis=1)
    upper = min(count * step_range, float(np.min((count * above + _LOG_TAIL) / rates)))
    lower = max(0.0, float(np.max((count * below + _LOG_TAIL) / -rates)))
    return max(upper - lower, step_range)
