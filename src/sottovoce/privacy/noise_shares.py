"""Noise in shares: every client adds some to its update before anybody sees it, so no sum without noise ever exists.

    who sees    a sum of m shares, each a discrete Gaussian of variance v        the server, in rounds that it draws
    who reads   the same topped up by the server to `most` shares                everybody, and they do not know cohorts

A client also reads models, and can subtract their own share, or never have added it. So v is such that
`most − colluding` shares are all of the plan's noise, (z·C)², whoever stayed: accounts, ledger and ε are those of noise
by the server. Without topping up, its variance would show over millions of coordinates how many took part.

What the server itself learns is bounded by the shares of honest people in a sum: at least `least − colluding` of them,
because below `least` survivors clients open nothing (`SumTerms`). Sampling hides nothing from whoever
draws the cohort: this is the Gaussian mechanism with z·√((least − colluding)/(most − colluding)), once for every round
somebody takes part in.

Sums of discrete Gaussians are not quite discrete Gaussians (`log_gap`), and those not quite rounded ones (`SLACK`);
decisions/024 has both arguments.
"""

import math
from dataclasses import dataclass

from sottovoce.base.errors import InputError
from sottovoce.privacy.calibration import smallest_integer

SMALLEST_STD = 32.0  # of a share, in cells of the grid: below, `log_gap` would begin to count
SLACK = 1 / 12  # cells²: rounding an ideal Gaussian to the grid makes it as much wider
_ROUNDED_UP = 1 + 2.0**-50  # so that no rounding on the way makes it less
_RARE = 1e-15  # more survivors than `most`: as rare as what a PLD leaves out


@dataclass(frozen=True, kw_only=True)
class NoiseShares:
    """A release has `most` shares, a sum at least `least`; `colluding` clients reveal their share, or add none."""

    most: int
    least: int
    colluding: int

    def __post_init__(self) -> None:
        if not 0 <= self.colluding < self.least <= self.most:
            raise InputError(
                f"noise shares most={self.most}, least={self.least}, colluding={self.colluding}: "
                "expected colluding < least <= most"
            )

    @property
    def honest(self) -> int:
        """So many shares at least are in every sum that nobody but their owners know."""
        return self.least - self.colluding

    @property
    def needed(self) -> int:
        """So many shares are the plan's noise: those of a release that colluders do not know."""
        return self.most - self.colluding

    @property
    def widening(self) -> float:
        """By how much a release's noise is wider than the plan's."""
        return math.sqrt(self.most / self.needed)

    def multiplier_for_server(self, noise_multiplier: float) -> float:
        """z of what the server sees."""
        return noise_multiplier * math.sqrt(self.honest / self.needed)

    def variance(self, *, noise_std_cells: float) -> float:
        """v: of one share, in cells²."""
        variance = (noise_std_cells**2 + SLACK) / self.needed * _ROUNDED_UP
        if variance < SMALLEST_STD**2:
            raise InputError(
                f"a share of the noise would be {math.sqrt(variance):.3g} cells of the grid wide: expected at least "
                f"{SMALLEST_STD:g}; sum_bits=64 has a finer grid"
            )
        return variance

    def missing(self, shares: int) -> int:
        """How many are still to be added to a sum of so many."""
        return max(self.most - shares, 0)

    def check_most(self, *, population_size: int, sampling_rate: float) -> None:
        """Refuses a `most` that cohorts exceed other than once in 10¹⁵ times: what is released must not vary."""
        enough = largest_cohort(population_size, sampling_rate=sampling_rate)
        if not enough <= self.most <= population_size:
            raise InputError(
                f"noise shares most={self.most}: cohorts of a population of {population_size} at sampling_rate="
                f"{sampling_rate:g} reach {enough}; expected from {enough} to {population_size}"
            )


def largest_cohort(population_size: int, *, sampling_rate: float) -> int:
    """What a Poisson cohort exceeds once in 10¹⁵ times.

    >>> largest_cohort(34_753, sampling_rate=1024 / 34_753), largest_cohort(8, sampling_rate=0.5)
    (1284, 8)
    """
    from scipy.stats import binom  # here: nobody else in a run needs it

    return int(binom.isf(_RARE, population_size, sampling_rate))


def fewest_available(least: int, *, sampling_rate: float) -> int:
    """How many must be available for a Poisson cohort of them to fall below `least` at most once in 10¹⁵ times.

    >>> fewest_available(512, sampling_rate=1024 / 34_753), fewest_available(8, sampling_rate=1.0)
    (24094, 8)
    """
    from scipy.stats import binom

    def are_enough(people: int) -> bool:
        return bool(binom.cdf(least - 1, people, sampling_rate) <= _RARE)

    return smallest_integer(are_enough, start=least)


def log_gap(*, variance: float, shares: int) -> float:
    """log τ: no probability of a sum of shares is more than e^±τ times a discrete Gaussian's, in one coordinate.

    Kairouz, Liu and Steinke (2021): two of variances a and b differ from one of a + b by 5·exp(−2π²/(1/a + 1/b)), which
    counts twice for two neighbours. Added one after another, and topped up with no less than a share: 10·n·exp(−π²v).

    >>> round(log_gap(variance=SMALLEST_STD**2, shares=10_000) / math.log(10))
    -4384
    """
    return math.log(10 * shares) - math.pi**2 * variance
