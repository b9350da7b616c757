"""One step of a recipe on a small synthetic stand-in, its seed's included."""

import tempfile
from dataclasses import replace
from pathlib import Path

from sottovoce.config import Experiment, Recipe, Suite, load_recipe
from sottovoce.config.smoke import smoke
from sottovoce.training.context import Surroundings
from sottovoce.training.seeding import folder_of, seed_of
from sottovoce.training.stages import run_recipe


def run_smoke(name: str, experiment: Experiment, *, out: Path | None, around: Surroundings) -> None:
    """Run one step of every run in `experiment`, in `out` or a folder that is removed again.

    Nothing is said of an ε: it would be the stand-in's.
    """
    around = _without_epsilon(around)
    if out is not None:
        _run(name, experiment, replace(around, runs=out))
        return
    with tempfile.TemporaryDirectory(prefix="sottovoce-smoke-") as folder:
        _run(name, experiment, replace(around, runs=Path(folder)))


def _without_epsilon(around: Surroundings) -> Surroundings:
    return replace(around, stand_in=True, on_report=lambda report: around.on_report(replace(report, epsilon=None)))


def _run(name: str, experiment: Experiment, around: Surroundings) -> None:
    if isinstance(experiment, Suite):
        for label, part in experiment.runs.items():
            _run(f"{name}/{label}", load_recipe(part.recipe, part.overrides), around)
        return
    _run_recipe(experiment, folder_of(name, around.runs), around)


def _run_recipe(recipe: Recipe, folder: Path, around: Surroundings) -> None:
    """Run it in `folder`. A seed is smoked once, however many recipes start from it."""
    seed_folder = None
    found = seed_of(recipe, runs=around.runs)
    if found is not None and found.recipe is not None:
        seed_folder = found.folder
        _run_recipe(found.recipe, seed_folder, around)
    small = smoke(recipe, seed_model=None if seed_folder is None else str(seed_folder))
    run_recipe(small, out=folder, resume=True, around=around)
