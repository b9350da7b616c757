"""The guide to loops of one's own: as short as it says, and what it trains is of use."""

import runpy
from pathlib import Path

import pytest
from tests.guides import DOCS, blocks

from sottovoce import dp

GUIDE = DOCS / "guides" / "dp-in-your-own-loop.md"


def programs() -> dict[str, str]:
    return {block.file: block.content for block in blocks(GUIDE, "python")}


def test_the_private_part_of_a_loop_is_ten_lines() -> None:
    _, _, private = programs()["own_loop.py"].partition("\nplanned = ")
    assert len([line for line in private.partition("\nprint")[0].splitlines() if line]) == 10


def test_a_model_that_is_not_speech_takes_less_than_eighty_lines() -> None:
    assert len(programs()["digits.py"].splitlines()) < 80


def test_digits_are_learned_privately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="the extra analysis is not installed")
    monkeypatch.chdir(tmp_path)
    Path("digits.py").write_text(programs()["digits.py"], encoding="utf-8")
    found = runpy.run_path("digits.py", run_name="__main__")
    assert found["accuracy"](found["model"]) > 0.6  # 85 to 88 % in a few runs, and 10 % by guessing
    stated = dp.state_run("runs/digits")
    assert (stated.kind, stated.guarantee.made) == ("release", 60)
    assert stated.epsilon <= 8
    assert stated.guarantee.epsilon == found["planned"].epsilon
    assert found["audit"].verdict == "consistent"
