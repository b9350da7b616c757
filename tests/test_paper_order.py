"""Every suite of the three papers runs whole from its stores and nothing else, in the right order."""

import json
from pathlib import Path

import pytest
import torch

import sottovoce
from sottovoce.config import Recipe, Suite, load_experiment
from sottovoce.training.parent_model import ParentModel, list_ancestors, list_parents
from sottovoce.training.preflight import find_missing_stores, list_stages
from sottovoce.training.run import run_smoke
from sottovoce.training.run_context import RunContext
from sottovoce.training.suites import plan_suite

RECIPES = Path(sottovoce.__file__).parent / "recipes"
PAPERS = ("pelikan2025", "gao2022", "ramesh2023")
SUITES = sorted(
    path.relative_to(RECIPES).with_suffix("").as_posix()
    for paper in PAPERS
    for path in (RECIPES / paper).glob("*.yaml")
)
READ_FIRST = "gao2022/table1-fr"  # the first command of its README


def jobs(name: str, runs: Path) -> dict[str, tuple[Recipe, Path]]:
    suite = load_experiment(name)
    assert isinstance(suite, Suite)
    return plan_suite(name, suite, out=runs / name.replace("/", "-"), runs=runs)


def test_all_files_are_suites_of_the_papers() -> None:
    assert len(SUITES) >= 37
    assert READ_FIRST in SUITES


@pytest.mark.parametrize("name", SUITES)
def test_all_that_a_suite_needs_is_a_recipe_or_a_store_and_comes_first(name: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    wanted = jobs(name, runs)
    for label, (recipe, place) in wanted.items():
        assert recipe.tokens.file is None, label  # nobody has made it
        assert place.is_relative_to(runs), label
        done: list[Path] = []
        for one in list_ancestors(recipe, runs=runs):
            assert one.recipe is not None, label
            assert one.is_own, label
            assert one.folder.is_relative_to(runs), label
            assert {parent.folder for parent in list_parents(one.recipe, runs=runs)} <= {*done}, label
            done.append(one.folder)
        assert {parent.folder for parent in list_parents(recipe, runs=runs)} <= {*done}, label
    stages = list_stages(wanted, folder=runs)
    assert len({stage.folder for stage in stages}) == len(stages)
    assert {place for _, place in wanted.values()} <= {stage.folder for stage in stages}
    missing = find_missing_stores(stages, tmp_path / "stores")
    assert missing
    assert not [command for command in missing.values() if "CORPUS" in command]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == READ_FIRST else pytest.mark.long) for name in SUITES]
)
def test_the_run_that_needs_most_runs_from_an_empty_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of it and of all that it needs; of the README's first suite one that takes another run's pieces."""
    pytest.importorskip("espeakng_loader", reason="the stand-in is synthetic speech")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"

    def count_parents(recipe: Recipe) -> tuple[int, bool]:
        return len(list_ancestors(recipe, runs=out)), recipe.tokens.take_from is not None

    label, (recipe, _) = max(jobs(name, out).items(), key=lambda job: count_parents(job[1][0]))
    context = RunContext(runs=tmp_path / "unused", stores=Path("stores"), device=torch.device("cpu"))
    run_smoke(f"{name}/{label}", recipe, out=out, context=context)
    expected = {one.folder.name for one in list_ancestors(recipe, runs=out)} | {f"{name}/{label}".replace("/", "-")}
    assert {path.parent.name for path in out.glob("*/results.json")} == expected
    for folder in expected:
        assert json.loads((out / folder / "results.json").read_text())["model"]["step"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stores"}
    if name == READ_FIRST:
        source = out / "gao2022-central-fr-warm-up"
        small = ParentModel(out / expected.difference({source.name}).pop(), None)
        assert small.load().tokens == ParentModel(source, None).load().tokens
