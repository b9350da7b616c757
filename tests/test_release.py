"""What a release says of itself: one version, citations, bounds of dependencies, templates of issues."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import sottovoce

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def requirements(*extras: str) -> list[Requirement]:
    return [
        Requirement(line) for line in (*PROJECT["dependencies"], *(line for name in extras for line in EXTRAS[name]))
    ]


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {canonical(pinned): Version(version) for pinned, version in (line.split("==") for line in lines)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {PROJECT["version"], str(citation["version"]), sottovoce.__version__} == {PROJECT["version"]}
    images = [path.read_text(encoding="utf-8") for path in (ROOT / "deploy").glob("Dockerfile*")]
    assert {found for text in images for found in re.findall(r"sottovoce:(\d+\.\d+\.\d+)", text)} == {
        PROJECT["version"]
    }


def test_the_citation_names_us_and_the_three_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version"} <= {*citation}
    firsts = [(paper["authors"][0]["family-names"].lower(), paper["year"]) for paper in citation["references"]]
    recipes = ROOT / "src" / "sottovoce" / "recipes"
    assert {f"{name}{year}" for name, year in firsts} == {path.parent.name for path in recipes.glob("*/README.md")}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    lows = {
        canonical(one.name): Version(bound.version)
        for one in requirements("analysis", "demo", "whisper")
        for bound in one.specifier
        if bound.operator == ">="
    }
    assert pins("constraints-oldest.txt") == lows


def test_the_pinned_versions_are_within_the_bounds() -> None:
    pinned = pins("constraints.txt")
    for one in requirements(*EXTRAS):
        if canonical(one.name) in pinned:  # not what only a few need: scikit-learn
            assert pinned[canonical(one.name)] in one.specifier, one.name


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_asks_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert {"name", "description", "body"} <= {*form}
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    assert all(field["attributes"]["label"] for field in form["body"])
