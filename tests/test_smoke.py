"""Every recipe of the package fits together: one step of each runs on a small synthetic stand-in."""

import json

import pytest
import torch

from sottovoce.config import Suite, load_experiment, recipe_names
from sottovoce.training.smoking import run_smoke
from sottovoce.training.stages import Surroundings, folder_of


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Surroundings:
    """One store and one folder of runs for all recipes: what several start from is trained once."""
    pytest.importorskip("espeakng_loader", reason="the stand-in is synthetic speech")
    folder = tmp_path_factory.mktemp("smoke")
    return Surroundings(runs=folder / "runs", stores=folder / "stores", device=torch.device("cpu"))


@pytest.mark.parametrize("name", recipe_names())
def test_one_step_of_every_recipe_runs(name: str, around: Surroundings) -> None:
    experiment = load_experiment(name)
    run_smoke(name, experiment, out=around.runs, around=around)
    runs = [f"{name}/{label}" for label in experiment.runs] if isinstance(experiment, Suite) else [name]
    for run in runs:
        results = json.loads((folder_of(run, around.runs) / "results.json").read_text())
        assert results["model"]["step"] == 1
