"""docs/deployment-faults.md is what it says: its tests exist, are run in so many ways, and are counted right."""

import ast
import importlib
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "deployment-faults.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`(?: ×(\d+))?")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if NAMED.search(line)]


def named(*columns: int) -> list[tuple[str, str, int]]:
    """File, test and ways of everything that these columns name; a test that shows two things is counted once."""
    found = [match for row in ROWS for column in columns for match in NAMED.findall(row[column])]
    return sorted({(file, test, int(ways or 1)) for file, test, ways in found})


def functions_of(file: str) -> set[str]:
    tree = ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted({file for file, _, _ in named(2, 3)}))
def test_every_test_exists(file: str) -> None:
    assert {test for where, test, _ in named(2, 3) if where == file} <= functions_of(file)


@pytest.mark.parametrize("file", sorted({file for file, _, _ in named(2, 3)}))
def test_it_is_run_in_so_many_ways(file: str) -> None:
    if "importorskip" in (HERE / f"{file}.py").read_text(encoding="utf-8"):
        pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")
    module = importlib.import_module(f"tests.network.{file}")
    said = {test: ways for where, test, ways in named(2, 3) if where == file}
    assert said == {test: ways_of(module, test) for test in said}


def ways_of(module: ModuleType, test: str) -> int:
    marks = getattr(getattr(module, test), "pytestmark", [])
    return math.prod(len(list(mark.args[1])) for mark in marks if mark.name == "parametrize")


def test_the_sums_are_right() -> None:
    items = sum(row[0].count(";") + 1 for row in ROWS)
    over_tls, here = (sum(ways for _, _, ways in named(column)) for column in (2, 3))
    assert f"**{items} things, {over_tls} ways over TLS, {here} in one process.**" in PAGE
