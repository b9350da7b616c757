"""Which runs are told apart: in the text, on the page and among its tables, and of a release only what it has said."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import MakeRun

from sottovoce.report.records import RunRecord, read_run
from sottovoce.report.summary import START, Summary, summarise_runs, write_report


def records(folder: Path, *names: str) -> list[RunRecord]:
    return [read_run(name, folder / name) for name in names]


def summary_of(*runs: RunRecord) -> Summary:
    return summarise_runs(runs, path=Path("report.html"))


def spoil(folder: Path, change: dict[str, Any]) -> None:
    """Other numbers in what a run says of its test."""
    content = json.loads((folder / "results.json").read_text())
    content["test"]["test"] |= change
    (folder / "results.json").write_text(json.dumps(content))


def test_runs_are_compared_with_the_first_and_so_is_their_start(runs: Path) -> None:
    found = summary_of(*records(runs, "noisy", "quiet")).differences
    assert found is not None
    assert found.title == "Difference from noisy, paired by speaker (test)"
    assert found.headings == ("", "points of WER", "95 % interval", "better / worse / same")
    assert [row[0] for row in found.rows] == [START, "quiet"]
    assert "WER less that of noisy" in found.note
    other = summary_of(*records(runs, "quiet", "noisy")).differences
    assert other is not None
    assert [row[0] for row in other.rows] == [START, "noisy"]


def test_a_run_alone_is_compared_with_its_start(runs: Path) -> None:
    found = summary_of(*records(runs, "quiet")).differences
    assert found is not None
    assert found.title == f"Difference from {START}, paired by speaker (test)"
    (row,) = found.rows
    results = json.loads((runs / "quiet/results.json").read_text())
    gained = results["test"]["test"]["wer"] - results["start"]["test"]["test"]["wer"]
    assert float(row[1]) == pytest.approx(100 * gained, abs=0.05)
    assert sum(map(int, row[3].split(" / "))) == results["test"]["test"]["speakers"]
    assert summary_of(*records(runs, "central")).differences is None, "it started from nothing"


def test_a_release_was_compared_with_its_start_before_names_went_and_with_nothing_else(runs: Path) -> None:
    test = json.loads((runs / "release/results.json").read_text())["test"]["test"]
    assert test["less_start"].keys() == {"difference", "difference_interval"}
    assert "speech" not in test
    alone = summary_of(*records(runs, "release")).differences
    assert alone is not None
    assert alone.rows[0][-1] == "–"
    assert float(alone.rows[0][1]) == pytest.approx(100 * test["less_start"]["difference"], abs=0.05)
    beside = summary_of(*records(runs, "quiet", "noisy", "release")).differences
    assert beside is not None
    assert [row[0] for row in beside.rows][-1] == "noisy"
    assert "Not compared: release (there is no count of words by speaker" in beside.note
    assert summary_of(*records(runs, "release", "quiet")).differences is None


def test_runs_on_other_people_are_named_and_not_compared(runs: Path, copied: MakeRun) -> None:
    other = copied("quiet")
    people = json.loads((other / "results.json").read_text())["test"]["test"]["per_speaker"]
    spoil(other, {"per_speaker": [{**person, "speaker": f"other {person['speaker']}"} for person in people]})
    found = summary_of(*records(runs, "noisy", "central"), read_run("elsewhere", other)).differences
    assert found is not None
    assert "central" in [row[0] for row in found.rows]
    assert "elsewhere" not in [row[0] for row in found.rows]
    assert "Not compared: elsewhere (they were tested on other speakers" in found.note


@pytest.mark.usefixtures("undrawn")
def test_it_is_on_the_page_in_the_text_and_among_the_tables(runs: Path, tmp_path: Path) -> None:
    folders = {name: runs / name for name in ("noisy", "quiet")}
    summary = write_report(folders, tmp_path, title="Two")
    assert summary.differences is not None
    report = summary.report(records(runs, "noisy", "quiet"), title="Two")
    assert "paired" in [table.name for table in report.tables]
    for said in ((tmp_path / "report.html").read_text(), (tmp_path / "report.txt").read_text()):
        assert "Difference from noisy, paired by speaker" in said
        assert summary.differences.rows[-1][-1] in said
