"""A suite's file with its runs written in it: what they share, what they are called, and mistakes as one clear line."""

from collections import Counter
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.config import Recipe, Suite, as_yaml, is_recipe, load_experiment, load_recipe, public_name, recipe_names
from sottovoce.config.loading import validate_recipe
from sottovoce.training.parent_model import default_run_folder, resolve_parent_model
from sottovoce.training.suites import plan_suite

TABLE = """
about: a table
paper: {source: somebody, place: Table 1}
extends: demo-clipping/no-noise
federation: {cohort_size: 7, privacy: {clip_bound: 0.5, share: dim}}
recipes:
  _louder: {extends: demo-clipping/global, federation: {steps: 5}}
  seed: {extends: demo-clipping/seed, about: its own seed, central: {steps: 9}}
runs:
  quiet: {about: no noise}
  # In place of what the others extend; what they share lies on top.
  loud:
    extends: HERE/_louder
    about: noise
    paper: {source: somebody, place: "Table 1, loud", wer: {test: 12.5}}
    federation: {steps: 6}
  small: {about: a cohort of its own, federation: {cohort_size: 3}}
  smaller: {extends: HERE/small, about: a run on top of another, federation: {steps: 4}}
"""


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE.replace("HERE", str(path)))
    return str(path)


def test_runs_lie_on_what_they_share_and_are_named_by_their_file(table: str) -> None:
    suite = load_experiment(table, ["seed=4"])
    assert isinstance(suite, Suite)
    assert {label: run.recipe for label, run in suite.runs.items()} == {
        label: f"{table}/{label}" for label in ("quiet", "loud", "small", "smaller")
    }
    runs = {label: load_recipe(run.recipe, run.overrides) for label, run in suite.runs.items()}
    found = {
        label: (run.seed, run.federated.cohort_size, run.federated.steps, run.federated.privacy.clip_bound)
        for label, run in runs.items()
    }
    assert found == {
        "quiet": (4, 7, 90, 0.5),
        "loud": (4, 7, 6, 0.5),
        "small": (4, 3, 90, 0.5),
        "smaller": (4, 3, 4, 0.5),
    }
    assert runs["loud"].federated.privacy.sigma_dp == load_recipe("demo-clipping/global").federated.privacy.sigma_dp
    assert runs["quiet"].federated.privacy.sigma_dp is None


def test_what_is_said_of_the_whole_is_not_said_of_its_runs(table: str) -> None:
    whole = load_experiment(table)
    assert (whole.about, whole.paper and whole.paper.place) == ("a table", "Table 1")
    assert load_recipe(f"{table}/quiet").paper is None
    loud = load_recipe(f"{table}/loud")
    assert loud.paper is not None
    assert (loud.about, loud.paper.wer) == ("noise", {"test": 12.5})


def test_recipes_beside_the_runs_share_nothing_with_them_and_are_run_by_name(table: str, tmp_path: Path) -> None:
    seed = load_recipe(f"{table}/seed")
    assert (seed.about, seed.training.steps, seed.federation) == ("its own seed", 9, None)
    assert (
        load_recipe(f"{table}/_louder").federated.cohort_size
        == load_recipe("demo-clipping/global").federated.cohort_size
    )
    found = resolve_parent_model(f"{table}/seed", runs=tmp_path / "runs", root_seed=1)
    assert found.recipe == seed
    assert found.folder == default_run_folder(f"{table}/seed", tmp_path / "runs")


def test_names_of_files_and_of_runs_in_them(table: str, tmp_path: Path) -> None:
    assert default_run_folder("mine/table.yaml/dim", tmp_path).name == "mine-table-dim"
    assert (
        default_run_folder("pelikan2025/table01/sigma-3e-6-dim", tmp_path).name == "pelikan2025-table01-sigma-3e-6-dim"
    )
    assert [public_name(name) for name in (table, f"{table}/loud", "demo-clipping/global")] == [
        *("table", "table/loud", "demo-clipping/global"),
    ]
    assert all(
        map(is_recipe, (table, f"{table}/loud", "demo", "demo-clipping/global", "pelikan2025/table01/sigma-3e-6-dim"))
    )
    assert not any(map(is_recipe, (f"{table}/lout", "demo/privat", "pelikan2025/_private", str(tmp_path), "runs/demo")))


def test_a_folder_beside_a_recipe_of_its_name_is_a_folder(table: str) -> None:
    """A run's folder often lies beside the file that it was made from."""
    assert not is_recipe(table.removesuffix(".yaml"))


def test_a_run_that_names_a_recipe_is_that_recipe_by_its_own_name_too() -> None:
    suite = load_experiment("benchmark/clipping")
    assert isinstance(suite, Suite)
    for label in ("dim", "dim-seed2"):
        run = suite.runs[label]
        assert load_recipe(f"benchmark/clipping/{label}") == load_recipe(run.recipe, run.overrides)


