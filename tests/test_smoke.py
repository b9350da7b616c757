"""Every recipe of the package fits together: one step of each kind runs on a small synthetic stand-in.

Tables vary few numbers many times: one recipe stands for all that differ from it in numbers alone. Large suites vary
few settings many times: one run stands for all that change the same settings.
"""

import json
from typing import Any

import pytest
import torch

from sottovoce.config import Suite, load_experiment, recipe_names
from sottovoce.training.smoke_runs import run_smoke
from sottovoce.training.stages import Surroundings, folder_of

LISTED = frozenset(recipe_names())


def without_numbers(settings: Any) -> Any:
    match settings:
        case dict():
            return {key: without_numbers(own) for key, own in settings.items() if key not in ("about", "paper")}
        case list():
            return [without_numbers(own) for own in settings]
        case int() | float() if not isinstance(settings, bool):
            return "a number"
    return settings


def standing_for_all() -> list[str]:
    """The first of each kind of recipe, and every suite."""
    kinds: dict[str, str] = {}
    for name in sorted(LISTED):
        experiment = load_experiment(name)
        is_suite = isinstance(experiment, Suite)
        kinds.setdefault(name if is_suite else json.dumps(without_numbers(experiment.model_dump(mode="json"))), name)
    return [*kinds.values()]


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Surroundings:
    """One store and one folder of runs for all recipes: what several start from is trained once."""
    pytest.importorskip("espeakng_loader", reason="the stand-in is synthetic speech")
    folder = tmp_path_factory.mktemp("smoke")
    return Surroundings(runs=folder / "runs", stores=folder / "stores", device=torch.device("cpu"))


def one_of_each_kind(suite: Suite) -> Suite:
    """One for each set of settings that runs change, whatever their seeds; of those that are recipes as they stand, and
    run here by themselves, one too."""
    kinds: dict[object, str] = {}
    for label, run in suite.runs.items():
        keys = frozenset(override.partition("=")[0] for override in run.overrides) - {"seed"}
        kinds.setdefault((keys, run.recipe if not keys and run.recipe not in LISTED else None), label)
    return suite.model_copy(update={"runs": {label: suite.runs[label] for label in kinds.values()}})


@pytest.mark.parametrize("name", standing_for_all())
def test_one_step_of_every_recipe_runs(name: str, around: Surroundings) -> None:
    experiment = load_experiment(name)
    if isinstance(experiment, Suite):
        experiment = one_of_each_kind(experiment)
    run_smoke(name, experiment, out=around.runs, around=around)
    runs = [f"{name}/{label}" for label in experiment.runs] if isinstance(experiment, Suite) else [name]
    for run in runs:
        results = json.loads((folder_of(run, around.runs) / "results.json").read_text())
        assert results["model"]["step"] == 1
