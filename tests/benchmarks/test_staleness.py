"""The table of what overlapping rounds cost is that of the kept numbers."""

import json

import staleness

KEPT = json.loads(staleness.KEPT.read_text())


def test_the_page_has_the_kept_numbers() -> None:
    page = staleness.PAGE.read_text()
    assert staleness.with_table(page, "staleness", staleness.table(KEPT)) == page


def test_all_runs_were_made_with_one_noise_on_the_same_speech() -> None:
    runs = KEPT["runs"]
    assert sorted((run["lr"], run["seed"], run["staleness"]) for run in runs) == sorted(staleness.WANTED)
    assert len({run["noise_multiplier"] for run in runs}) == 1
    assert all(len(run["errors"]) == len(KEPT["words"]) for run in runs)
    assert KEPT["changes"] == [*staleness.CHANGES]
