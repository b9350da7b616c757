"""The output of `sottovoce plan`: tables of planned runs and of mechanisms, and a line about the chosen one."""

import math
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.mechanism_search import Kind, NoisyRun
from sottovoce.privacy.membership_odds import GUARANTEE
from sottovoce.privacy.noise_planner import Goal, NoisePlan
from sottovoce.privacy.planner import PlannedRun

_NAMES: dict[Kind, str] = {"independent": "independent", "banded": "banded", "blt": "BLT"}
_TITLES: dict[Goal, str] = {
    "population_size": "The fewest people for σ_DP = {sigma_dp:g}, ε ≤ {target_epsilon:g} and all rounds",
    "sigma_dp": "The least noise of these people for ε ≤ {target_epsilon:g}",
    "epsilon": "The least ε of these people for σ_DP = {sigma_dp:g}",
    "cohort_size": "The smallest cohort of these people for σ_DP = {sigma_dp:g} and ε ≤ {target_epsilon:g}",
    "central_steps": "The most rounds of these people for σ_DP = {sigma_dp:g} and ε ≤ {target_epsilon:g}",
}


def plan_table(plan: PlannedRun) -> Table:
    """One plan as a two-column table."""
    epsilon, pld = plan.epsilon, plan.epsilon.pld
    size = "S" if plan.expected_answers is None else "answers"
    rows = {
        "ε (PLD)": number(pld) if pld is not None else f"none: {epsilon.pld_reason}",
        "ε (RDP)": f"{number(epsilon.rdp)} at order {_order(epsilon)}",
        "δ": number(plan.delta),
        "population_size K": f"{plan.population_size:,}",
        "cohort_size S": f"{plan.cohort_size:,}",
        "sampling_rate q = S/K": number(plan.sampling_rate),
        "central_steps T": f"{plan.central_steps:,}",
        "noise_multiplier z": f"{plan.noise_multiplier:.6g}",
        f"sigma_dp σ_DP = z/{size}": number(plan.sigma_dp),
        "clip_bound C": number(plan.clip_bound),
        "noise_std_sum z·C": number(plan.noise_std_sum),
        f"noise_std_mean z·C/{size}": number(plan.noise_std_mean),
    }
    if plan.expected_answers is not None:
        rows["expected_answers, of S drawn"] = f"{plan.expected_answers:,}"
    if plan.measured is not None:
        rows["WERs of clients, in ε"] = f"{plan.measured.count:,}, z = {plan.measured.noise_multiplier:g}"
    if plan.parameters is not None:
        rows["parameters D"] = f"{plan.parameters:,}"
        rows[f"noise to update √D·z/{size}"] = number(plan.noise_to_update)
    table = Table(title="Poisson sampling, add or remove one user", show_header=False, box=SIMPLE_HEAD)
    table.add_column()
    table.add_column(justify="right")
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def plans_table(plans: Sequence[PlannedRun], *, title: str) -> Table:
    """Several plans, one per row: an extrapolation, or a recipe at the population that it needs."""
    table = _table(title, ("K", "S", "q", "T", "σ_DP", "z", "ε (PLD)", "ε (RDP)", "order"))
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
            _order(plan.epsilon),
        )
    return table


def noise_table(plan: NoisePlan) -> Table:
    """One mechanism per row, the chosen one in bold, and the floor."""
    asked = {"sigma_dp": plan.asked.sigma_dp or 0.0, "target_epsilon": plan.asked.target_epsilon or 0.0}
    headings = ("K", "S", "T", "cycle", "q in group", "z", "σ_DP", "ε (PLD)", "ε (RDP)")
    table = _table(_TITLES[plan.goal].format(**asked), headings, first="noise")
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


def number(value: float | None) -> str:
    """Short and readable from 1e-9 to 1e9.

    >>> [number(v) for v in (None, 7.2264, 69_506_000, 0.00295, 3e-8, 1.2e8)]
    ['–', '7.23', '6.95e+07', '0.00295', '3e-08', '1.2e+08']
    """
    return "–" if value is None else f"{value:.3g}"


def coloured(epsilon: float | None) -> str:
    """Green where it is a guarantee."""
    return f"[green]{number(epsilon)}[/]" if epsilon is not None and epsilon <= GUARANTEE else number(epsilon)


def _order(epsilon: Epsilon) -> str:
    return "–" if epsilon.rdp_order is None else f"{epsilon.rdp_order:g}"


def _table(title: str, headings: Iterable[str], *, first: str | None = None) -> Table:
    """Columns of numbers, after the `first`, of words."""
    table = Table(title=title, box=SIMPLE_HEAD)
    if first is not None:
        table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
