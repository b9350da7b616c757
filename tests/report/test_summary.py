"""Reports say what the run folders say, in the table, in the text and on the page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sottovoce.report.records import read_run
from sottovoce.report.run_facts import RUN_FACTS, has_converged
from sottovoce.report.summary import START, write_report

PRIVACY: dict[str, Any] = {
    "guarantee": "δ=1e-06 for each speaker against adding or removing one: poisson q=0.05, z=1 (simulated)",
    "covers": "ε covers this run alone",
    "epsilon_pld": 12.345,
    "epsilon_rdp": 15.678,
    "population_size": 240,
    "cohort_size": 12,
    "useful": {"population_size": 54_321, "cohort_size": 2_716, "epsilon_rdp": 7.9, "epsilon_pld": 6.6},
}


def scored(wer: float, interval: list[float] | None = None) -> dict[str, Any]:
    return {"test": {"wer": wer, "wer_interval": interval}}


def a_run(folder: Path, *, wer: float, start: float = 0.683, privacy: Mapping[str, Any] | None = PRIVACY) -> Path:
    """A run folder with what a report reads of it."""
    results: dict[str, Any] = {"test": scored(wer, [wer - 0.02, wer + 0.02])}
    if privacy is not None:
        results |= {"start": {"test": scored(start)}, "privacy": privacy}
        results["ended"] = {"step": 60, "reason": "finished"}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    records = [{"step": 0, "dev_wer": start}, {"step": 30, "lr": 1.0}, {"step": 60, "dev_wer": wer}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_run_and_its_start_are_in_all_three(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", wer=0.3456)
    summary = write_report({"demo": run}, run, title="A title")
    assert summary.rows == (
        (START, "test", "not shown", "68.3%", "", "not private", ""),
        ("demo", "test", "not shown", "34.6%", "32.6% to 36.6%", "12.35 / 15.68", "54,321 (cohort 2,716, ε = 7.9)"),
    )
    assert summary.path == run / "report.html"
    page, text = summary.path.read_text(), (run / "report.txt").read_text()
    for row in summary.rows:
        for cell in filter(None, row):
            assert cell in page, cell
            assert cell in text, cell
    for said in (page, text):
        assert "A title" in said
        assert "60 rounds, cohort 12 of 240" in flat(said)
        assert "Scale of ε: up to 1 strong, up to 8 moderate, up to 20 weak" in flat(said)


def test_populations_are_by_one_accountant_which_the_head_names(tmp_path: Path) -> None:
    by_pld = {"population_size": 50_000, "cohort_size": 2_500, "epsilon_pld": 8.0, "epsilon_rdp": 9.1}
    both = PRIVACY | {"useful": {**PRIVACY["useful"], "pld": by_pld}}
    new = write_report({"new": a_run(tmp_path / "new", wer=0.3, privacy=both)}, tmp_path, title="New")
    assert (new.headings[-1], new.rows[-1][-1]) == ("population for ε ≤ 8 (PLD)", "50,000 (cohort 2,500, ε = 8)")
    assert any("reaches ε ≤ 8 by PLD" in note for note in new.notes)
    # A run that was kept before has RDP alone, and so all of its table has.
    kept = a_run(tmp_path / "kept", wer=0.4)
    mixed = write_report({"new": tmp_path / "new", "kept": kept}, tmp_path, title="Both")
    assert mixed.headings[-1] == "population for ε ≤ 8 (RDP)"
    assert {row[-1] for row in mixed.rows[1:]} == {"54,321 (cohort 2,716, ε = 7.9)"}
    assert any("reaches ε ≤ 8 by RDP" in note for note in mixed.notes)
    free = PRIVACY | {"epsilon_pld": None, "epsilon_rdp": None, "guarantee": "no guarantee: no noise is added"}
    free.pop("useful")
    alone = write_report({"free": a_run(tmp_path / "free", wer=0.2, privacy=free)}, tmp_path, title="Free")
    assert alone.headings[-1] == new.headings[-1]


def test_a_suite_compares_runs_and_a_run_without_privacy_claims_none(tmp_path: Path) -> None:
    free = PRIVACY | {"epsilon_pld": None, "epsilon_rdp": None, "guarantee": "no guarantee: no noise is added"}
    free.pop("useful")
    beyond = PRIVACY | {"useful": {"target_epsilon": 8.0, "unreachable": "no population"}}
    folders = {
        "no-noise": a_run(tmp_path / "a", wer=0.2, privacy=free),
        "global": a_run(tmp_path / "b", wer=0.4),
        "per-layer": a_run(tmp_path / "c", wer=0.3, privacy=beyond),
    }
    summary = write_report(folders, tmp_path, title="All")
    assert [row[0] for row in summary.rows] == [START, "no-noise", "global", "per-layer"]
    assert [row[-2:] for row in summary.rows] == [
        ("not private", ""),
        ("not private", ""),
        ("12.35 / 15.68", "54,321 (cohort 2,716, ε = 7.9)"),
        ("12.35 / 15.68", "none"),
    ]


def test_runs_from_different_starts_have_no_common_start_in_the_table(tmp_path: Path) -> None:
    folders = {str(start): a_run(tmp_path / str(start), wer=0.2, start=start) for start in (0.5, 0.6)}
    assert [row[0] for row in write_report(folders, tmp_path, title="Two").rows] == ["0.5", "0.6"]


def test_a_central_run_has_no_columns_of_privacy(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", wer=0.25, privacy=None)
    summary = write_report({"seed": run}, run, title="Seed")
    assert summary.headings == ("", "test set", "converged", "WER", "95 % interval")
    assert summary.rows == (("seed", "test", "not shown", "25.0%", "23.0% to 27.0%"),)
    assert summary.notes == ()


@pytest.mark.parametrize(("after", "said"), [([0.25, 0.3, 0.3, 0.26], "yes"), ([0.3, 0.3, 0.3, 0.25], "no")])
def test_a_run_that_had_converged_says_so_and_so_does_its_start(tmp_path: Path, after: list[float], said: str) -> None:
    run = a_run(tmp_path / "run", wer=0.25)
    results = json.loads((run / "results.json").read_text()) | {"model": {"dev_wer": 0.25}}
    results["start"]["converged"] = "yes"
    (run / "results.json").write_text(json.dumps(results))
    records = [{"step": 12 * n, "dev_wer": wer} for n, wer in enumerate([0.9, 0.4, *after])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = write_report({"demo": run}, run, title="Ended")
    assert [row[summary.headings.index("converged")] for row in summary.rows] == ["yes", said]
    assert RUN_FACTS["converged"](read_run("demo", run)) == said
    (run / "metrics.jsonl").write_text('{"step": "x", "dev_wer": "y"}\n')
    assert has_converged(read_run("demo", run)) == "not shown", "whatever a folder holds"


def test_the_end_of_a_run_that_stopped_early_is_told(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", wer=0.3)
    results = json.loads((run / "results.json").read_text())
    results["ended"] = {"step": 7, "reason": "budget", "words": "the privacy budget is spent"}
    (run / "results.json").write_text(json.dumps(results))
    write_report({"demo": run}, run, title="Stopped")
    assert "7 rounds (the privacy budget is spent)" in flat((run / "report.txt").read_text())


def test_a_page_may_be_written_again(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", wer=0.3)
    first = write_report({"demo": run}, run, title="Again")
    assert write_report({"demo": run}, run, title="Again") == first
    with pytest.raises(FileNotFoundError):
        write_report({"demo": tmp_path / "nowhere"}, run, title="Nothing")


def test_how_well_clients_were_understood_is_in_the_notes_and_on_the_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", wer=0.3456)
    measured = [
        {"step": 30, "client_wer": None, "client_wer_interval": [0.0, 1.0], "client_words": 0.0},
        {"step": 60, "client_wer": 0.271, "client_wer_interval": [0.201, 0.352], "client_words": 4321.4},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in measured)
    results = json.loads((run / "results.json").read_text())
    results["client_wer"] = [
        {"step": one["step"], "wer": one["client_wer"], "wer_interval": one["client_wer_interval"], "words": 9.0}
        for one in measured
    ]
    (run / "results.json").write_text(json.dumps(results))
    summary = write_report({"demo": run}, run, title="A title")
    assert any(
        "WER of clients’ held-out speech 27.1% (20.1% to 35.2% with its noise) after round 60, the last of 2" in note
        for note in summary.notes
    )
    page = flat(summary.path.read_text())
    for cell in ("27.1 %", "20.1 %–35.2 %", "4,321"):
        assert cell in page, cell
