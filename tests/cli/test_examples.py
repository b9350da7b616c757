"""The examples that `--help` shows: commands that there are, of models and ledgers where a recipe leaves one."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from tests.test_deploy import parsed
from typer.main import get_command

from sottovoce.cli import app
from sottovoce.config import Suite, load_experiment, recipe_names

OF_SUITES_TOO = {"report"}


def examples(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Every command below `command`, with its example."""
    below = getattr(command, "commands", None)
    for name, one in (below or {}).items():
        yield from examples(one, *names, name)
    if not below:
        found = re.search(r"Example: sottovoce (.+)", command.help or "")
        yield names, found and found[1]


EXAMPLES = dict(examples(get_command(app)))


@pytest.mark.parametrize("names", EXAMPLES, ids=" ".join)
def test_each_command_has_an_example_that_it_understands(names: tuple[str, ...]) -> None:
    example = EXAMPLES[names]
    assert example is not None
    words = shlex.split(example)
    assert tuple(words[: len(names)]) == names
    parsed(words)


@pytest.mark.parametrize("names", [names for names in EXAMPLES if names[0] not in OF_SUITES_TOO], ids=" ".join)
def test_an_example_names_one_run_and_not_a_suite(names: tuple[str, ...]) -> None:
    named = [word.removeprefix("runs/") for word in str(EXAMPLES[names]).split() if word.startswith("runs/")]
    assert not any(isinstance(load_experiment(name), Suite) for name in named if name in recipe_names())
