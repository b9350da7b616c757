"""What `sottovoce` exports: promises, so that they are few, there, told to type checkers, and written down."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from docs.write_api import PAGE, SECTIONS, page

import sottovoce

NAMES = sorted(set(sottovoce.__all__) - {"__version__"})


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(sottovoce, name).__doc__


def test_type_checkers_are_told_of_the_same_names_at_the_same_places() -> None:
    stub = ast.parse(Path(sottovoce.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(map(str, told)) == NAMES
    for name, (module, attribute) in told.items():
        assert module is not None
        assert getattr(importlib.import_module(module), attribute) is getattr(sottovoce, str(name))
    (listed,) = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(listed)) == sorted(sottovoce.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Stores'"):
        _ = sottovoce.Stores  # type: ignore[attr-defined]
    assert set(NAMES) <= set(dir(sottovoce))


def test_submodules_are_found_as_ever() -> None:
    from sottovoce.base import seeds

    assert seeds is importlib.import_module("sottovoce.base.seeds")


def test_importing_the_package_loads_nothing_else() -> None:
    """Not from here, where everything is loaded already."""
    told = "import sys; before = set(sys.modules); import sottovoce; print(*sorted(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert {name for name in found.split() if name.startswith(("sottovoce", "torch", "numpy"))} == {"sottovoce"}


def test_the_reference_has_every_name_once_and_is_current() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == NAMES
    assert PAGE.read_text(encoding="utf-8") == page(), "`make docs` writes it anew"