def test_no_name_is_that_of_two_recipes() -> None:
    assert [name for name, count in Counter(recipe_names()).items() if count > 1] == []


def test_a_run_of_a_suite_is_written_as_the_recipe_alone_would_be(table: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone.yaml"
    alone.write_text(as_yaml(load_recipe(f"{table}/loud")))
    assert as_yaml(load_recipe(str(alone))) == as_yaml(load_recipe(f"{table}/loud"))


@pytest.mark.parametrize(
    ("old", "new", "name", "message"),
    [
        ("", "", "/lout", "no recipe 'HERE/lout', did you mean 'HERE/loud'?"),
        ("steps: 6", "stepps: 6", "/loud", "recipe HERE/loud: unknown key 'federation.stepps', did you mean 'steps'?"),
        ("cohort_size: 7", "cohort_sizes: 7", "/quiet", "recipe HERE/quiet: unknown key 'federation.cohort_sizes'"),
        ("{about: no noise}", "3", "", "recipe HERE: runs.quiet: Input should be a valid dictionary"),
        ("{about: no noise}", "3", "/quiet", "recipe HERE/quiet: expected keys and values, found 3"),
        (
            "{about: no noise}",
            "{recipe: demo-clipping/global}",
            "",
            "'extends' is for all runs of the suite, and 'quiet' names",
        ),
        ("HERE/small", "HERE/smaller", "/smaller", "recipe HERE/smaller: it extends itself by way of HERE/smaller"),
        ("HERE/small", "[1]", "/smaller", "recipe HERE/smaller: extends=[1], expected the name of one recipe"),
        ("HERE/small", "HERE", "/smaller", "federation"),
        ("  seed:", "  loud:", "/loud", "recipe HERE/loud: 'loud' stands under recipes and under runs"),
        ("runs:", "rums:", "", "recipe HERE: 'about' beside recipes, expected a suite with runs, or recipes alone"),
        ("recipes:", "recipes: 3\nx:", "", "recipe HERE: recipes: expected names and what each is, found 3"),
        ("  quiet:", "  a/b:", "", "a run's label names its folder"),
    ],
)
def test_mistakes(table: str, old: str, new: str, name: str, message: str) -> None:
    text = Path(table).read_text()
    assert old.replace("HERE", table) in text
    Path(table).write_text(text.replace(old.replace("HERE", table), new.replace("HERE", table), 1))
    with pytest.raises(InputError) as caught:
        load_recipe(table + name)
    assert message.replace("HERE", table) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "run",
    [
        "{recipe: demo-clipping/global, about: mine}",
        "{recipe: [1]}",
        "{recipe: demo-clipping/global, overrides: seed=2}",
    ],
)
def test_a_run_that_names_a_recipe_says_nothing_else(tmp_path: Path, run: str) -> None:
    (tmp_path / "suite.yaml").write_text(f"about: x\nruns: {{one: {run}}}\n")
    with pytest.raises(InputError, match=r"expected recipe: NAME and overrides: \[key=value, …\], and nothing else"):
        load_recipe(f"{tmp_path}/suite.yaml/one")
    with pytest.raises(InputError):
        load_experiment(f"{tmp_path}/suite.yaml")


def test_a_file_of_recipes_is_run_as_each_of_them_by_its_own_name(tmp_path: Path) -> None:
    for name in ("pelikan2025/central", "gao2022/central", "ramesh2023/pretraining"):
        found = load_experiment(name)
        assert isinstance(found, Suite)
        assert [run.recipe for run in found.runs.values()] == [f"{name}/{label}" for label in found.runs]
        assert not [label for label in found.runs if label.startswith("_")]
        places = {label: place for label, (_, place) in plan_suite(name, found, out=tmp_path, runs=tmp_path).items()}
        assert places == {label: default_run_folder(f"{name}/{label}", tmp_path) for label in found.runs}


def test_a_file_of_what_others_extend_has_nothing_to_run() -> None:
    with pytest.raises(InputError, match="recipe gao2022: other recipes extend what is in this file; there is none"):
        load_experiment("gao2022")
    assert "gao2022" not in recipe_names()


def test_nothing_of_one_reading_is_left_in_the_next(table: str) -> None:
    """What was parsed once is kept; overrides must not reach it."""
    before = as_yaml(load_recipe(f"{table}/loud"))
    load_recipe(f"{table}/loud", ["federation.privacy.clip_bound=9", "federation.local.lr=0.7", "data.store=x"])
    assert as_yaml(load_recipe(f"{table}/loud")) == before
    assert isinstance(validate_recipe(load_recipe(f"{table}/loud").model_dump(mode="json"), where="again"), Recipe)
