"""ε against population for several noise levels: the `--plot` of the planner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sottovoce.errors import InputError
from sottovoce.files import written_atomically
from sottovoce.privacy.calibration import event_epsilon
from sottovoce.privacy.planner import PlannedRun, grown
from sottovoce.privacy.scale import GUARANTEE

NOISE_FACTORS = (1 / 3, 1.0, 3.0, 10.0)


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
    points: int = 9,
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


def draw_population_figure(curves: Sequence[PopulationCurve], *, plan: PlannedRun) -> Figure:
    """The curves on log-log axes, with the useful region shaded."""
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        axes.plot(curve.population_sizes, curve.epsilons, marker="o", markersize=3, label=f"{curve.sigma_dp:.3g}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, GUARANTEE))
    axes.axhspan(axes.get_ylim()[0], GUARANTEE, color="tab:green", alpha=0.08)
    axes.axhline(GUARANTEE, color="tab:green", linewidth=0.8)
    axes.set_xlabel("population size K")
    axes.set_ylabel(f"ε (PLD) at δ = {plan.delta:g}")
    axes.set_title(f"sampling rate {plan.sampling_rate:.3g}, {plan.central_steps:,} steps")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(title="σ_DP")
    return figure


def check_plot(path: Path) -> None:
    """Before anything is computed: a name that says how to draw, in a folder that is there."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise InputError(f"plot={path}: expected a name that ends in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise InputError(f"plot={path}: the folder {path.parent} does not exist")


def write_figure(figure: Figure, path: Path) -> None:
    """Whole or not at all."""
    check_plot(path)
    with written_atomically(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)
