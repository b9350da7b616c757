"""`sottovoce plan --mechanism`: which noise suits a population, cohorts and rounds; the floor of all; what limits it.

Of population, σ_DP and ε one may be left open: it is what independent, banded and buffered (BLT) noise compete in. With
all three given they compete in the smallest cohort that reaches the target; where none does, in the most rounds.
Everything is found from one question, "what is the least ε for this σ_DP?" (`mechanism_search`), whose answer falls
with population, cohort and noise and grows with rounds.

No mechanism beats the *floor*: after T rounds somebody was in T·S/K of them on average, maybe with the same clipped
update each time. Who sees the last sum alone sees that much, in noise of std σ_DP·S·√T, which is a Gaussian release of
multiplier σ_DP·K/√T, whatever S is (decisions/031). With z₁ the multiplier of one release for (ε, δ): K ≥ z₁·√T/σ_DP.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sottovoce.base.errors import InputError
from sottovoce.privacy.calibration import SMALLEST_TARGET, Accountant, Bracket, UnreachableTarget, solve_decreasing
from sottovoce.privacy.events import LARGEST_POPULATION, check_whole
from sottovoce.privacy.mechanism_search import (
    KINDS,
    Kind,
    MechanismSearch,
    NoisyRun,
    Sizes,
    single_release,
    single_release_epsilon,
)
from sottovoce.privacy.rdp import check_delta

Goal = Literal["population_size", "sigma_dp", "epsilon", "cohort_size", "central_steps"]

SMALLEST, LARGEST = SMALLEST_TARGET, 1e9  # σ_DP or ε that means anything
MOST_ROUNDS = 100_000  # optimising the strategies of more takes hours
_PRECISION = 1e-3
_AS_GOOD = 1.01  # of the best, and simpler: it is chosen


@dataclass(frozen=True, kw_only=True)
class NoiseRequest:
    """What is given: the largest cohort, rounds and δ, and at least two of population, σ_DP (effective) and ε."""

    max_cohort: int
    central_steps: int
    delta: float
    population_size: int | None = None
    sigma_dp: float | None = None
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        check_whole("max_cohort", self.max_cohort, most=LARGEST_POPULATION)
        check_whole("central_steps", self.central_steps, most=MOST_ROUNDS)
        check_delta(self.delta)
        if self.population_size is not None:
            check_whole("population_size", self.population_size, most=LARGEST_POPULATION)
        for name in ("sigma_dp", "target_epsilon"):
            value = getattr(self, name)
            if value is not None and not SMALLEST <= value <= LARGEST:
                raise InputError(f"{name}={value}: expected a number from {SMALLEST:g} to {LARGEST:g}")
        given = [name for name in ("population_size", "sigma_dp", "target_epsilon") if getattr(self, name) is not None]
        if len(given) < 2:
            names = "population_size, sigma_dp and target_epsilon"
            raise InputError(f"expected two of {names}, or all three; got {', '.join(given) or 'none'}")

    @property
    def given(self) -> tuple[float, float, float]:
        """Population, σ_DP and ε; NaN is left open."""
        population, sigma, target = self.population_size, self.sigma_dp, self.target_epsilon
        return population or math.nan, sigma or math.nan, target or math.nan

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            population_size=self.population_size or 1, max_cohort=self.max_cohort, central_steps=self.central_steps
        )


@dataclass(frozen=True, kw_only=True)
class NoisePlan:
    """A run per mechanism, the chosen one, and what limits it.

    `floor` is the goal's number that no mechanism beats (for a cohort: the population that the σ_DP needs at least).
    `instead` is ε of the chosen run with twice the population, twice the cohort or half the rounds.
    """

    asked: NoiseRequest
    goal: Goal
    runs: tuple[NoisyRun, ...]
    unreachable: dict[Kind, str]
    chosen: NoisyRun
    floor: float
    instead: dict[str, float]

    @property
    def binds(self) -> str | None:
        """Of which more (or fewer, of rounds) would help most; None where the request is met."""
        return None if self.goal == "cohort_size" else min(self.instead, key=lambda what: self.instead[what])

    @property
    def floor_as(self) -> dict[str, float]:
        """The floor under the name of what it is a number of."""
        return {"population_size" if self.goal == "cohort_size" else self.goal: self.floor}

    def to_json(self) -> dict[str, Any]:
        """Every number under its glossary name."""
        return {
            "goal": self.goal,
            "chosen": self.chosen.to_json(),
            "mechanisms": [run.to_json() for run in self.runs],
            "unreachable": dict(self.unreachable),
            "floor": self.floor_as,
            "binds": self.binds,
            "epsilon_instead": dict(self.instead),
        }


def plan_noise(
    asked: NoiseRequest,
    *,
    kinds: Sequence[Kind] = KINDS,
    accountant: Accountant = "pld",
    on_look: Callable[[], None] = lambda: None,
) -> NoisePlan:
    """The best run of each kind, and the best of them; the simpler one where it is as good to a hundredth.

    Guarantee: each run's ε holds for adding or removing one user, if its cohorts are drawn from its cycle of groups and
    its noise is correlated by its strategy.
    """
    searches = {
        kind: MechanismSearch(kind, delta=asked.delta, accountant=accountant, on_look=on_look) for kind in kinds
    }
    goal = _goal(asked, list(searches.values()))
    floor = _floor(goal, asked)
    runs: dict[Kind, NoisyRun] = {}
    unreachable: dict[Kind, str] = {}
    for kind, search in searches.items():
        try:
            runs[kind] = _best(goal, search, asked, floor)
        except InputError as problem:
            unreachable[kind] = str(problem)
    if not runs:
        raise InputError(next(iter(unreachable.values())))
    scores = {kind: _score(goal, run, asked) for kind, run in runs.items()}
    chosen = next(kind for kind in runs if scores[kind] <= _AS_GOOD * min(scores.values()))
    return NoisePlan(
        asked=asked,
        goal=goal,
        runs=tuple(runs.values()),
        unreachable=unreachable,
        chosen=runs[chosen],
        floor=floor,
        instead={} if goal == "cohort_size" else _instead(searches[chosen], runs[chosen], asked.max_cohort),
    )


def _goal(asked: NoiseRequest, searches: Sequence[MechanismSearch]) -> Goal:
    if asked.population_size is None:
        return "population_size"
    if asked.sigma_dp is None:
        return "sigma_dp"
    if asked.target_epsilon is None:
        return "epsilon"
    _, sigma, target = asked.given
    enough = any(search.epsilon(asked.sizes, sigma) <= target for search in searches)
    return "cohort_size" if enough else "central_steps"


def _floor(goal: Goal, asked: NoiseRequest) -> float:
    """From K·σ_DP/√T ≥ z₁(ε, δ), for any of them."""
    population, sigma, target = asked.given
    root = math.sqrt(asked.central_steps)
    if goal == "epsilon":
        return single_release_epsilon(sigma * population / root, delta=asked.delta)
    one = single_release(target, delta=asked.delta)
    if goal == "sigma_dp":
        return one * root / population
    return (sigma * population / one) ** 2 if goal == "central_steps" else one * root / sigma


def _best(goal: Goal, search: MechanismSearch, asked: NoiseRequest, floor: float) -> NoisyRun:
    """The run whose number of the goal is the best within the target, to 0.1 %."""
    sizes, (_, sigma, target) = asked.sizes, asked.given
    if goal == "epsilon":
        return search.run(sizes, sigma)
    if goal == "cohort_size" and search.epsilon(sizes, sigma) > target:
        goal = "central_steps"
    bracket = Bracket(start=floor * (1 - _PRECISION), factor=2, precision=_PRECISION, most=floor * 1e6)
    match goal:
        case "population_size":
            bracket = replace(bracket, most=LARGEST_POPULATION)
        case "cohort_size":
            bracket = replace(bracket, start=min(sizes.max_cohort, sizes.population_size), least=1.0)
        case "central_steps":  # fewer do not always spend less: noise over few can be correlated less
            bracket = replace(bracket, start=1.0, most=2.0 * sizes.central_steps)

    def at(x: float) -> tuple[Sizes, float]:
        """What is tried; ε falls as x grows. Of rounds it is by how much there are fewer of them."""
        match goal:
            case "population_size":
                return replace(sizes, population_size=math.ceil(x)), sigma
            case "cohort_size":
                return replace(sizes, max_cohort=math.ceil(x)), sigma
            case "central_steps":
                return replace(sizes, central_steps=max(1, math.floor(sizes.central_steps / x))), sigma
        return sizes, x

    try:
        found = solve_decreasing(target, lambda x: search.epsilon(*at(x)), bracket)
    except UnreachableTarget:
        if goal != "central_steps":
            raise
        reached = f"in 1 to {sizes.central_steps:,} rounds"
        raise InputError(f"target_epsilon={target:g} cannot be reached with sigma_dp={sigma:g} {reached}") from None
    return search.run(*at(found))


def _score(goal: Goal, run: NoisyRun, asked: NoiseRequest) -> float:
    """The smaller, the better."""
    if goal == "central_steps":
        return 1 / run.central_steps
    if goal == "cohort_size" and run.central_steps != asked.central_steps:
        return math.inf
    return run.epsilon.headline if goal == "epsilon" else float(getattr(run, goal))


def _instead(search: MechanismSearch, run: NoisyRun, max_cohort: int) -> dict[str, float]:
    """ε of the same σ_DP with twice as many people or clients per round, or half the rounds."""
    sizes = Sizes(population_size=run.population_size, max_cohort=max_cohort, central_steps=run.central_steps)
    others = {"people": replace(sizes, population_size=2 * sizes.population_size)}
    if max_cohort < run.population_size:
        others["cohort"] = replace(sizes, max_cohort=2 * max_cohort)
    if sizes.central_steps > 1:
        others["rounds"] = replace(sizes, central_steps=sizes.central_steps // 2)
    return {what: search.epsilon(other, run.sigma_dp) for what, other in others.items()}
