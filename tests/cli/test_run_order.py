"""What a run needs before it: the model that it starts from and the run whose tokens it takes, in order, each once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tones import pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import Suite, load_experiment, load_recipe
from sottovoce.data.text.tokens import load_tokens
from sottovoce.training.parent_model import list_ancestors, list_untrained_ancestors, resolve_parent_model
from sottovoce.training.preflight import list_stages
from sottovoce.training.run_folder import RESULTS
from sottovoce.training.suites import _parent_waves, plan_suite

# Recipes alone: the second starts from the first, the third takes its pieces from the second, the fourth both.
FILE = """
recipes:
  _base:
    data: {store: tones, seed_part: {fraction: 0.34}, part: seed}
    tokens: {kind: sentence_pieces, size: 9}
    model: {size: tiny, layers: 2, width: 32}
  _central:
    extends: HERE/_base
    central: {steps: 1, batch_seconds: 4, optimiser: {name: sgd}, schedule: {name: constant, lr: 0.1}}
  fourth:
    extends: HERE/_central
    about: from the third, in the words of the first
    tokens: {take_from: HERE/first}
    central: {start_from: HERE/third}
  second: {extends: HERE/_central, about: from the first, central: {start_from: HERE/first}}
  first: {extends: HERE/_central, about: from nothing}
  third:
    extends: HERE/_base
    about: federated from nothing, in the words of the second
    data: {part: federation}
    tokens: {take_from: HERE/second}
    federation:
      steps: 1
      cohort_size: 2
      local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
      server: {optimiser: {name: sgd}, schedule: {name: constant, lr: 1.0}}
      privacy: {sampling: fixed_size}
"""
# The same as a suite of its own.
SUITE = "about: a suite\n" + FILE.replace("  fourth:", "  _: {}\nruns:\n  fourth:")
ORDER = ["file-first", "file-second", "file-third"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store and the recipes, where commands are given."""
    pack_tones(tmp_path / "stores/tones", letters=(2, 3), utterances=2)
    (tmp_path / "file.yaml").write_text(FILE.replace("HERE", "file.yaml"))
    (tmp_path / "suite.yaml").write_text(SUITE.replace("HERE", "suite.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(recipe: str, *changes: str) -> list[str]:
    found = list_untrained_ancestors(load_recipe(recipe, changes), runs=Path("runs"))
    return [one.folder.name for one in found]


def test_models_and_tokens_are_needed_alike_each_once_in_order(here: Path) -> None:
    assert names("file.yaml/fourth") == ORDER
    assert names("file.yaml/third") == ORDER[:2]
    assert names("file.yaml/first") == []
    waves = _parent_waves([load_recipe(f"file.yaml/{name}") for name in ("second", "fourth")], Path("runs"))
    assert [[*wave] for wave in waves] == [
        ["seed model file-first"],
        ["tokens of file-second"],
        ["seed model file-third"],
    ]


def test_what_needs_itself_is_refused_in_one_line(here: Path) -> None:
    text = (here / "file.yaml").read_text()
    (here / "file.yaml").write_text(text.replace("from nothing}", "x, tokens: {take_from: file.yaml/second}}"))
    with pytest.raises(
        InputError, match=r"^tokens of file-second: it needs itself, by way of file-second, file-first$"
    ):
        names("file.yaml/third")


def test_overrides_reach_all_that_is_needed_and_each_takes_what_it_has(here: Path) -> None:
    asked = "parent_overrides=[data.longest_seconds=20, central.steps=7, federation.steps=8]"
    found = list_ancestors(load_recipe("file.yaml/fourth", [asked]), runs=Path("runs"))
    assert [one.recipe and one.recipe.data.longest_seconds for one in found] == [20, 20, 20]
    steps = [one.recipe.training.steps for one in found if one.recipe and one.recipe.central]
    assert steps == [7, 7]
    assert [one.recipe.federated.steps for one in found if one.recipe and one.recipe.federation] == [8]
    with pytest.raises(InputError, match="stores is a folder, not a recipe; expected none"):
        resolve_parent_model("stores", runs=here, root_seed=1, overrides=["central.steps=7"])


def test_a_run_that_others_need_is_not_made_in_another_way_in_its_folder(here: Path) -> None:
    def stages(*changes: str) -> list[str]:
        suite = load_experiment("file.yaml", changes)
        assert isinstance(suite, Suite)
        jobs = plan_suite("file.yaml", suite, out=Path("runs/file"), runs=Path("runs"))
        return [stage.folder.name for stage in list_stages(jobs, folder=Path("runs"))]

    assert stages() == [*ORDER, "file-fourth"]
    assert stages("data.longest_seconds=20", "parent_overrides=[data.longest_seconds=20]") == [*ORDER, "file-fourth"]
    with pytest.raises(InputError, match="second: others start from it as its recipe is, and it is different here"):
        stages("data.longest_seconds=20")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["file", "suite"])
@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.long)])
def test_one_command_runs_all_of_them_once_below_runs(
    name: str, at_once: int, here: Path, sottovoce: Callable[..., object]
) -> None:
    """From nothing but the store, whatever was asked for first; nothing is written or read elsewhere."""

    def go(*what: object) -> None:
        ended = sottovoce("run", *what, "--runs", "there/runs", "--yes")
        assert ended.code == 0, ended.err

    def made() -> dict[str, int]:
        found = Path("there/runs").rglob(RESULTS)
        return {path.parent.relative_to("there/runs").as_posix(): path.stat().st_mtime_ns for path in found}

    before = {*os.listdir(here)}
    go(f"{name}.yaml/second")
    first = made()
    assert {*first} == {f"{name}-first", f"{name}-second"}
    go(f"{name}.yaml", "--at-once", at_once)
    last = f"{name}-fourth" if name == "file" else f"{name}/fourth"
    assert {*made()} == {f"{name}-first", f"{name}-second", f"{name}-third", last}
    for place, when in first.items():
        assert made()[place] == when, place
    assert Path(f"there/runs/{name}/report.html").is_file()
    again = made()
    go(f"{name}.yaml", "--at-once", at_once)
    go(f"{name}.yaml/third")
    assert made() == again
    assert {*os.listdir(here)} - before == {"there"}
    assert [*os.listdir("there")] == ["runs"]


