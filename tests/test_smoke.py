"""Every recipe of the package fits together: one step of each kind runs on a small synthetic stand-in.

Tables and suites vary few settings many times. One run stands for all that are the same on the stand-in but for
numbers, their seeds included.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sottovoce.config import Recipe, Suite, load_experiment, load_recipe, recipe_names
from sottovoce.config.smoke import shrink_recipe
from sottovoce.report.records import read_run
from sottovoce.training.loop import ProgressReport
from sottovoce.training.parent_model import default_run_folder, resolve_parent_model
from sottovoce.training.run import run_smoke
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_folder import NO_EPSILON


def without_numbers(settings: Any) -> Any:
    match settings:
        case dict():
            return {key: without_numbers(own) for key, own in settings.items() if key not in ("about", "paper")}
        case list():
            return [without_numbers(own) for own in settings]
        case int() | float() if not isinstance(settings, bool):
            return "a number"
    return settings


def kind(recipe: Recipe) -> str:
    """What its smoke is, without numbers, and that of the seed it starts from and of the run whose tokens it takes."""
    model = recipe.central.start_from if recipe.central is not None else recipe.federated.seed_model
    needed = [
        None if name is None else kind_of_seed(name, recipe.people_seed) for name in (model, recipe.tokens.take_from)
    ]
    seed_model, tokens_from = [None if one is None else "a run" for one in needed]
    small = shrink_recipe(recipe, seed_model=seed_model, tokens_from=tokens_from)
    return json.dumps([without_numbers(small.model_dump(mode="json")), *needed])


@cache
def kind_of_seed(name: str, root_seed: int) -> str | None:
    """Once for all that start from it."""
    seed = resolve_parent_model(name, runs=Path("runs"), root_seed=root_seed)
    return None if seed.recipe is None else kind(seed.recipe)


def runs() -> Iterator[tuple[str, Recipe]]:
    """Recipes, then the runs of suites, but for repeats under another seed."""
    experiments = {name: load_experiment(name) for name in sorted(recipe_names())}
    suites = {name: found for name, found in experiments.items() if isinstance(found, Suite)}
    yield from ((name, found) for name, found in experiments.items() if not isinstance(found, Suite))
    for name, suite in suites.items():
        for label, run in suite.runs.items():
            if not any(override.startswith("seed=") for override in run.overrides):
                yield f"{name}/{label}", load_recipe(run.recipe, run.overrides)


def one_of_each_kind() -> dict[str, Recipe]:
    kinds: dict[str, tuple[str, Recipe]] = {}
    for name, recipe in runs():
        kinds.setdefault(kind(recipe), (name, recipe))
    return dict(kinds.values())


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """One store and one folder of runs for all recipes: what several start from is trained once."""
    pytest.importorskip("espeakng_loader", reason="the stand-in is synthetic speech")
    folder = tmp_path_factory.mktemp("smoke")
    return RunContext(runs=folder / "runs", stores=folder / "stores", device=torch.device("cpu"))


def assert_one_step(run: str, around: RunContext) -> None:
    results = json.loads((default_run_folder(run, around.runs) / "results.json").read_text())
    assert results["model"]["step"] == 1


def first_of_each_file() -> Iterator[Any]:
    """One of each kind; but for the first of a file they are long, all together."""
    files: set[str] = set()
    for name, recipe in one_of_each_kind().items():
        file = name.rpartition("/")[0] or name
        yield pytest.param(name, recipe, id=name, marks=[pytest.mark.long] if file in files else [])
        files.add(file)


@pytest.mark.parametrize(("name", "recipe"), [*first_of_each_file()])
def test_one_step_of_every_kind_of_recipe_runs(name: str, recipe: Recipe, around: RunContext) -> None:
    run_smoke(name, recipe, out=around.runs, context=around)
    assert_one_step(name, around)


def test_a_suite_runs_one_step_of_all_its_runs(around: RunContext) -> None:
    suite = load_experiment("demo")
    assert isinstance(suite, Suite)
    run_smoke("demo", suite, out=around.runs, context=around)
    for label in suite.runs:
        assert_one_step(f"demo/{label}", around)


@pytest.mark.parametrize(
    "changes",
    [
        ["federation.privacy.sigma_dp=3e-6"],
        ["federation.privacy.sigma_dp=null", "federation.privacy.target_epsilon=4"],
    ],
    ids=["noise", "target"],
)
def test_no_epsilon_is_told_that_is_not_the_recipes(changes: list[str], around: RunContext, tmp_path: Path) -> None:
    """People and noise of the stand-in promise something else than the recipe's."""
    recipe = load_recipe("benchmark/clipping/dim", ["federation.seed_model=null", *changes])
    said: list[str] = []
    reports: list[ProgressReport] = []
    heard = replace(around, say=said.append, on_report=reports.append)
    run_smoke("private", recipe, out=tmp_path / "runs", context=heard)
    assert NO_EPSILON in said
    assert not [line for line in said if "ε" in line or "δ" in line or "epsilon" in line]
    assert reports
    assert all(report.epsilon is None for report in reports)
    (kept,) = (tmp_path / "runs").iterdir()
    run = read_run("private", kept)
    assert run.guarantee is not None
    assert run.guarantee.words is None
    assert run.privacy["epsilon_rdp"] is None
