"""What would a run cost in privacy, before anything is trained, and how large must its population be?

The functions behind `sottovoce plan`, and their tables. Sampling is Poisson, neighbours differ by one user.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sottovoce.errors import InputError
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.calibration import Accountant, noise_of_run, population_for
from sottovoce.privacy.events import (
    LARGEST_POPULATION,
    LARGEST_STEPS,
    Measured,
    check_sizes,
    check_whole,
    poisson_release,
    run_event,
)
from sottovoce.privacy.pld import CAREFUL, PldCap
from sottovoce.privacy.rdp import check_delta
from sottovoce.privacy.scale import GUARANTEE, step_of

PAPER_CLIP_BOUND = 0.01


@dataclass(frozen=True)
class PlannedRun:
    """A run's noise and its ε. Names as in the glossary; `noise_to_update` is the noise's norm over C.

    ε covers what is `measured` besides: clients' word error rates.
    """

    population_size: int
    cohort_size: int
    central_steps: int
    delta: float
    noise_multiplier: float
    clip_bound: float
    parameters: int | None
    epsilon: Epsilon
    warnings: tuple[str, ...]
    measured: Measured | None = None

    @property
    def sampling_rate(self) -> float:
        """q = S/K."""
        return self.cohort_size / self.population_size

    @property
    def sigma_dp(self) -> float:
        """σ_DP = z/S, the paper's unit (Theorem 1)."""
        return self.noise_multiplier / self.cohort_size

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
        return _noise_to_update(self.sigma_dp, self.parameters)

    def to_json(self) -> dict[str, Any]:
        """Every number of the plan under its glossary name."""
        besides = {}
        if self.measured is not None:
            besides["client_wer"] = {
                "measured": self.measured.count,
                "noise_multiplier": self.measured.noise_multiplier,
            }
        return {
            "epsilon_pld": self.epsilon.pld,
            "epsilon_pld_reason": self.epsilon.pld_reason,
            "epsilon_pld_interval": self.epsilon.pld_interval,
            "epsilon_rdp": self.epsilon.rdp,
            "rdp_order": self.epsilon.rdp_order,
            "rdp_orders_unconverged": list(self.epsilon.rdp_orders_unconverged),
            "delta": self.delta,
            "neighbouring": self.epsilon.neighbouring,
            "noise_multiplier": self.noise_multiplier,
            "sigma_dp": self.sigma_dp,
            "sampling_rate": self.sampling_rate,
            "population_size": self.population_size,
            "cohort_size": self.cohort_size,
            "central_steps": self.central_steps,
            "clip_bound": self.clip_bound,
            "noise_std_sum": self.noise_std_sum,
            "noise_std_mean": self.noise_std_mean,
            "parameters": self.parameters,
            "noise_to_update": self.noise_to_update,
            **besides,
            "warnings": list(self.warnings),
        }


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
) -> PlannedRun:
    """The plan for one of: a noise multiplier, the paper's σ_DP, or a target ε.

    Guarantee: (ε, δ) for adding or removing one user, if the run samples by Poisson with probability S/K, clips to C
    and adds noise of std z·C to the sum. `accountant` says which ε a target is meant for. What is
    `measured` besides, over cohorts of its own, is part of ε.

    >>> plan = plan_run(69_506_000, cohort_size=204_800, sigma_dp=3e-6, central_steps=2034, delta=1e-9)
    >>> round(plan.noise_multiplier, 4), round(plan.epsilon.rdp, 1)
    (0.6144, 7.2)
    """
    check_sizes(population_size, cohort_size=cohort_size)
    check_whole("central_steps", central_steps, most=LARGEST_STEPS)
    check_delta(delta)
    _check_positive("clip_bound", clip_bound)
    if parameters is not None:
        _check_positive("parameters", parameters)
    if measured is not None:
        check_whole("client_wers", measured.count, most=LARGEST_STEPS)
        _check_positive("client_wer_noise", measured.noise_multiplier)
    given = {"noise_multiplier": noise_multiplier, "sigma_dp": sigma_dp, "target_epsilon": target_epsilon}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise InputError(f"expected exactly one of {', '.join(given)}; got {', '.join(chosen) or 'none'}")
    sampling_rate = cohort_size / population_size
    if target_epsilon is not None:
        z = noise_of_run(
            target_epsilon,
            population_size=population_size,
            cohort_size=cohort_size,
            central_steps=central_steps,
            delta=delta,
            accountant=accountant,
            cap=cap,
            measured=measured,
        )
    elif sigma_dp is not None:
        _check_positive("sigma_dp", sigma_dp)
        z = sigma_dp * cohort_size  # Theorem 1: z = σ_DP/𝕊 with 𝕊 = 1/(qK)
    else:
        assert noise_multiplier is not None
        _check_positive("noise_multiplier", noise_multiplier)
        z = noise_multiplier
    step = poisson_release(z, sampling_rate=sampling_rate)
    besides = None
    if measured is not None:
        besides = measured.event(population_size=population_size, cohort_size=cohort_size)
    spent = epsilon(run_event(step, central_steps, besides), delta, cap=cap)
    return PlannedRun(
        population_size=population_size,
        cohort_size=cohort_size,
        central_steps=central_steps,
        delta=delta,
        noise_multiplier=z,
        clip_bound=clip_bound,
        parameters=parameters,
        epsilon=spent,
        warnings=_warnings(population_size, delta, spent, _noise_to_update(z / cohort_size, parameters)),
        measured=measured,
    )


