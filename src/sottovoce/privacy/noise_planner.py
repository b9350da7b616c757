"""`sottovoce plan --mechanism`: the noise that suits people, cohorts and rounds, the floor that none beats, what binds.

Of people, σ_DP and ε one may be left open: it is what the mechanisms compete in. With all three given they compete in
the smallest cohort that does; where none does, in the most rounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sottovoce.errors import InputError
from sottovoce.privacy.calibration import SMALLEST_TARGET, Accountant
from sottovoce.privacy.events import LARGEST_POPULATION, check_whole
from sottovoce.privacy.mechanisms import (
    KINDS,
    Kind,
    NoisyRun,
    Search,
    Sizes,
    fewest_people,
    least_noise,
    most_rounds,
    single_release,
    single_release_epsilon,
    smallest_cohort,
)
from sottovoce.privacy.planner import number
from sottovoce.privacy.rdp import check_delta

Goal = Literal["population_size", "sigma_dp", "epsilon", "cohort_size", "central_steps"]

SMALLEST, LARGEST = SMALLEST_TARGET, 1e9  # σ_DP or ε that means anything
MOST_ROUNDS = 100_000  # the strategies of more would be searched for for hours
_AS_GOOD = 1.01  # of the best, and simpler: it is chosen
_NAMES: dict[Kind, str] = {"independent": "independent", "banded": "banded", "blt": "BLT"}
_TITLES: dict[Goal, str] = {
    "population_size": "The fewest people for σ_DP = {sigma_dp:g}, ε ≤ {target_epsilon:g} and all rounds",
    "sigma_dp": "The least noise of these people for ε ≤ {target_epsilon:g}",
    "epsilon": "The least ε of these people for σ_DP = {sigma_dp:g}",
    "cohort_size": "The smallest cohort of these people for σ_DP = {sigma_dp:g} and ε ≤ {target_epsilon:g}",
    "central_steps": "The most rounds of these people for σ_DP = {sigma_dp:g} and ε ≤ {target_epsilon:g}",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is given: the largest cohort, rounds and δ, and at least two of people, σ_DP (effective) and ε."""

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
    def sizes(self) -> Sizes:
        return Sizes(
            population_size=self.population_size or 1, max_cohort=self.max_cohort, central_steps=self.central_steps
        )


@dataclass(frozen=True, kw_only=True)
class NoisePlan:
    """A run per mechanism, the chosen one, and what the answer hangs on.

    `floor` is the goal's number that no mechanism beats (for a cohort: the people whom the σ_DP needs at least).
    `instead` is ε of the chosen run with twice the people, twice the cohort or half the rounds.
    """

    asked: Asked
    goal: Goal
    runs: tuple[NoisyRun, ...]
    unreachable: dict[Kind, str]
    chosen: NoisyRun
    floor: float
    instead: dict[str, float]

    @property
    def binds(self) -> str | None:
        """Of which more (or fewer, of rounds) would help most; None where what was asked for is had."""
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
    asked: Asked,
    *,
    kinds: Sequence[Kind] = KINDS,
    accountant: Accountant = "pld",
    on_look: Callable[[], None] = lambda: None,
) -> NoisePlan:
    """The best run of each kind, and the best of them; the simpler one where it is as good to a hundredth.

    Guarantee: each run's ε holds for adding or removing one user, if its cohorts are drawn from its cycle of groups and
    its noise is correlated by its strategy.
    """
    searches = {kind: Search(kind, delta=asked.delta, accountant=accountant, on_look=on_look) for kind in kinds}
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


def _goal(asked: Asked, searches: Sequence[Search]) -> Goal:
    if asked.population_size is None:
        return "population_size"
    if asked.sigma_dp is None:
        return "sigma_dp"
    if asked.target_epsilon is None:
        return "epsilon"
    sigma, target = asked.sigma_dp, asked.target_epsilon
    enough = any(search.epsilon(asked.sizes, sigma) <= target for search in searches)
    return "cohort_size" if enough else "central_steps"


def _floor(goal: Goal, asked: Asked) -> float:
    root = math.sqrt(asked.central_steps)
    if goal == "epsilon":
        assert asked.sigma_dp is not None
        assert asked.population_size is not None
        return single_release_epsilon(asked.sigma_dp * asked.population_size / root, delta=asked.delta)
    assert asked.target_epsilon is not None
    one = single_release(asked.target_epsilon, delta=asked.delta)
    if goal == "sigma_dp":
        assert asked.population_size is not None
        return one * root / asked.population_size
    assert asked.sigma_dp is not None
    if goal == "central_steps":
        assert asked.population_size is not None
        return (asked.sigma_dp * asked.population_size / one) ** 2
    return one * root / asked.sigma_dp


