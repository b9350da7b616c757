"""The privacy cost of a run before anything is trained, and the population that a target ε needs (`sottovoce plan`).

Sampling is Poisson, neighbours differ by one user.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.calibration import (
    Accountant,
    Bracket,
    calibrate_run_noise,
    check_target,
    event_epsilon,
    solve_decreasing,
)
from sottovoce.privacy.events import (
    LARGEST_POPULATION,
    LARGEST_STEPS,
    Composition,
    Measured,
    check_sizes,
    check_whole,
    poisson_release,
    run_event,
)
from sottovoce.privacy.membership_odds import GUARANTEE, strength_of
from sottovoce.privacy.pld import CAREFUL, PldCap
from sottovoce.privacy.rdp import check_delta

PAPER_CLIP_BOUND = 0.01
_POPULATION_PRECISION = 1e-3


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run's noise, its `epsilon` and `warnings`. Names as in the glossary.

    `noise_to_update` is the noise's norm over C. ε covers what is `measured` besides: clients' word error rates. `cap`
    bounds the work of its PLD. With `expected_answers` more are drawn (`cohort_size`, which ε is of) than are expected
    in the sum, which is divided by so many.
    """

    population_size: int
    cohort_size: int
    central_steps: int
    delta: float
    noise_multiplier: float
    clip_bound: float = PAPER_CLIP_BOUND
    parameters: int | None = None
    measured: Measured | None = None
    cap: PldCap = CAREFUL
    expected_answers: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self.population_size, cohort_size=self.cohort_size)
        if self.expected_answers is not None:
            check_whole("expected_answers", self.expected_answers, most=self.cohort_size)
        check_whole("central_steps", self.central_steps, most=LARGEST_STEPS)
        check_delta(self.delta)
        _check_positive("clip_bound", self.clip_bound)
        if self.parameters is not None:
            _check_positive("parameters", self.parameters)
        if self.measured is not None:
            check_whole("client_wers", self.measured.count, most=LARGEST_STEPS)
            _check_positive("client_wer_noise", self.measured.noise_multiplier)
        _check_positive("noise_multiplier", self.noise_multiplier)

    @property
    def event(self) -> Composition:
        """The whole run, with what is measured besides."""
        besides = None
        if self.measured is not None:
            besides = self.measured.event(population_size=self.population_size, cohort_size=self.cohort_size)
        step = poisson_release(self.noise_multiplier, sampling_rate=self.sampling_rate)
        return run_event(step, self.central_steps, besides)

    @cached_property
    def epsilon(self) -> Epsilon:
        return epsilon(self.event, self.delta, cap=self.cap)

    @property
    def sampling_rate(self) -> float:
        """q = S/K."""
        return self.cohort_size / self.population_size

    @property
    def answers(self) -> int:
        """What a sum is divided by: S, or those who are expected in time."""
        return self.cohort_size if self.expected_answers is None else self.expected_answers

    @property
    def sigma_dp(self) -> float:
        """σ_DP = z/S, the paper's unit (Theorem 1)."""
        return self.noise_multiplier / self.answers

    @property
    def noise_std_sum(self) -> float:
        """z·C."""
        return self.noise_multiplier * self.clip_bound

    @property
    def noise_std_mean(self) -> float:
        """z·C/S = C·σ_DP."""
        return self.clip_bound * self.sigma_dp

    @property
    def noise_to_update(self) -> float | None:
        """Norm of the noise on the mean, z·C·√D/S, over the bound C of one user's update."""
        return None if self.parameters is None else self.sigma_dp * math.sqrt(self.parameters)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the plan a weak one."""
        warnings, spent = [], self.epsilon
        if self.delta >= 1 / self.population_size:
            warnings.append(
                f"delta={self.delta:g} is not below 1/population_size={1 / self.population_size:.3g}: "
                "publishing one whole user at random would pass as private"
            )
        if (found := spent.headline) > GUARANTEE:
            words = f"{strength_of(found).words} as a guarantee, at this population"
            warnings.append(f"ε = {found:.4g} is above {GUARANTEE:g}: {words}")
        if orders := spent.rdp_orders_unconverged:
            warnings.append(
                f"RDP: the series did not converge at {len(orders)} orders from {orders[0]:g} to {orders[-1]:g}; "
                "they are bounded in another way"
            )
        if (ratio := self.noise_to_update) is not None and ratio > 1:
            warnings.append(f"the noise on the mean is {ratio:.3g} times as long as one user's clipped update")
        return tuple(warnings)

    def to_json(self) -> dict[str, Any]:
        """Every number of the plan under its glossary name."""
        spent, besides, measured = self.epsilon, {}, self.measured
        if measured is not None:
            besides["client_wer"] = {"measured": measured.count, "noise_multiplier": measured.noise_multiplier}
        return {
            "epsilon_pld": spent.pld,
            "epsilon_pld_reason": spent.pld_reason,
            "epsilon_pld_interval": spent.pld_interval,
            "epsilon_rdp": spent.rdp,
            "rdp_order": spent.rdp_order,
            "rdp_orders_unconverged": list(spent.rdp_orders_unconverged),
            "delta": self.delta,
            "neighbouring": spent.neighbouring,
            **{name: getattr(self, name) for name in _NUMBERS},
            **({} if self.expected_answers is None else {"expected_answers": self.expected_answers}),
            **besides,
            "warnings": list(self.warnings),
        }


_NUMBERS = (
    *("noise_multiplier", "sigma_dp", "sampling_rate", "population_size", "cohort_size", "central_steps"),
    *("clip_bound", "noise_std_sum", "noise_std_mean", "parameters", "noise_to_update"),
)


def plan_run(
    population_size: int,
    *,
    cohort_size: int,
    central_steps: int,
    delta: float,
    noise_multiplier: float | None = None,
    sigma_dp: float | None = None,
    target_epsilon: float | None = None,
    parameters: int | None = None,
    clip_bound: float = PAPER_CLIP_BOUND,
    accountant: Accountant = "pld",
    cap: PldCap = CAREFUL,
    measured: Measured | None = None,
    expected_answers: int | None = None,
) -> PlannedRun:
    """The plan for one of: a noise multiplier, the paper's σ_DP, or a target ε.

    Guarantee: (ε, δ) for adding or removing one user, if the run samples by Poisson with probability S/K, clips to C
    and adds noise of std z·C to the sum. `accountant` says which ε a target is meant for. What is `measured` besides,
    over cohorts of its own, is part of ε. Of `cohort_size` drawn so many `expected_answers` may be all that a sum is
    divided by: the others may be late, and ε counts them as if they were not.

    >>> plan = plan_run(69_506_000, cohort_size=204_800, sigma_dp=3e-6, central_steps=2034, delta=1e-9)
    >>> round(plan.noise_multiplier, 4), round(plan.epsilon.rdp, 1)
    (0.6144, 7.2)
    """
    given = {"noise_multiplier": noise_multiplier, "sigma_dp": sigma_dp, "target_epsilon": target_epsilon}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise InputError(f"expected exactly one of {', '.join(given)}; got {', '.join(chosen) or 'none'}")
    run: dict[str, Any] = {"population_size": population_size, "cohort_size": cohort_size, "delta": delta, "cap": cap}
    run |= {"central_steps": central_steps, "measured": measured}
    z = 1.0 if noise_multiplier is None else noise_multiplier
    # What is wrong is refused before noise is searched for.
    more: dict[str, Any] = {"clip_bound": clip_bound, "parameters": parameters, "expected_answers": expected_answers}
    planned = PlannedRun(**run, **more, noise_multiplier=z)
    if target_epsilon is not None:
        planned = replace(planned, noise_multiplier=calibrate_run_noise(target_epsilon, accountant=accountant, **run))
    elif sigma_dp is not None:
        _check_positive("sigma_dp", sigma_dp)
        planned = replace(planned, noise_multiplier=sigma_dp * planned.answers)  # Theorem 1: z = σ_DP/𝕊 with 𝕊 = 1/(qK)
    _ = planned.epsilon  # now, and not where somebody first looks at it
    return planned


def scale_plan(plan: PlannedRun, *, factors: Sequence[float], cap: PldCap = CAREFUL) -> tuple[PlannedRun, ...]:
    """The paper's extrapolation: the same σ_DP, q and T, with cohort and population scaled (so z grows with S)."""
    for factor in factors:
        if not 0 < factor <= LARGEST_POPULATION / plan.population_size:
            raise InputError(f"scale={factor}: expected a positive number, and at most {LARGEST_POPULATION:,} users")
    sizes = [(round(plan.population_size * factor), round(plan.cohort_size * factor)) for factor in factors]
    return tuple(replace(resized(plan, *size), cap=cap) for size in sizes)