def scale_plan(plan: PlannedRun, *, factors: Sequence[float], cap: PldCap = CAREFUL) -> tuple[PlannedRun, ...]:
    """The paper's extrapolation: the same σ_DP, q and T, with cohort and population scaled (so z grows with S)."""
    scaled = []
    for factor in factors:
        if not 0 < factor <= LARGEST_POPULATION / plan.population_size:
            raise InputError(f"scale={factor}: expected a positive number, and at most {LARGEST_POPULATION:,} users")
        population = round(plan.population_size * factor)
        scaled.append(_replan(plan, population, round(plan.cohort_size * factor), cap))
    return tuple(scaled)


def smallest_population(
    plan: PlannedRun,
    *,
    target_epsilon: float,
    max_cohort: int | None = None,
    accountant: Accountant = "pld",
    cap: PldCap = CAREFUL,
) -> PlannedRun:
    """The same recipe (σ_DP, q, T) at the smallest population with ε ≤ target.

    The cohort is qK up to `max_cohort`; from there on only the population grows, and q falls. InputError says the
    best reachable ε when none will do.
    """
    if max_cohort is not None and max_cohort < 1:
        raise InputError(f"max_cohort={max_cohort}: expected a whole number of users, at least 1")
    population, cohort = population_for(
        target_epsilon,
        sigma_dp=plan.sigma_dp,
        sampling_rate=plan.sampling_rate,
        central_steps=plan.central_steps,
        delta=plan.delta,
        max_cohort=max_cohort,
        accountant=accountant,
        measured=lambda cohort: measured_by(plan, cohort),
    )
    return _replan(plan, population, cohort, cap)


def plan_table(plan: PlannedRun) -> Table:
    """One plan as a two-column table."""
    table = Table(title="Poisson sampling, add or remove one user", show_header=False, box=SIMPLE_HEAD)
    table.add_column()
    table.add_column(justify="right")
    epsilon = plan.epsilon
    for label, value in (
        ("ε (PLD)", _epsilon_pld(epsilon)),
        ("ε (RDP)", f"{number(epsilon.rdp)} at order {_order(epsilon.rdp_order)}"),
        ("δ", number(plan.delta)),
        ("population_size K", f"{plan.population_size:,}"),
        ("cohort_size S", f"{plan.cohort_size:,}"),
        ("sampling_rate q = S/K", number(plan.sampling_rate)),
        ("central_steps T", f"{plan.central_steps:,}"),
        ("noise_multiplier z", f"{plan.noise_multiplier:.6g}"),
        ("sigma_dp σ_DP = z/S", number(plan.sigma_dp)),
        ("clip_bound C", number(plan.clip_bound)),
        ("noise_std_sum z·C", number(plan.noise_std_sum)),
        ("noise_std_mean z·C/S", number(plan.noise_std_mean)),
    ):
        table.add_row(label, value)
    if plan.measured is not None:
        table.add_row("WERs of clients, in ε", f"{plan.measured.count:,}, z = {plan.measured.noise_multiplier:g}")
    if plan.parameters is not None:
        table.add_row("parameters D", f"{plan.parameters:,}")
        table.add_row("noise to update √D·z/S", number(plan.noise_to_update))
    return table


