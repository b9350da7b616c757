"""Noise × clipping as the paper prints it: which runs make a table, and what stands in its cells."""

from pathlib import Path
from typing import Any

import pytest

from sottovoce.base.tables import NOTHING
from sottovoce.report.paper_comparison import noise_tables, paper_tables
from sottovoce.report.records import RunRecord
from sottovoce.report.summary import summarise_runs

# 100 clients, 10 of them a round: σ_DP = z / 10.
LARGER = {"population_size": 1000, "cohort_size": 100, "central_steps": 30, "noise_multiplier": 1.0}


def run(
    label: str, share: str, wer: float, *, sigma: float = 0.0, seed: int = 1, clip: float = 0.01, **more: Any
) -> RunRecord:
    private = {"share": share, "sigma_dp": sigma or None, "clip_bound": clip, "delta": 1e-9}
    config = {
        "about": label,
        "seed": seed,
        "paper": more.get("paper"),
        "data": {"store": more.get("store", "crowd")},
        "federation": {"steps": 30, "cohort_size": 10, "server": {"lr": 0.1 if sigma else 0.2}, "privacy": private},
    }
    privacy = {
        "epsilon_rdp": 12.0 if sigma else None,
        "epsilon_pld": 11.0 if sigma else None,
        "delta": 1e-9,
        "steps": 30,
        "promised_steps": 30,
        "population_size": 100,
        "cohort_size": 10,
        "noise_multiplier": 10 * sigma,
        "sigma_dp": sigma,
        "guarantee": "",
        "covers": "",
        "extrapolated": [{**LARGER, "epsilon_rdp": 1.5, "epsilon_pld": 1.25}] if sigma else None,
    }

    def tests(**rates: float) -> dict[str, Any]:
        return {name: {"wer": rate, "wer_interval": None} for name, rate in rates.items()}

    results = {
        "test": tests(dev=0.9, test=wer),
        "start": {"test": tests(dev=0.95, test=0.5)},
        "privacy": privacy,
        "ended": {"step": 30},
    }
    return RunRecord(label, Path(label), config, {}, {}, {}, results, (), (), None, ())


def paper(wer: float) -> dict[str, Any]:
    return {"source": "S", "place": "Table 1", "wer": {"test": wer}}


RUNS = [
    run("quiet", "global", 0.20, paper=paper(18.9)),
    run("loose", "global", 0.19, clip=1.0),
    run("global", "global", 0.32, sigma=0.1, paper=paper(31.1)),
    run("dim", "dim", 0.23, sigma=0.1, paper=paper(20.4)),
    run("dim-seed2", "dim", 0.25, sigma=0.1, seed=2, paper=paper(20.4)),
    run("loud", "dim", 0.30, sigma=0.3),
]


def test_a_row_has_a_noise_and_a_bound_and_a_column_a_way_of_clipping() -> None:
    (table,) = noise_tables(RUNS)
    assert table.headings == (
        *("σ_DP", "C", "S", "K", "q", "T", "z", "ε RDP", "ε PLD"),
        *("global", "global, paper", "dim", "dim, paper"),
    )
    here, larger = ("10", "100", "0.1", "30"), ("100", "1,000", "0.1", "30", "1", "1.5", "1.25", "", "", "", "")
    assert table.rows == (
        ("–", "–", "0", "100", "–", "–", "–", "0", "0", "50.0", "–", "50.0", "–"),
        ("0.3", "0.01", *here, "3", "12", "11", "–", "–", "30.0", "–"),
        ("0.3", "0.01", *larger),
        ("0.1", "0.01", *here, "1", "12", "11", "32.0", "31.1", "24.0 (23.0–25.0)", "20.4"),
        ("0.1", "0.01", *larger),
        ("0", "0.01", *here, "–", "∞", "∞", "20.0", "18.9", "–", "–"),
        ("0", "1", *here, "–", "∞", "∞", "19.0", "–", "–", "–"),
    )
    assert "WER on test" in table.title
    assert "2 seeds" in table.note


@pytest.mark.parametrize(
    "runs",
    [
        RUNS[:1],
        [run("a", "global", 0.3, sigma=0.1), run("b", "dim", 0.2, sigma=0.1)],  # one noise
        [run("a", "dim", 0.3, sigma=0.1), run("b", "dim", 0.2)],  # one way of clipping
        [run("a", "dim", 0.3, sigma=0.1), run("b", "global", 0.2, store="other")],  # other people
    ],
)
def test_runs_that_do_not_differ_in_both_alone_make_none(runs: list[RunRecord]) -> None:
    assert noise_tables(runs) == []


def test_the_short_report_of_a_suite_has_the_papers_numbers_and_that_of_one_run_has_not() -> None:
    assert [table.name for table in summarise_runs(RUNS, path=Path("report.html")).tables] == ["noise"]
    apart = [run("a", "dim", 0.3, sigma=0.1, paper=paper(20.0)), run("b", "dim", 0.2, paper=paper(10.0))]
    (beside,) = summarise_runs(apart, path=Path("report.html")).tables
    assert [row[-2:] for row in beside.rows] == [("20.0 %", "30.0 %"), ("10.0 %", "20.0 %")]
    assert summarise_runs(RUNS[:1], path=Path("report.html")).tables == ()


def test_relative_improvements_stand_beside_the_papers() -> None:
    """Ours are computed from the runs of the report: 100 · (0.5 − 0.4) / 0.5 = 20 % on the test set."""
    scratch = run("scratch", "dim", 0.5, paper=paper(42.73) | {"place": "none"})
    gain = {"place": "better", "werr": {"test": 19.018, "other": 7.1}, "against": "none"}
    better = run("better", "dim", 0.4, paper=paper(34.6) | gain)
    table = next(table for table in paper_tables([scratch, better]) if table.name == "paper-werr")
    assert table.rows == (
        ("better", "better", "test", "none", "19.02 %", "20.00 %"),
        ("better", "better", "other", "none", "7.10 %", NOTHING),
    )
    assert table in summarise_runs([scratch, better], path=Path("report.html")).tables
    other_seed = run("scratch-seed2", "dim", 0.5, seed=2, paper=paper(42.73) | {"place": "none"})
    alone = next(table for table in paper_tables([other_seed, better]) if table.name == "paper-werr")
    assert alone.rows[0][-1] == NOTHING, "repeats are compared with the same seed"
    assert "paper-werr" not in [table.name for table in paper_tables([scratch])]
