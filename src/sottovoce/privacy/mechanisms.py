"""Which noise for these people? Independent, banded or buffered (BLT), with its cohort, cycle and rounds.

Runs are compared by their *effective* noise multiplier: z times the RMS noise of all prefix sums, over that of
independent noise (`relative_error`). Two runs with the same one have as much noise in their models, on average over the
rounds; σ_DP here is that over the cohort. Everything is found from one question, "what is the least ε for this σ_DP?",
whose answer falls with people, cohort and noise and grows with rounds.

No mechanism beats the *floor*: after T rounds somebody was in T·S/K of them on average, maybe with the same clipped
update each time. Who sees the last sum alone sees that much, in noise of std σ_DP·S·√T, which is a Gaussian release of
multiplier σ_DP·K/√T, whatever S is (decisions/031). With z₁ the multiplier of one release for (ε, δ): K ≥ z₁·√T/σ_DP.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, final, get_args

from sottovoce.errors import InputError
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.calibration import Accountant, crossing, event_epsilon, written_up
from sottovoce.privacy.events import (
    LARGEST_POPULATION,
    Composition,
    CorrelatedRelease,
    Event,
    poisson_release,
    repeated,
)
from sottovoce.privacy.optimal_strategies import optimal_banded, optimal_blt, relative_error
from sottovoce.privacy.rdp import check_delta
from sottovoce.privacy.strategies import Banded, Blt, Strategy, sensitivity, strategy_to_json

Kind = Literal["independent", "banded", "blt"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Each band after the first, and each buffer, is as much memory as the model in float64. Beyond these next to nothing is
# won: of K/S = 339 a thousandth, and BLTs are better where it would be more.
_MOST_BANDS, _MOST_BUFFERS, _WORTH_A_BUFFER = 64, 3, 0.01
_PRECISION = 1e-3
_INDEPENDENT = Banded(column=(1.0,))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """People, the largest cohort that can be had, and rounds."""

    population_size: int
    max_cohort: int
    central_steps: int


@dataclass(frozen=True, kw_only=True)
class NoisyRun:
    """A run with one of the mechanisms. `noise_multiplier` is that of fresh noise, before it is correlated."""

    kind: Kind
    population_size: int
    cohort_size: int
    central_steps: int
    cycle: int
    strategy: Strategy
    noise_multiplier: float
    delta: float

    @property
    def sampling_rate(self) -> float:
        """With which a member of a round's group joins."""
        return 1.0 if self.kind == "blt" else min(1.0, self.cycle * self.cohort_size / self.population_size)

    @property
    def event(self) -> Composition:
        """The whole run."""
        if self.kind == "independent":
            return repeated(
                poisson_release(self.noise_multiplier, sampling_rate=self.sampling_rate), self.central_steps
            )
        row = CorrelatedRelease(self.noise_multiplier, self.sampling_rate, self.cycle, self.strategy)
        return repeated(row, self.central_steps)

    @cached_property
    def epsilon(self) -> Epsilon:
        return epsilon(self.event, self.delta)

    @property
    def effective_multiplier(self) -> float:
        """That of independent noise with as much noise in the sums of rounds, on average."""
        return self.noise_multiplier * relative_error(self.strategy, steps=self.central_steps)

    @property
    def sigma_dp(self) -> float:
        """The effective multiplier over the cohort."""
        return self.effective_multiplier / self.cohort_size

    @property
    def kept(self) -> int:
        """Rows of noise that a run keeps from one round to the next, each as large as the model."""
        return self.strategy.buffers if isinstance(self.strategy, Blt) else self.strategy.bands - 1

    @property
    def recipe(self) -> dict[str, Any] | None:
        """The recipe's `federation.privacy.mechanism`."""
        match self.strategy:
            case Blt(decays=decays):
                return {"kind": "blt", "buffers": len(decays), "cycle": self.cycle}
            case Banded(column=column) if self.kind == "banded":
                return {"kind": "banded", "bands": len(column), "cycle": self.cycle}
        return None

    def to_json(self) -> dict[str, Any]:
        """Every number under its glossary name."""
        return {
            "mechanism": self.recipe or {"kind": self.kind},
            "population_size": self.population_size,
            "cohort_size": self.cohort_size,
            "central_steps": self.central_steps,
            "cycle": self.cycle,
            "kept_rows": self.kept,
            "sampling_rate_in_group": self.sampling_rate,
            "noise_multiplier": self.noise_multiplier,
            "effective_multiplier": self.effective_multiplier,
            "sigma_dp": self.sigma_dp,
            "delta": self.delta,
            "epsilon_pld": self.epsilon.pld,
            "epsilon_pld_reason": self.epsilon.pld_reason,
            "epsilon_rdp": self.epsilon.rdp,
            "strategy": strategy_to_json(self.strategy),
        }