def plans_table(plans: Sequence[PlannedRun], *, title: str) -> Table:
    """Several plans, one per row: an extrapolation, or a recipe at the population that it needs."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in ("K", "S", "q", "T", "σ_DP", "z", "ε (PLD)", "ε (RDP)", "order"):
        table.add_column(heading, justify="right")
    for plan in plans:
        table.add_row(
            f"{plan.population_size:,}",
            f"{plan.cohort_size:,}",
            number(plan.sampling_rate),
            f"{plan.central_steps:,}",
            number(plan.sigma_dp),
            f"{plan.noise_multiplier:.4g}",
            coloured(plan.epsilon.pld),
            coloured(plan.epsilon.rdp),
            _order(plan.epsilon.rdp_order),
        )
    return table


def number(value: float | None) -> str:
    """Short and readable from 1e-9 to 1e9.

    >>> [number(v) for v in (None, 7.2264, 69_506_000, 0.00295, 3e-8, 1.2e8)]
    ['–', '7.23', '6.95e+07', '0.00295', '3e-08', '1.2e+08']
    """
    return "–" if value is None else f"{value:.3g}"


def _replan(plan: PlannedRun, population_size: int, cohort_size: int, cap: PldCap) -> PlannedRun:
    return plan_run(
        population_size,
        cohort_size=cohort_size,
        central_steps=plan.central_steps,
        delta=plan.delta,
        sigma_dp=plan.sigma_dp,
        parameters=plan.parameters,
        clip_bound=plan.clip_bound,
        cap=cap,
        measured=measured_by(plan, cohort_size),
    )


def measured_by(plan: PlannedRun, cohort_size: int) -> Measured | None:
    """With as much noise on the mean as the plan's, as its updates have: the multiplier grows with the cohort."""
    if plan.measured is None:
        return None
    z = plan.measured.noise_multiplier * cohort_size / plan.cohort_size
    return replace(plan.measured, noise_multiplier=z)


def _noise_to_update(sigma_dp: float, parameters: int | None) -> float | None:
    return None if parameters is None else sigma_dp * math.sqrt(parameters)


def _warnings(population_size: int, delta: float, epsilon: Epsilon, noise_to_update: float | None) -> tuple[str, ...]:
    warnings = []
    if delta >= 1 / population_size:
        warnings.append(
            f"delta={delta:g} is not below 1/population_size={1 / population_size:.3g}: "
            "publishing one whole user at random would pass as private"
        )
    if epsilon.headline > GUARANTEE:
        step = step_of(epsilon.headline).words
        warnings.append(f"ε = {epsilon.headline:.4g} is above {GUARANTEE:g}: {step} as a guarantee, at this population")
    if epsilon.rdp_orders_unconverged:
        orders = epsilon.rdp_orders_unconverged
        warnings.append(
            f"RDP: the series did not converge at {len(orders)} orders from {orders[0]:g} to {orders[-1]:g}; "
            "they are bounded in another way"
        )
    if noise_to_update is not None and noise_to_update > 1:
        warnings.append(f"the noise on the mean is {noise_to_update:.3g} times as long as one user's clipped update")
    return tuple(warnings)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name}={value}: expected a positive number")


def _order(order: float | None) -> str:
    return "–" if order is None else f"{order:g}"


def coloured(epsilon: float | None) -> str:
    if epsilon is None:
        return "–"
    return f"[green]{number(epsilon)}[/]" if epsilon <= GUARANTEE else number(epsilon)


def _epsilon_pld(epsilon: Epsilon) -> str:
    return number(epsilon.pld) if epsilon.pld is not None else f"none: {epsilon.pld_reason}"
