"""The report's section of personal parts: public and personal side by side, of simulations that have tried them."""

import json
from pathlib import Path
from typing import Any

from tests.report.conftest import MakeRun
from tests.report.test_page import names_of, reported, text_of

TITLE = "Who is understood, with the public model and with a part of one’s own"


def person(number: int) -> dict[str, Any]:
    public, personal = 4 + number % 2, 2
    return {
        "client": number,
        "groups": {"accent": "en-GB" if number % 2 else "en-US"},
        "words": 20,
        "utterances": number,
        "training": {"words": 40, "errors": number},
        "is_kept": True,
        "errors": {"public": public, "unguarded": personal, "personal": personal},
        "by_amount": [],
    }


def told(folder: Path) -> Path:
    people = [person(number) for number in range(1, 21)]
    (folder / "personal.json").write_text(json.dumps({"accounted": False, "per_client": people}))
    return folder


def test_both_are_side_by_side_with_the_worst_groups_gap(copied: MakeRun) -> None:
    text = text_of(reported([told(copied("quiet"))]))
    assert TITLE in text
    assert "quiet everybody 20 22.5 % 10.0 % -12.5" in text
    assert "quiet accent en-GB 10 25.0 % 10.0 %" in text
    assert "quiet worst tenth 2" in text
    assert "20 of 20" in text
    assert "quiet public accent en-GB 25.0 % 20.0 % +5.0" in text
    assert "quiet personal accent en-GB 10.0 % 10.0 %" in text


def test_without_them_there_is_no_such_section(copied: MakeRun) -> None:
    assert TITLE not in text_of(reported([copied("quiet")]))


def test_a_release_shows_none_whatever_is_in_its_folder(copied: MakeRun) -> None:
    folder = told(copied("release"))
    assert "personal" not in names_of(reported([folder]))
    assert TITLE not in text_of(reported([folder]))