def smallest_population(
    plan: PlannedRun,
    *,
    target_epsilon: float,
    max_cohort: int | None = None,
    accountant: Accountant = "pld",
    cap: PldCap = CAREFUL,
) -> PlannedRun:
    """The same recipe (σ_DP, q, T) at the smallest population (to 0.1 %) with ε ≤ target.

    The cohort is qK up to `max_cohort`; from there on only the population grows, and q falls. InputError says the
    best reachable ε when none will do.
    """
    if max_cohort is not None and max_cohort < 1:
        raise InputError(f"max_cohort={max_cohort}: expected a whole number of users, at least 1")
    check_target(target_epsilon)

    def sized(population: float) -> PlannedRun:
        return grown(plan, math.ceil(population), max_cohort=max_cohort)

    def at(population: float) -> str:
        return f", with population_size={population} and cohort_size={sized(population).cohort_size}"

    def spent(population: float) -> float:
        return event_epsilon(sized(population).event, delta=plan.delta, accountant=accountant)

    start = math.ceil(1 / plan.sampling_rate)
    bracket = Bracket(start=start, factor=10, precision=_POPULATION_PRECISION, most=LARGEST_POPULATION)
    found = solve_decreasing(target_epsilon, spent, bracket, at=at)
    return replace(sized(found), cap=cap)


def grown(plan: PlannedRun, population_size: int, *, max_cohort: int | None = None) -> PlannedRun:
    """The same σ_DP, T and q in another population, with a cohort of at most `max_cohort`."""
    cohort = max(1, round(plan.sampling_rate * population_size))
    return resized(plan, population_size, cohort if max_cohort is None else min(cohort, max_cohort))


def resized(plan: PlannedRun, population_size: int, cohort_size: int) -> PlannedRun:
    """The same noise on the mean, of updates and of what is measured: multipliers grow with the cohort."""
    if plan.expected_answers is not None:
        raise InputError(
            f"expected_answers={plan.expected_answers}: other populations have cohorts of their own; expected none"
        )
    measured = plan.measured
    if measured is not None:
        measured = replace(measured, noise_multiplier=measured.noise_multiplier * cohort_size / plan.cohort_size)
    return replace(
        plan,
        population_size=population_size,
        cohort_size=cohort_size,
        noise_multiplier=plan.sigma_dp * cohort_size,
        measured=measured,
    )


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name}={value}: expected a positive number")
