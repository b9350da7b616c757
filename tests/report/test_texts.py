"""The words of a report (`templates/texts.yaml`): all of them are used, and no line of it is too long."""

import re
from importlib.resources import files
from pathlib import Path

import yaml

import sottovoce.report

TEXTS = files("sottovoce").joinpath("templates/texts.yaml").read_text(encoding="utf-8")
SOURCE = "".join(path.read_text() for path in Path(sottovoce.report.__path__[0]).glob("*.py"))


def test_every_section_figure_and_table_is_one_of_a_report() -> None:
    found = yaml.safe_load(TEXTS)
    assert found.keys() == {"sections", "figures", "tables", "screen"}
    sentences = found.pop("screen")
    assert [name for part in found.values() for name in part if f'"{name}"' not in SOURCE] == []
    assert all("title" in text for part in found.values() for text in part.values())
    assert max(map(len, TEXTS.splitlines())) <= 120
    # Some names are put together: of a kind of verdict, of a simulation, of an answer in short.
    plain = {name.removeprefix("badge-").removeprefix("simulated-").removesuffix("-short") for name in sentences}
    assert [name for name in plain if not re.search(rf"[\"'}}]{name.replace('-', '[- ]')}[-\"']", SOURCE)] == []
