"""To import a module is to run it: nothing is imported because a model's or a run's folder names it."""

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.tones import pack_tones

import sottovoce as package
from sottovoce.base import importing
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.family import find_family
from sottovoce.models.model_files import CONFIG
from sottovoce.models.recogniser import create_recogniser, load_recogniser, save_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings
from sottovoce.training.parent_model import resolve_parent_model

Command = Callable[..., Any]
SOURCE = Path(package.__file__).parent
TOKENS = CharacterTokens("abc ")

MODULE = """
from dataclasses import dataclass, replace
from pathlib import Path
from sottovoce.models.transformer import FAMILY as OURS
Path({mark!r}).touch()
@dataclass(frozen=True, kw_only=True)
class Options(OURS.Options):
    family: str = "{name}:FAMILY"
FAMILY = replace(OURS, name="{name}:FAMILY", Options=Options)
"""


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "tones"
    pack_tones(store)
    return store


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A family from outside, and the file that is there once its module has been run; each test has its own."""
    name = f"outside_{abs(hash(request.node.nodeid))}"
    mark = tmp_path / "was-run"
    (tmp_path / f"{name}.py").write_text(MODULE.format(mark=str(mark), name=name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importing, "_named", set())
    return f"{name}:FAMILY", mark


@pytest.fixture
def folder(tmp_path: Path, outside: tuple[str, Path]) -> Path:
    """A model whose folder says that it is of that family."""
    place = tmp_path / "model"
    place.mkdir()
    settings = Settings(layers=1, width=16, heads=2, tokens=TOKENS.size + 1)
    save_recogniser(
        create_recogniser(FAMILY, settings, TOKENS, language="en", generator=torch_stream(1, "init")), place
    )
    _change(place / CONFIG, architecture=outside[0])
    return place


def _change(path: Path, **changes: Any) -> None:
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("command", ["transcribe", "evaluate", "export", "probe"])
def test_a_models_folder_has_nothing_imported(
    sottovoce: Command, tones: Path, folder: Path, outside: tuple[str, Path], tmp_path: Path, command: str
) -> None:
    more = {
        "transcribe": (folder / CONFIG,),
        "evaluate": ("--on", tones),
        "export": ("--out", tmp_path / "out"),
        "probe": ("--on", tones),
    }
    ended = sottovoce(command, folder, *more[command])
    assert ended.code == 2
    assert f"--family {outside[0]}, if you trust it" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not outside[1].exists()


def test_the_user_may_name_it(sottovoce: Command, folder: Path, outside: tuple[str, Path], tmp_path: Path) -> None:
    ended = sottovoce("export", folder, "--out", tmp_path / "out", "--family", outside[0])
    assert (ended.code, outside[1].exists()) == (0, True), ended.err
    assert load_recogniser(folder).family.name == outside[0]  # named before, by the user


def test_the_folder_must_be_of_the_family_that_the_user_names(folder: Path, outside: tuple[str, Path]) -> None:
    with pytest.raises(InputError, match="expected crdnn"):
        load_recogniser(folder, family="crdnn")
    assert not outside[1].exists()
    _change(folder / CONFIG, architecture="ctc_transformer")
    with pytest.raises(InputError, match=f"a model of family='ctc_transformer', expected {outside[0]}"):
        load_recogniser(folder, family=outside[0])


@pytest.mark.parametrize(
    "key",
    [
        "model.family={}",
        "federation.server.optimiser={{name: '{}'}}",
        "federation.local.optimiser={{name: '{}'}}",
        "federation.server.schedule={{name: '{}'}}",
        "federation.privacy.clip_rule={{name: '{}'}}",
        "federation.privacy.weights={{name: '{}'}}",
        "federation.privacy.sampler={{name: '{}'}}",
    ],
)
def test_showing_a_recipe_imports_nothing(sottovoce: Command, outside: tuple[str, Path], key: str) -> None:
    ended = sottovoce("recipes", "show", "demo-clipping/global", key.format(outside[0]))
    assert ended.code == 2
    assert "`recipes show` imports nothing" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not outside[1].exists()


@pytest.mark.parametrize("section", ["model", "optimiser"])
def test_the_folder_of_a_seed_model_has_nothing_imported(
    tmp_path: Path, folder: Path, outside: tuple[str, Path], section: str
) -> None:
    """Neither what its recipe names, nor what the recipe names that it started from."""
    config = yaml.safe_load(_shown())
    if section == "model":
        config["model"] = {"family": outside[0]}
    else:
        config["federation"]["server"]["optimiser"] = {"name": outside[0]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match="name the seed's recipe in place of its folder"):
        resolve_parent_model(str(folder), runs=tmp_path, root_seed=1)
    assert not outside[1].exists()


def _shown() -> str:
    from sottovoce.config import as_yaml, load_recipe

    return as_yaml(load_recipe("demo-clipping/global"))


def test_a_report_imports_nothing(sottovoce: Command, outside: tuple[str, Path], tmp_path: Path, undrawn: None) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = yaml.safe_load(_shown())
    config["model"] = {"family": outside[0]}
    config["federation"]["server"]["optimiser"] = {"name": outside[0]}
    config["federation"]["privacy"]["clip_rule"] = {"name": outside[0]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    norms = {"blocks.00.attention.weight": 0.5, "gru.weight_hh_l0": 0.25}
    lines = [{"step": step, "loss": 2.0, "update_norm": 1.0, "layer_norms": norms, "lr": 0.1} for step in (1, 2)]
    for file in ("metrics.jsonl", "diagnostics.jsonl"):
        (run / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = sottovoce("report", run, "--out", tmp_path / "report.html")
    assert ended.code == 0, ended.err
    assert not outside[1].exists()


def test_a_module_of_ones_own_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, line in (("outside_raises", "1 / 0"), ("outside_exits", "raise SystemExit('over')")):
        (tmp_path / f"{name}.py").write_text(f"\n{line}\n")
        with pytest.raises(InputError, match=f"cannot be imported .*{name}.py:2"):
            find_family(f"{name}:FAMILY")
        assert name not in sys.modules


# By a name that is not written in the source itself, modules are imported in one place.
BY_CONSTANTS = {
    "__init__.py",
    "dp/__init__.py",
    "flat/kernels.py",
    "models/family.py",
    "cli/prepare.py",
    "data/corpora/synthetic/espeak.py",
}


def test_modules_are_imported_by_name_in_one_place() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(node, "id", None) or getattr(node, "attr", None)
            if called in {"import_module", "__import__", "exec", "eval", "run_module", "run_path"} and not (
                called == "eval" and isinstance(node, ast.Attribute)  # a torch module's
            ):
                found.add(path.relative_to(SOURCE).as_posix())
    assert found == {"base/importing.py", *BY_CONSTANTS}
