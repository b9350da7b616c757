"""ε against population: for several noise levels (`plan --plot`), and for the recipes of runs.

As the flagship paper extrapolates: noise on the mean, sampling rate and rounds stay those of the run, and the cohort
grows with the population. Nobody has run that: the figure shows how far a run is from ε ≤ 8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from sottovoce.base.drawing import FigurePage, write_drawing
from sottovoce.base.errors import InputError
from sottovoce.base.tables import Table
from sottovoce.privacy.calibration import Accountant, event_epsilon
from sottovoce.privacy.events import LARGEST_POPULATION, GaussianRelease, Measured, parts_of
from sottovoce.privacy.guarantee import format_epsilon
from sottovoce.privacy.membership_odds import GUARANTEE
from sottovoce.privacy.planner import PlannedRun, grown, plan_run
from sottovoce.privacy.pld import QUICK
from sottovoce.report.drawings import (
    REFERENCE_LINE,
    Drawing,
    LineStyle,
    Points,
    finish_axes,
    label_decades,
    line_styles,
    new_axes,
    plot_line,
)
from sottovoce.report.parts import make_drawing, show_count
from sottovoce.report.records import Record, RunRecord

NOISE_FACTORS = (1 / 3, 1.0, 3.0, 10.0)
MOST_CURVES = 6  # of a report: they take a second each
POINTS = 9
FURTHEST = 1000  # times the run's own population is how far it is drawn, or ten times as far as ε ≤ 8 is
SMALLEST_EPSILON = 1e-3


def common_accountant(runs: Sequence[RunRecord]) -> Accountant:
    """By which the populations for ε ≤ 8 of all runs are known: PLD, or RDP if older versions have made one of them."""
    found = [useful for run in runs if (useful := run.privacy.get("useful"))]
    return "pld" if all("pld" in useful for useful in found) else "rdp"


def larger_population(privacy: Record, accountant: Accountant) -> Record | None:
    """`population_size`, `cohort_size` and `epsilon` by this accountant, or `unreachable`; None where none is known."""
    useful: Record | None = privacy.get("useful")
    if useful is None:
        return None
    own: Record = useful["pld"] if accountant == "pld" else useful
    return own if "unreachable" in own else {**own, "epsilon": own[f"epsilon_{accountant}"]}


@dataclass(frozen=True)
class PopulationCurve:
    """ε of one noise level at each population; the cohort is qK up to `max_cohort`."""

    sigma_dp: float
    population_sizes: tuple[int, ...]
    epsilons: tuple[float, ...]


def population_curves(
    plan: PlannedRun,
    *,
    sigma_dps: Sequence[float] | None = None,
    max_cohort: int | None = None,
    largest_population: int = 10**9,
    points: int = POINTS,
) -> tuple[PopulationCurve, ...]:
    """ε from the plan's population to `largest_population`, for several σ_DP (a third to ten times the plan's)."""
    if largest_population <= plan.population_size:
        raise InputError(
            f"largest_population={largest_population}: expected more than population_size={plan.population_size}"
        )
    levels = [plan.sigma_dp * factor for factor in NOISE_FACTORS] if sigma_dps is None else list(sigma_dps)
    grid = np.geomspace(plan.population_size, largest_population, points)
    populations = tuple(round(size) for size in grid.tolist())
    curves = []
    for sigma_dp in levels:
        runs = [grown(plan, size, max_cohort=max_cohort) for size in populations]
        noisy = [replace(run, noise_multiplier=sigma_dp * run.cohort_size) for run in runs]
        epsilons = tuple(event_epsilon(run.event, delta=plan.delta) for run in noisy)
        curves.append(PopulationCurve(sigma_dp, populations, epsilons))
    return tuple(curves)


def draw_population_curves(curves: Sequence[PopulationCurve], path: Path, *, plan: PlannedRun) -> None:
    """Draw the curves to `path`; its suffix says as what: .png, .svg, .pdf or .html."""
    title = f"ε against population: sampling rate {plan.sampling_rate:.3g}, {plan.central_steps:,} steps"
    rows = zip(*(map(format_epsilon, curve.epsilons) for curve in curves), strict=True)
    table = Table(
        "population",
        f"ε (PLD) at δ = {plan.delta:g}",
        ("population", *(f"σ_DP = {curve.sigma_dp:.3g}" for curve in curves)),
        tuple((f"{size:,}", *row) for size, row in zip(curves[0].population_sizes, rows, strict=True)),
        words=0,
    )
    page = FigurePage(title=title, description=title, table=table)
    write_drawing(path, partial(_noise_figure, curves, plan=plan, title=title), lambda: page)


def _noise_figure(curves: Sequence[PopulationCurve], *, plan: PlannedRun, title: str) -> Figure:
    """On logarithmic axes, with ε ≤ 8 shaded."""
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        axes.plot(curve.population_sizes, curve.epsilons, marker="o", markersize=3, label=f"{curve.sigma_dp:.3g}")
    axes.set(xscale="log", yscale="log", xlabel="population size K", ylabel=f"ε (PLD) at δ = {plan.delta:g}")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, GUARANTEE))
    axes.axhspan(axes.get_ylim()[0], GUARANTEE, color="tab:green", alpha=0.08)
    axes.axhline(GUARANTEE, color="tab:green", linewidth=0.8)
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(title="σ_DP")
    return figure


@dataclass(frozen=True)
class _Recipe:
    """What decides a curve, the same for many runs of a suite; and at which population it is known to have ε ≤ 8."""

    population_size: int
    cohort_size: int
    noise_multiplier: float
    steps: int
    delta: float
    measured: Measured | None
    useful: tuple[float, float] | None
    accountant: Accountant

    def curve(self) -> Points:
        planned = plan_run(
            self.population_size,
            cohort_size=self.cohort_size,
            central_steps=self.steps,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            cap=QUICK,
            measured=self.measured,
        )
        furthest = max(FURTHEST * self.population_size, 0 if self.useful is None else round(10 * self.useful[0]))
        largest = max(min(furthest, LARGEST_POPULATION), self.population_size + 1)
        (found,) = population_curves(planned, sigma_dps=(planned.sigma_dp,), largest_population=largest)
        points = [(float(size), one) for size, one in zip(found.population_sizes, found.epsilons, strict=True)]
        return [points[0], *(point for point in points[1:] if point[1] >= SMALLEST_EPSILON)]


def population_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """One curve for each recipe among `runs` with Poisson sampling and noise; at most `MOST_CURVES`."""
    recipes: dict[_Recipe, list[str]] = {}
    for run in runs:
        if (recipe := _recipe(run)) is not None:
            recipes.setdefault(recipe, []).append(run.label)
    if not recipes:
        return []
    styles = {style.label: style for style in line_styles(run.label for run in runs)}  # each run keeps its colour
    curves: dict[str, tuple[_Recipe, LineStyle, Points]] = {}
    for recipe, labels in list(recipes.items())[:MOST_CURVES]:
        name = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
        curves[name] = recipe, replace(styles[labels[0]], label=name), recipe.curve()
    return [
        make_drawing(
            "epsilon-population",
            f"ε against population. {'; '.join(_describe(name, r, curve) for name, (r, _, curve) in curves.items())}.",
            partial(_recipe_figure, curves),
            accountants=" or ".join(sorted({recipe.accountant.upper() for recipe, _, _ in curves.values()})),
            omitted=f" Of {len(recipes)} recipes the first {MOST_CURVES}." if len(recipes) > MOST_CURVES else "",
        )
    ]


def _recipe(run: RunRecord) -> _Recipe | None:
    """None where nothing is promised, or the same rule cannot be applied to a larger population."""
    guarantee, plan = run.guarantee, run.header.get("plan") or {}
    if (
        guarantee is None
        or not isinstance(guarantee.release, GaussianRelease)
        or guarantee.release.sampling != "poisson"
    ):
        return None
    if (plan.get("adaptive") or {}).get("count_noise_std") is not None:  # it would not grow with the cohort
        return None
    (_, steps), *besides = parts_of(guarantee.event)
    measured = None
    for part, count in besides:
        assert isinstance(part, GaussianRelease)
        measured = Measured(count=count, noise_multiplier=part.noise_multiplier)
    accountant = common_accountant([run])
    useful = larger_population(run.privacy, accountant) or {}
    known: float = next((useful[name] for name in ("epsilon_pld", "epsilon_rdp") if useful.get(name) is not None), 0.0)
    return _Recipe(
        population_size=plan["population_size"],
        cohort_size=plan["cohort_size"],
        noise_multiplier=guarantee.release.noise_multiplier,
        steps=steps,
        delta=guarantee.delta,
        measured=measured,
        useful=(useful["population_size"], known) if "population_size" in useful else None,
        accountant=accountant,
    )


def _describe(name: str, recipe: _Recipe, curve: Points) -> str:
    (own, here), (far, there) = curve[0], curve[-1]
    useful = "" if recipe.useful is None else f", ε ≤ 8 with {show_count(recipe.useful[0])}"
    ends = (
        f"{format_epsilon(here)} with {show_count(own)} people{useful}, {format_epsilon(there)} with {show_count(far)}"
    )
    return f"{name}: {ends}"


def _recipe_figure(curves: Mapping[str, tuple[_Recipe, LineStyle, Points]]) -> Figure:
    figure, axes = new_axes(height=3.5)
    for recipe, style, curve in curves.values():
        useful = recipe.useful
        plot_line(axes, style, curve, markers=False)
        axes.plot(*curve[0], marker="o", markersize=7, color=style.colour, linestyle="")
        if useful is not None and useful[0] > curve[0][0] and useful[1] > 0:
            axes.plot(*useful, marker="*", markersize=11, color=style.colour, linestyle="")
    axes.set(xscale="log", yscale="log")
    axes.axhline(GUARANTEE, **REFERENCE_LINE)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1.0), max(high, 20.0))
    label_decades(axes.xaxis)
    label_decades(axes.yaxis)
    finish_axes(axes, x="population", y="ε (PLD)")
    return figure
