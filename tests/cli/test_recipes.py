"""`sottovoce recipes show` and `keys`: every key that a recipe may have is described, on the page of the docs, too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.guides import DOCS

from sottovoce.config import Suite, load_experiment, recipe_names, validate_recipe
from sottovoce.config.keys import list_described_keys, list_sections, render_commented_recipe, render_keys_page

Command = Callable[..., Any]


def test_every_key_has_a_meaning_and_every_meaning_a_key() -> None:
    known = {(section.title, key.name) for section in list_sections() for key in section.keys}
    assert known == list_described_keys()
    assert all(key.meaning for section in list_sections() for key in section.keys)


def test_the_page_of_keys_is_current() -> None:
    assert (DOCS / "keys.md").read_text(encoding="utf-8") == render_keys_page(), (
        "`sottovoce recipes keys > docs/keys.md`"
    )


@pytest.mark.parametrize("family", ["ctc_transformer", "crdnn", "transducer", "cpc"])
def test_the_page_has_every_family(family: str) -> None:
    assert f"family: {family}`" in render_keys_page()


def test_a_recipe_that_is_shown_is_the_same_recipe() -> None:
    """The last of each file: what is written of it with all defaults reads back as it was."""
    some = {name.rpartition("/")[0]: name for name in recipe_names() if "/" in name}
    for name in some.values():
        recipe = load_experiment(name)
        if isinstance(recipe, Suite):
            continue
        assert validate_recipe(yaml.safe_load(render_commented_recipe(recipe)), where=name) == recipe


def test_show_prints_every_default_with_its_meaning(sottovoce: Command, tmp_path: Path) -> None:
    shown = sottovoce("recipes", "show", "demo-clipping/global", "federation.steps=7")
    assert shown.code == 0, shown.err
    lines = [line.strip() for line in shown.out.splitlines()]
    assert "steps: 7  # rounds (T)" in lines
    assert "clip_bound: 0.2  # the longest update of a client (C)" in lines
    assert any(
        line.startswith("patience: null  # ends after so many evaluations without a better model") for line in lines
    )
    assert all("# " in line for line in lines)
    (tmp_path / "mine.yaml").write_text(shown.out)
    again = sottovoce("recipes", "show", tmp_path / "mine.yaml", "--json")
    assert json.loads(again.out)["federation"]["steps"] == 7
    assert yaml.safe_load(shown.out) == json.loads(again.out)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["show"], "expected `recipes show NAME"),
        (["show", "demo"], "demo is a suite: expected one of its runs, demo/private, demo/no-noise"),
        (["show", "demo/privat"], "no recipe 'demo/privat', did you mean 'demo/private'?"),
        (["show", "demo-clipping/global", "--table", "1"], "expected `recipes show NAME"),
        (["keys", "demo"], "expected `recipes show NAME"),
    ],
)
def test_mistakes_are_one_line(asked: list[str], message: str, sottovoce: Command) -> None:
    ended = sottovoce("recipes", *asked)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_keys_are_there_for_machines(sottovoce: Command) -> None:
    found = json.loads(sottovoce("recipes", "keys", "--json").out)
    (privacy,) = [section for section in found if section["places"] == ["federation.privacy"]]
    (bound,) = [key for key in privacy["keys"] if key["name"] == "clip_bound"]
    assert bound == {
        "name": "clip_bound",
        "expected": "a number",
        "default": ".inf",
        "meaning": "the longest update of a client (C)",
    }