@final
class Search:
    """The run of one kind with the least ε for people, rounds and a σ_DP.

    It looks at cycles around that which was best the last time, so that a search over sizes is quick. `on_look` is told
    of every ε that is computed.
    """

    def __init__(
        self, kind: Kind, *, delta: float, accountant: Accountant = "pld", on_look: Callable[[], None] = lambda: None
    ) -> None:
        check_delta(delta)
        self.kind = kind
        self._delta, self._accountant, self._on_look = delta, accountant, on_look
        self._near = 0  # in the ladder of cycles
        self._buffers: int | None = None

    def epsilon(self, sizes: Sizes, sigma_dp: float) -> float:
        """The least ε, quickly and never below the careful value."""
        return self._spent(self.run(sizes, sigma_dp))

    def run(self, sizes: Sizes, sigma_dp: float) -> NoisyRun:
        if self.kind == "independent":
            return self._with(sizes, 1, sigma_dp)
        apart = sizes.population_size / min(sizes.max_cohort, sizes.population_size)
        if self.kind == "blt":
            return self._with(sizes, math.ceil(apart), sigma_dp)
        cycles = _ladder(min(math.floor(apart), sizes.central_steps, _MOST_BANDS))
        at = min(self._near, len(cycles) - 1)
        while True:
            around = [index for index in (at - 1, at, at + 1) if 0 <= index < len(cycles)]
            best = min(around, key=lambda index: self._spent(self._with(sizes, cycles[index], sigma_dp)))
            if best == at:
                break
            at = best
        self._near = at
        return self._with(sizes, cycles[at], sigma_dp)

    def _with(self, sizes: Sizes, cycle: int, sigma_dp: float) -> NoisyRun:
        people, steps = sizes.population_size, sizes.central_steps
        cohort = min(sizes.max_cohort, people)
        strategy: Strategy = _INDEPENDENT
        if self.kind == "banded":
            strategy = optimal_banded(steps=steps, bands=cycle, cycle=cycle)
        elif self.kind == "blt":
            self._buffers = self._buffers or _enough_buffers(steps, cycle)
            strategy = optimal_blt(steps=steps, buffers=self._buffers, cycle=cycle)
            cohort = -(-people // cycle)  # all of a group
        z = written_up(sigma_dp * cohort / relative_error(strategy, steps=steps))
        return NoisyRun(
            kind=self.kind,
            population_size=people,
            cohort_size=cohort,
            central_steps=steps,
            cycle=cycle,
            strategy=strategy,
            noise_multiplier=z,
            delta=self._delta,
        )

    def _spent(self, run: NoisyRun) -> float:
        self._on_look()
        return _epsilon_of(run.event, self._delta, self._accountant)


@lru_cache(maxsize=4096)
def _epsilon_of(event: Event, delta: float, accountant: Accountant) -> float:
    return event_epsilon(event, delta=delta, accountant=accountant)


def _ladder(most: int) -> list[int]:
    """Cycles to look at: three in each octave, and the longest.

    >>> _ladder(20)
    [1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20]
    """
    steps = {round(2 ** (third / 3)) for third in range(3 * most.bit_length() + 1)}
    return sorted({*(cycle for cycle in steps if cycle < most), most})


def _enough_buffers(steps: int, cycle: int) -> int:
    """The fewest that leave no more than a hundredth to be won by more."""

    def noise(buffers: int) -> float:
        strategy = optimal_blt(steps=steps, buffers=buffers, cycle=cycle)
        return relative_error(strategy, steps=steps) * sensitivity(strategy, rows=steps, cycle=cycle)

    most = noise(_MOST_BUFFERS)
    return next(n for n in range(1, _MOST_BUFFERS + 1) if noise(n) <= (1 + _WORTH_A_BUFFER) * most)


def fewest_people(search: Search, sizes: Sizes, *, sigma_dp: float, target_epsilon: float, floor: float) -> NoisyRun:
    """For all the rounds and this σ_DP, to 0.1 %; `sizes.population_size` is not looked at."""

    def sized(people: float) -> Sizes:
        return replace(sizes, population_size=math.ceil(people))

    found = _solved(
        lambda people: search.epsilon(sized(people), sigma_dp), floor, target=target_epsilon, most=LARGEST_POPULATION
    )
    return search.run(sized(found), sigma_dp)


def least_noise(search: Search, sizes: Sizes, *, target_epsilon: float, floor: float) -> NoisyRun:
    """The smallest σ_DP for these people, cohorts and rounds, to 0.1 %."""
    found = _solved(lambda sigma: search.epsilon(sizes, sigma), floor, target=target_epsilon, most=floor * 1e6)
    return search.run(sizes, found)


def smallest_cohort(search: Search, sizes: Sizes, *, sigma_dp: float, target_epsilon: float) -> NoisyRun:
    """With which the largest cohort's σ_DP and rounds still are within the target, to 0.1 %."""

    def sized(cohort: float) -> Sizes:
        return replace(sizes, max_cohort=math.ceil(cohort))

    def spent(cohort: float) -> float:
        return search.epsilon(sized(cohort), sigma_dp)

    low = high = float(min(sizes.max_cohort, sizes.population_size))
    while low > 1 and spent(low) <= target_epsilon:
        low, high = max(low / 2, 1.0), low
    if spent(low) <= target_epsilon:  # one user is enough
        return search.run(sized(low), sigma_dp)
    within = crossing(spent, low, high, target=target_epsilon, precision=_PRECISION) if low < high else high
    return search.run(sized(within), sigma_dp)


def most_rounds(search: Search, sizes: Sizes, *, sigma_dp: float, target_epsilon: float) -> NoisyRun | None:
    """Up to so many as `sizes` has, with this σ_DP, to 0.1 %; None where halving them again and again finds none.

    Fewer rounds do not always spend less: noise over few can be correlated less.
    """

    def sized(share: float) -> Sizes:
        return replace(sizes, central_steps=max(1, math.floor(sizes.central_steps / share)))

    low = high = 1.0
    while search.epsilon(sized(high), sigma_dp) > target_epsilon:
        if high > sizes.central_steps:
            return None
        low, high = high, high * 2
    if high > low:
        high = crossing(
            lambda share: search.epsilon(sized(share), sigma_dp), low, high, target=target_epsilon, precision=_PRECISION
        )
    return search.run(sized(high), sigma_dp)


def _solved(spent: Callable[[float], float], floor: float, *, target: float, most: float) -> float:
    """Where ε falls to the target, above a floor."""
    low = high = floor * (1 - _PRECISION)
    while spent(high) > target:
        low, high = high, high * 2
        if high > most:
            raise InputError(f"target_epsilon={target:g} cannot be reached: the best is ε = {spent(low):.4g}")
    return crossing(spent, low, high, target=target, precision=_PRECISION) if high > low else high


def single_release(target_epsilon: float, *, delta: float) -> float:
    """z₁: the multiplier of one Gaussian release for (ε, δ), exactly (Balle and Wang 2018, Theorem 8).

    >>> round(single_release(8.0, delta=1e-9), 4)
    0.7922
    """
    return _gaussian(lambda z: (z, target_epsilon), delta)


def single_release_epsilon(noise_multiplier: float, *, delta: float) -> float:
    """ε of one Gaussian release, exactly.

    >>> round(single_release_epsilon(0.7922376, delta=1e-9), 4)
    8.0
    """
    return _gaussian(lambda epsilon: (noise_multiplier, epsilon), delta)


_LEAST, _MOST = -20.0, 100.0  # logarithms of multipliers and of ε: beyond, float64 knows no difference


def _gaussian(at: Callable[[float], tuple[float, float]], delta: float) -> float:
    """Where δ of a Gaussian release, which falls with its multiplier and with ε, is the one that is asked for.

    0 where the δ of next to nothing is smaller already: so much noise hides everybody.
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def excess(log_x: float) -> float:
        z, epsilon = at(math.exp(log_x))
        above, below = float(log_ndtr(0.5 / z - epsilon * z)), epsilon + float(log_ndtr(-0.5 / z - epsilon * z))
        return above + math.log(max(-math.expm1(min(below - above, 0.0)), 1e-300)) - math.log(delta)

    check_delta(delta)
    if excess(_LEAST) <= 0:
        return 0.0
    return math.exp(brentq(excess, _LEAST, _MOST, xtol=1e-12)) if excess(_MOST) < 0 else math.inf
