"""ε against population: what the same recipe would promise with more people, as the flagship paper extrapolates.

Noise on the mean, sampling rate and rounds stay those of the run, and the cohort grows along. Nobody has run that: the
figure shows where a run stands, and how far that is from a guarantee of use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure

from sottovoce.drawing import FAINT
from sottovoce.privacy.calibration import Accountant
from sottovoce.privacy.events import LARGEST_POPULATION, GaussianRelease, Measured, parts_of
from sottovoce.privacy.planner import PlannedRun, plan_run
from sottovoce.privacy.pld import QUICK
from sottovoce.privacy.promise import written_out
from sottovoce.report.cells import integer
from sottovoce.report.curves import LinePoints
from sottovoce.report.drawings import Drawing, Pen, dress, label_decades, new_axes, pens, plot
from sottovoce.report.larger_population import accountant_of, larger_population
from sottovoce.report.population_figure import population_curves
from sottovoce.report.records import RunRecord

MOST = 6  # curves, which take a second each
POINTS = 9
FURTHER = 1000  # times the run's own people: as far as it is drawn, or ten times as far as ε ≤ 8 is
SMALLEST = 1e-3  # ε, below which nobody cares


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


def population_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """One curve for each recipe among `runs` that draws by chance and adds noise; `MOST` of them."""
    recipes: dict[_Recipe, list[str]] = {}
    for run in runs:
        if (recipe := _recipe(run)) is not None:
            recipes.setdefault(recipe, []).append(run.label)
    if not recipes:
        return []
    shown = {_named(labels): recipe for recipe, labels in list(recipes.items())[:MOST]}
    every = {pen.label: pen for pen in pens([run.label for run in runs])}  # each keeps its colour
    colours = {_named(labels): replace(every[labels[0]], label=_named(labels)) for labels in recipes.values()}
    curves = {labels: _curve(recipe) for labels, recipe in shown.items()}
    by = sorted({recipe.accountant.upper() for recipe in shown.values()})
    left_out = f" Of {len(recipes)} recipes the first {MOST}." if len(recipes) > MOST else ""
    told = [_told(labels, recipe, curves[labels]) for labels, recipe in shown.items()]
    return [
        Drawing(
            "epsilon-population",
            "ε against population",
            "ε by PLD of the same recipe (noise on the mean, sampling rate, rounds, δ) with more people. The filled "
            "point is the run's own population, the only one that anybody has; the star is where ε ≤ 8 (dashed) by "
            f"{' or '.join(by)}. With more people than 1/δ, δ would have to be smaller and ε larger than drawn."
            + left_out,
            f"ε against population. {'; '.join(told)}.",
            partial(_figure, shown, curves, colours),
        )
    ]


def _recipe(run: RunRecord) -> _Recipe | None:
    """None where nothing is promised, or no larger population can be imagined by the same rule."""
    promise, plan = run.promise, run.header.get("plan") or {}
    if promise is None or not isinstance(promise.release, GaussianRelease) or promise.release.sampling != "poisson":
        return None
    if (plan.get("adaptive") or {}).get("count_noise_std") is not None:  # it would not grow with the cohort
        return None
    (_, steps), *besides = parts_of(promise.event)
    measured = None
    for part, count in besides:
        assert isinstance(part, GaussianRelease)
        measured = Measured(count=count, noise_multiplier=part.noise_multiplier)
    accountant = accountant_of([run])
    useful = larger_population(run.privacy, accountant) or {}
    known: float = next((useful[name] for name in ("epsilon_pld", "epsilon_rdp") if useful.get(name) is not None), 0.0)
    return _Recipe(
        population_size=plan["population_size"],
        cohort_size=plan["cohort_size"],
        noise_multiplier=promise.release.noise_multiplier,
        steps=steps,
        delta=promise.delta,
        measured=measured,
        useful=(useful["population_size"], known) if "population_size" in useful else None,
        accountant=accountant,
    )


def _curve(recipe: _Recipe) -> LinePoints:
    planned: PlannedRun = plan_run(
        recipe.population_size,
        cohort_size=recipe.cohort_size,
        central_steps=recipe.steps,
        delta=recipe.delta,
        noise_multiplier=recipe.noise_multiplier,
        cap=QUICK,
        measured=recipe.measured,
    )
    furthest = max(FURTHER * recipe.population_size, 0 if recipe.useful is None else round(10 * recipe.useful[0]))
    (found,) = population_curves(
        planned,
        sigma_dps=(planned.sigma_dp,),
        largest_population=max(min(furthest, LARGEST_POPULATION), recipe.population_size + 1),
        points=POINTS,
    )
    points = [(float(size), one) for size, one in zip(found.population_sizes, found.epsilons, strict=True)]
    return [points[0], *(point for point in points[1:] if point[1] >= SMALLEST)]


def _named(labels: Sequence[str]) -> str:
    """For a legend, which has no room for the labels of a whole suite."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"


def _told(labels: str, recipe: _Recipe, curve: LinePoints) -> str:
    (own, here), (far, there) = curve[0], curve[-1]
    useful = "" if recipe.useful is None else f", ε ≤ 8 with {integer(recipe.useful[0])}"
    return f"{labels}: {written_out(here)} with {integer(own)} people{useful}, {written_out(there)} with {integer(far)}"


def _figure(recipes: Mapping[str, _Recipe], curves: Mapping[str, LinePoints], colours: Mapping[str, Pen]) -> Figure:
    figure, axes = new_axes(height=3.5)
    for labels, curve in curves.items():
        pen, useful = colours[labels], recipes[labels].useful
        plot(axes, pen, curve, marks=False)
        axes.plot(*curve[0], marker="o", markersize=7, color=pen.colour, linestyle="")
        if useful is not None and useful[0] > curve[0][0] and useful[1] > 0:
            axes.plot(*useful, marker="*", markersize=11, color=pen.colour, linestyle="")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(8, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1.0), max(high, 20.0))
    label_decades(axes.xaxis)
    label_decades(axes.yaxis)
    dress(axes, x="population", y="ε (PLD)")
    return figure