def lay_out_common_voice(source: Path, out: Path) -> None:
    """Recordings of one table as a release of Common Voice has them, with speakers enough for ten silos.

    Two speakers keep their ten clips each and are the warm-up; of two others each clip is somebody's own.
    """
    shutil.copytree(source / "clips", out / "clips")
    head, *rows = (source / "train.tsv").read_text(encoding="utf-8").splitlines()
    clips: dict[str, list[str]] = {}
    for row in rows:
        clips.setdefault(row.partition("\t")[0], []).append(row)
    many, few = ([own for own in clips.values() if len(own) == count] for count in (10, 9))
    (least,) = (own for own in clips.values() if len(own) == 2)
    alone = [f"{number:02}{row[2:]}" for number, row in enumerate((*few[0], *few[1]))]
    for split, own in {"train": [*many[0], *many[1], *alone], "dev": many[2][:4], "test": least}.items():
        (out / f"{split}.tsv").write_text("\n".join([head, *own, ""]), encoding="utf-8")


SMALL = ["model.size=tiny", "federation.steps=1", "federation.cohort_size=2", "federation.local.local_epochs=1"]
SMALL_WARM_UP = "parent_overrides=[model.size=tiny, tokens.size=60, central.epochs=1]"


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_the_readmes_first_suite_of_gao_runs_from_a_store_of_real_speech(
    real_speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sottovoce: Callable[..., object]
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out_common_voice(real_speech / "commonvoice-fr-mini/cv-corpus-6.1/fr", tmp_path / "cv/fr")
    prepared = sottovoce("prepare", "commonvoice", "cv/fr", "--spelling", "gao2022", "--out", "stores/commonvoice6-fr")
    assert prepared.code == 0, prepared.err
    ended = sottovoce("run", "gao2022/table1-fr", *SMALL, SMALL_WARM_UP)
    assert ended.code == 0, ended.err
    suite = load_experiment("gao2022/table1-fr")
    assert isinstance(suite, Suite)
    pieces = load_tokens(tmp_path / "runs/gao2022-central-fr-warm-up/model/tokens.json")
    for label in suite.runs:
        assert load_tokens(tmp_path / f"runs/gao2022-table1-fr/{label}/model/tokens.json") == pieces, label
    assert {*os.listdir("runs")} == {"gao2022-central-fr-warm-up", "gao2022-table1-fr"}
