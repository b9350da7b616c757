"""Who takes part in a round: indices of users, and nothing else about them.

Samplers draw from a source of uniform 64-bit words: `stream(...).bit_generator.random_raw` in a simulation (NumPy
promises those words to stay the same in every version), `SecureRandom().words` in a release.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import keyed_order
from sottovoce.privacy.randomness import Words

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PoissonSampler:
    """Each user joins with probability `sampling_rate`, on their own.

    Guarantee: amplification by Poisson sampling at rate q against adding or removing one user. The size of the
    cohort is random and private. A rate of 1 takes everybody.
    """

    sampling: ClassVar[Literal["poisson"]] = "poisson"
    sampling_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise InputError(f"sampling_rate={self.sampling_rate}: expected a probability in (0, 1]")

    def sample(self, population_size: int, *, words: Words) -> Indices:
        """The users of one cohort, ascending. Work and memory grow with the cohort, not with the population.

        >>> from sottovoce.base.seeds import stream
        >>> words = stream(1, "cohort", 0).bit_generator.random_raw
        >>> len(PoissonSampler(sampling_rate=1e-6).sample(70_000_000, words=words))
        62
        """
        if self.sampling_rate == 1:
            return np.arange(population_size, dtype=np.int64)
        # The gap between one member and the next is geometric: P(gap > g) = (1 − q)^g, here right to 2⁻⁵³.
        log_stay_out = math.log1p(-self.sampling_rate)
        expected = population_size * self.sampling_rate
        batch = int(expected + 6 * math.sqrt(expected)) + 16
        position, found = -1, list[Indices]()
        while position < population_size:
            gaps = np.floor(np.log(_uniform(words(batch))) / log_stay_out) + 1
            # Capped, so that adding up huge gaps (tiny rates) cannot overflow.
            steps = np.minimum(gaps, float(population_size + 1)).astype(np.int64)
            members = position + np.cumsum(steps)
            found.append(members)
            position = int(members[-1])
        cohort = np.concatenate(found)
        return cohort[cohort < population_size]


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler:
    """`cohort_size` users without replacement, every such set equally likely.

    Guarantee: amplification by sampling without replacement against *replacing* one user, which moves a sum of
    clipped updates by up to 2C.
    """

    sampling: ClassVar[Literal["fixed_size"]] = "fixed_size"
    cohort_size: int

    def __post_init__(self) -> None:
        if self.cohort_size < 1:
            raise InputError(f"cohort_size={self.cohort_size}: expected at least 1")

    def sample(self, population_size: int, *, words: Words) -> Indices:
        """The users of one cohort, ascending."""
        if self.cohort_size > population_size:
            raise InputError(f"cohort_size={self.cohort_size} exceeds population_size={population_size}")
        if 2 * self.cohort_size > population_size:  # rejecting repeats would take long: draw who stays out
            left_out = _distinct(population_size, population_size - self.cohort_size, words)
            return np.setdiff1d(np.arange(population_size, dtype=np.int64), left_out, assume_unique=True)
        return np.sort(_distinct(population_size, self.cohort_size, words))


@dataclass(frozen=True, kw_only=True)
class CyclicSampler:
    """Users are divided into `cycle` groups; row t draws from group t mod `cycle` alone, each member independently.

    Guarantee: between two rows that may have the same user lie at least `cycle` − 1 others. Who is in which group is
    public and depends on indices alone, never on data. Neighbours differ by one index filled or empty: the number of
    indices stays. A rate of 1 takes the whole group.
    """

    sampling: ClassVar[Literal["cyclic"]] = "cyclic"
    cycle: int
    sampling_rate: float  # of each member of the group whose turn it is

    def __post_init__(self) -> None:
        if self.cycle < 1:
            raise InputError(f"cycle={self.cycle}: expected at least 1 group")
        if not 0 < self.sampling_rate <= 1:
            raise InputError(f"sampling_rate={self.sampling_rate}: expected a probability in (0, 1]")

    def sample(self, population_size: int, *, row: int, words: Words) -> Indices:
        """The users of one cohort, ascending.

        >>> sampler = CyclicSampler(cycle=3, sampling_rate=1.0)
        >>> [sampler.sample(7, row=row, words=lambda count: None).tolist() for row in range(4)]
        [[0, 4, 5], [1, 6], [2, 3], [0, 4, 5]]
        """
        members = self.groups(population_size)[row % self.cycle]
        return members[PoissonSampler(sampling_rate=self.sampling_rate).sample(len(members), words=words)]

    def groups(self, population_size: int) -> tuple[Indices, ...]:
        """Who is in which group, which everybody knows."""
        return _groups(population_size, self.cycle)


@lru_cache(maxsize=4)
def _groups(population_size: int, cycle: int) -> tuple[Indices, ...]:
    """Groups whose sizes differ by one at most. A shuffle that everybody knows: the order of a store means nothing."""
    order = keyed_order(np.arange(population_size, dtype=np.uint64), 0, "cycle")
    return tuple(np.sort(order[first::cycle]) for first in range(cycle))


Sampler = PoissonSampler | FixedSizeSampler | CyclicSampler


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform on (0, 1], never 0: the middle of one of 2⁵³ cells (the last ones rounded)."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _distinct(bound: int, count: int, words: Words) -> Indices:
    """`count` different numbers below `bound`: drawn one after another, repeats thrown away."""
    kept = np.empty(0, dtype=np.int64)
    while len(kept) < count:
        drawn = np.concatenate([kept, _below(bound, 2 * (count - len(kept)) + 16, words)])
        _, first = np.unique(drawn, return_index=True)
        kept = drawn[np.sort(first)][:count]
    return kept


def _below(bound: int, count: int, words: Words) -> Indices:
    """At most `count` uniform numbers below `bound`: the remainder of words, less those that would favour some."""
    drawn = words(count)
    excess = 2**64 % bound
    fair = drawn[drawn < np.uint64(2**64 - excess)] if excess else drawn
    return (fair % np.uint64(bound)).astype(np.int64)


def bounded_weight(amount: float, *, cap: float) -> float:
    """min(amount/cap, 1): a weight by data that stays bounded, for a public `cap` (of utterances, or seconds).

    Guarantee: in [0, 1] for every amount, so that weight·clip(update) is still at most C. Divide by a public
    denominator; dividing by the sum of such weights would let one user move everybody's.

    >>> bounded_weight(30, cap=120), bounded_weight(500, cap=120)
    (0.25, 1.0)
    """
    if not (math.isfinite(cap) and cap > 0):
        raise InputError(f"weight cap={cap}: expected a positive public number")
    return min(max(amount, 0.0) / cap, 1.0) if not math.isnan(amount) else 0.0
