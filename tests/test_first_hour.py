"""The page of a newcomer's first hour: its recipes load, its commands exist, its names are the guides'."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.guides import DOCS, blocks
from typer.main import get_command

from sottovoce.cli import app
from sottovoce.config import load_recipe

PAGE = DOCS / "first-hour.md"
RECIPES = {block.file: block.content for block in blocks(PAGE, "yaml")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What its reader has: the files of the page, and those of the two guides that it names."""
    for page in (DOCS / "guides/your-own-corpus.md", DOCS / "guides/your-own-model.md", PAGE):
        for block in blocks(page, "python", "yaml"):
            (tmp_path / block.file).write_text(block.content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gru_ctc", raising=False)
    return tmp_path


def test_its_recipes_are_found() -> None:
    assert list(RECIPES) == ["few-people.yaml", "served.yaml", "gru-seed.yaml", "gru.yaml"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("folder")
def test_its_recipes_load(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.data.store == "mine"
    if name == "few-people.yaml":
        assert recipe.federated.privacy.target_epsilon == 8


def test_its_models_are_those_of_their_seeds(folder: Path) -> None:
    for name in ("served.yaml", "gru.yaml"):
        recipe = load_recipe(name)
        assert recipe.federated.seed_model is not None
        assert recipe.model == load_recipe(Path(recipe.federated.seed_model).name).model


def test_its_commands_exist() -> None:
    lines = [line for block in blocks(PAGE, "bash") for line in block.content.splitlines()]
    assert len(lines) >= 20
    for line in lines:
        words = shlex.split(line.removeprefix("python -m "))
        assert words.pop(0) == "sottovoce", line
        command: Any = get_command(app)
        while below := getattr(command, "commands", None):
            command = below[words.pop(0)]
        command.make_parser(command.context_class(command)).parse_args(words)