def _best(goal: Goal, search: Search, asked: Asked, floor: float) -> NoisyRun:
    sigma, target = asked.sigma_dp, asked.target_epsilon
    if goal == "sigma_dp":
        assert target is not None
        return least_noise(search, asked.sizes, target_epsilon=target, floor=floor)
    assert sigma is not None
    if goal == "epsilon":
        return search.run(asked.sizes, sigma)
    assert target is not None
    if goal == "population_size":
        return fewest_people(search, asked.sizes, sigma_dp=sigma, target_epsilon=target, floor=floor)
    if goal == "cohort_size" and search.epsilon(asked.sizes, sigma) <= target:
        return smallest_cohort(search, asked.sizes, sigma_dp=sigma, target_epsilon=target)
    found = most_rounds(search, asked.sizes, sigma_dp=sigma, target_epsilon=target)
    if found is None:
        rounds = asked.central_steps
        raise InputError(
            f"target_epsilon={target:g} cannot be reached with sigma_dp={sigma:g} in 1 to {rounds:,} rounds"
        )
    return found


def _score(goal: Goal, run: NoisyRun, asked: Asked) -> float:
    """The smaller, the better."""
    match goal:
        case "population_size":
            return run.population_size
        case "sigma_dp":
            return run.sigma_dp
        case "epsilon":
            return run.epsilon.headline
        case "cohort_size":
            return run.cohort_size if run.central_steps == asked.central_steps else math.inf
        case "central_steps":
            return 1 / run.central_steps


def _instead(search: Search, run: NoisyRun, max_cohort: int) -> dict[str, float]:
    """What the same σ_DP would cost with more to go by."""
    sizes = Sizes(population_size=run.population_size, max_cohort=max_cohort, central_steps=run.central_steps)
    others = {"people": replace(sizes, population_size=2 * sizes.population_size)}
    if max_cohort < run.population_size:
        others["cohort"] = replace(sizes, max_cohort=2 * max_cohort)
    if sizes.central_steps > 1:
        others["rounds"] = replace(sizes, central_steps=sizes.central_steps // 2)
    return {what: search.epsilon(other, run.sigma_dp) for what, other in others.items()}


def noise_table(plan: NoisePlan) -> Table:
    """One mechanism per row, the chosen one in bold, and the floor."""
    asked = {"sigma_dp": plan.asked.sigma_dp or 0.0, "target_epsilon": plan.asked.target_epsilon or 0.0}
    table = Table(title=_TITLES[plan.goal].format(**asked), box=SIMPLE_HEAD)
    table.add_column("noise")
    for heading in ("K", "S", "T", "cycle", "q in group", "z", "σ_DP", "ε (PLD)", "ε (RDP)"):
        table.add_column(heading, justify="right")
    for run in plan.runs:
        table.add_row(
            _named(run),
            f"{run.population_size:,}",
            f"{run.cohort_size:,}",
            f"{run.central_steps:,}",
            f"{run.cycle:,}",
            number(run.sampling_rate),
            f"{run.noise_multiplier:g}",
            number(run.sigma_dp),
            number(run.epsilon.pld),
            number(run.epsilon.rdp),
            style="bold" if run is plan.chosen else None,
        )
    table.add_row("no noise beats", *_floor_cells(plan), style="dim")
    return table


def _named(run: NoisyRun) -> str:
    match run.recipe:
        case {"bands": bands}:
            return f"banded, {bands} band" + ("s" if bands > 1 else "")
        case {"buffers": buffers}:
            return f"BLT, {buffers} buffer" + ("s" if buffers > 1 else "")
    return _NAMES[run.kind]


def _floor_cells(plan: NoisePlan) -> list[str]:
    asked = plan.asked
    shown: dict[str, float | None] = {
        "population_size": asked.population_size,
        "central_steps": asked.central_steps,
        "sigma_dp": asked.sigma_dp,
        "epsilon": asked.target_epsilon,
        **plan.floor_as,
    }
    people, rounds = math.ceil(shown["population_size"] or 0), math.floor(shown["central_steps"] or 0)
    return [f"{people:,}", "all", f"{rounds:,}", "", "", "", number(shown["sigma_dp"]), number(shown["epsilon"]), ""]


def noise_words(plan: NoisePlan) -> tuple[str, ...]:
    """What was chosen, as a recipe says it, and what binds."""
    run = plan.chosen
    lines = [f"chosen: {_named(run)}; in a recipe: {_in_recipe(run)}"]
    if run.kept:
        lines.append(f"kept from round to round: {run.kept} rows of noise, each as large as the model, in float64")
    for kind, reason in plan.unreachable.items():
        lines.append(f"{_NAMES[kind]}: {reason}")
    if plan.binds is None:
        lines.append("nothing binds: these people, cohorts and rounds are enough")
        return tuple(lines)
    changes = {"people": "twice the people", "cohort": "twice the cohort", "rounds": "half the rounds"}
    now = run.epsilon.headline
    others = ", ".join(f"{plan.instead[what]:.3g} with {changes[what]}" for what in plan.instead)
    lines.append(f"what binds: {plan.binds} (ε = {now:.3g} at this σ_DP would be {others})")
    return tuple(lines)


def _in_recipe(run: NoisyRun) -> str:
    noise = f"noise_multiplier: {run.noise_multiplier:g}"
    if run.recipe is None:
        return noise
    inner = ", ".join(f"{key}: {value}" for key, value in run.recipe.items())
    return f"mechanism: {{{inner}}}, {noise}"
