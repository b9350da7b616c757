"""The report's chapter of clients before and after: of simulations that tell of them, and of nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import MakeRun
from tests.report.test_page import names_of, reported, text_of

BEFORE: dict[str, Any] = {
    "wer": 0.8,
    "mean": 0.8,
    "mean_without_above_100": 0.6,
    "share_above_50": 0.75,
    "share_above_100": 0.25,
    "spread": {"median": 0.7},
}
AFTER = BEFORE | {"mean": 0.55, "mean_without_above_100": 0.4, "share_above_100": 0.125, "spread": {"median": 0.45}}
CLIENTS: dict[str, Any] = {
    "accounted": False,
    "clients": 4,
    "before": BEFORE,
    "after": AFTER,
    "better": 3,
    "worse": 1,
    "by_seconds": [{"clients": 4, "seconds": [3.5, 1200.0], "before": 0.8, "after": 0.55}],
    "per_client": [
        {"seconds": 3.5, "words": 2, "before": 1.5, "after": 0.1},
        {"seconds": 9.0, "words": 5, "before": 0.2, "after": 0.3},
        {"seconds": 90.0, "words": 50, "before": 0.8, "after": 0.6},
        {"seconds": 1200.0, "words": 90, "before": 0.7, "after": 1.2},
    ],
}


def told(folder: Path, clients: dict[str, Any]) -> Path:
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(results | {"clients": clients}))
    return folder


def test_a_run_that_tells_of_its_clients_has_a_chapter_of_them(copied: MakeRun) -> None:
    report = reported([told(copied("quiet"), CLIENTS)])
    text = text_of(report)
    assert "Errors on the clients" in text
    assert "before 4 80.0 % 60.0 % 70.0 % 75.0 % 25.0 %" in text
    assert "quiet 4 55.0 % 40.0 % 45.0 % 75.0 % 12.5 % 75.0 %" in text
    assert "3.5–1,200 80.0 % 55.0 % -25.0" in text
    (drawing,) = [drawing for drawing in report.drawings if drawing.name == "client-results"]
    drawn = {line.get_label(): line.get_ydata() for line in drawing.draw().axes[0].lines}
    assert list(map(list, drawn.values())) == [[0.2, 0.7, 0.8, 1.5], [0.1, 0.3, 0.6, 1.2]]
    assert list(drawn) == ["before", "quiet"]
    assert {"client-results", "client-amounts"} <= {table.name for table in report.tables}


def test_runs_from_one_start_share_its_line(copied: MakeRun) -> None:
    report = reported([told(copied(name), CLIENTS) for name in ("quiet", "noisy")])
    (drawing,) = [drawing for drawing in report.drawings if drawing.name == "client-results"]
    assert [line.get_label() for line in drawing.draw().axes[0].lines] == ["before", "quiet", "noisy"]


@pytest.mark.parametrize("name", ["quiet", "release"])
def test_others_have_none(name: str, copied: MakeRun) -> None:
    """A release not even where somebody has put it there."""
    folder = copied(name)
    report = reported([told(folder, CLIENTS) if name == "release" else folder])
    assert "client-results" not in names_of(report)
    assert "Errors on the clients" not in text_of(report)


def test_clients_without_held_out_speech_leave_nothing_to_show(copied: MakeRun) -> None:
    assert "client-results" not in names_of(reported([told(copied("quiet"), {"accounted": False, "clients": 0})]))
