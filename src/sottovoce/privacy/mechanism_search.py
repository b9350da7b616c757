"""The run of one kind of noise (independent, banded, BLT) with the least ε for a population, cohorts, rounds and σ_DP.

Runs are compared by their *effective* noise multiplier: z times the RMS noise of all prefix sums, over that of
independent noise (`relative_error`). Two runs with the same one have as much noise in their models, on average over the
rounds; σ_DP here is that over the cohort.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, final, get_args

from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.calibration import Accountant, event_epsilon, round_up_noise
from sottovoce.privacy.events import Composition, CorrelatedRelease, Event, poisson_release, repeated
from sottovoce.privacy.mechanism import optimal_banded, optimal_blt, relative_error
from sottovoce.privacy.rdp import check_delta
from sottovoce.privacy.strategies import Banded, Blt, Strategy, sensitivity, strategy_to_json

Kind = Literal["independent", "banded", "blt"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Each band after the first, and each buffer, is as much memory as the model in float64. Beyond these next to nothing is
# won: of K/S = 339 a thousandth, and BLTs are better where it would be more.
_MOST_BANDS, _MOST_BUFFERS, _WORTH_A_BUFFER = 64, 3, 0.01
_INDEPENDENT = Banded(column=(1.0,))
_LEAST_LOG, _MOST_LOG = -20.0, 100.0  # of multipliers and of ε: beyond, float64 knows no difference


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The population, the largest cohort that can be had, and rounds."""

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
        z, rate = self.noise_multiplier, self.sampling_rate
        if self.kind == "independent":
            return repeated(poisson_release(z, sampling_rate=rate), self.central_steps)
        return repeated(CorrelatedRelease(z, rate, self.cycle, self.strategy), self.central_steps)

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
        sizes, noise = (
            {name: getattr(self, name) for name in names}
            for names in (
                ("population_size", "cohort_size", "central_steps", "cycle"),
                ("noise_multiplier", "effective_multiplier", "sigma_dp", "delta"),
            )
        )
        return {
            "mechanism": self.recipe or {"kind": self.kind},
            **sizes,
            "kept_rows": self.kept,
            "sampling_rate_in_group": self.sampling_rate,
            **noise,
            "epsilon_pld": self.epsilon.pld,
            "epsilon_pld_reason": self.epsilon.pld_reason,
            "epsilon_rdp": self.epsilon.rdp,
            "strategy": strategy_to_json(self.strategy),
        }


@final
class MechanismSearch:
    """The run of one kind with the least ε for sizes and a σ_DP.

    It tries cycles around the last best one, so that a search over sizes is quick, and calls `on_look` for every ε that
    it computes.
    """

    def __init__(
        self, kind: Kind, *, delta: float, accountant: Accountant = "pld", on_look: Callable[[], None] = lambda: None
    ) -> None:
        check_delta(delta)
        self.kind = kind
        self._delta, self._accountant, self._on_look = delta, accountant, on_look
        self._near = 0  # index of the last best cycle
        self._buffers: int | None = None

    def epsilon(self, sizes: Sizes, sigma_dp: float) -> float:
        """The least ε, quickly and never below the careful value."""
        return self._spent(self.run(sizes, sigma_dp))

    def run(self, sizes: Sizes, sigma_dp: float) -> NoisyRun:
        """The run with that ε."""
        if self.kind == "independent":
            return self._with_cycle(sizes, 1, sigma_dp)
        apart = sizes.population_size / min(sizes.max_cohort, sizes.population_size)
        if self.kind == "blt":
            return self._with_cycle(sizes, math.ceil(apart), sigma_dp)
        cycles = _cycles(min(math.floor(apart), sizes.central_steps, _MOST_BANDS))
        at, best = -1, min(self._near, len(cycles) - 1)
        while best != at:
            at = best
            around = [index for index in (at - 1, at, at + 1) if 0 <= index < len(cycles)]
            best = min(around, key=lambda index: self._spent(self._with_cycle(sizes, cycles[index], sigma_dp)))
        self._near = at
        return self._with_cycle(sizes, cycles[at], sigma_dp)

    def _with_cycle(self, sizes: Sizes, cycle: int, sigma_dp: float) -> NoisyRun:
        population, steps = sizes.population_size, sizes.central_steps
        cohort = min(sizes.max_cohort, population)
        strategy: Strategy = _INDEPENDENT
        if self.kind == "banded":
            strategy = optimal_banded(steps=steps, bands=cycle, cycle=cycle)
        elif self.kind == "blt":
            self._buffers = self._buffers or _enough_buffers(steps, cycle)
            strategy = optimal_blt(steps=steps, buffers=self._buffers, cycle=cycle)
            cohort = -(-population // cycle)  # all of a group
        return NoisyRun(
            kind=self.kind,
            population_size=population,
            cohort_size=cohort,
            central_steps=steps,
            cycle=cycle,
            strategy=strategy,
            noise_multiplier=round_up_noise(sigma_dp * cohort / relative_error(strategy, steps=steps)),
            delta=self._delta,
        )

    def _spent(self, run: NoisyRun) -> float:
        self._on_look()
        return _cached_epsilon(run.event, self._delta, self._accountant)


@lru_cache(maxsize=4096)
def _cached_epsilon(event: Event, delta: float, accountant: Accountant) -> float:
    return event_epsilon(event, delta=delta, accountant=accountant)


def _cycles(most: int) -> list[int]:
    """Cycles to try: three in each octave, and the longest.

    >>> _cycles(20)
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


def single_release(target_epsilon: float, *, delta: float) -> float:
    """z₁: the multiplier of one Gaussian release for (ε, δ), exactly (Balle and Wang 2018, Theorem 8).

    >>> round(single_release(8.0, delta=1e-9), 4)
    0.7922
    """
    return _solve_gaussian(lambda z: (z, target_epsilon), delta)


def single_release_epsilon(noise_multiplier: float, *, delta: float) -> float:
    """ε of one Gaussian release, exactly.

    >>> round(single_release_epsilon(0.7922376, delta=1e-9), 4)
    8.0
    """
    return _solve_gaussian(lambda epsilon: (noise_multiplier, epsilon), delta)


def _solve_gaussian(at: Callable[[float], tuple[float, float]], delta: float) -> float:
    """Where δ of a Gaussian release, which falls with its multiplier and with ε, is the given one; 0 if it always is
    below, as with very much noise."""
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def excess(log_x: float) -> float:
        z, epsilon = at(math.exp(log_x))
        above, below = float(log_ndtr(0.5 / z - epsilon * z)), epsilon + float(log_ndtr(-0.5 / z - epsilon * z))
        return above + math.log(max(-math.expm1(min(below - above, 0.0)), 1e-300)) - math.log(delta)

    check_delta(delta)
    if excess(_LEAST_LOG) <= 0:
        return 0.0
    return math.exp(brentq(excess, _LEAST_LOG, _MOST_LOG, xtol=1e-12)) if excess(_MOST_LOG) < 0 else math.inf
