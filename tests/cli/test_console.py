"""How commands show that they go on, and how tables stand in narrow terminals."""

import io
import itertools
import os
from pathlib import Path

import pytest
from rich.console import Console
from tests.report.test_summary import PRIVACY, a_run

from sottovoce.cli import console, finished, main
from sottovoce.cli.console import LINE_EVERY, LoggedProgress
from sottovoce.report.summary import write_report


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_line_comes_at_a_steady_pace() -> None:
    heard, clock = io.StringIO(), Clock()
    with LoggedProgress(console=Console(file=heard, width=20), disable=True, get_time=clock) as bar:
        task = bar.add_task("demo-clipping/global", total=None, note="")
        for step in range(1, 101):  # one takes seven seconds
            clock.now += 7
            bar.update(task, completed=step, total=100, note=f"loss {step:.1f}, [dev] 5.0 %")
    lines = heard.getvalue().splitlines()
    assert lines[:2] == [
        "demo-clipping/global: 6 of 100 (loss 6.0, [dev] 5.0 %)",
        "demo-clipping/global: 11 of 100 (loss 11.0, [dev] 5.0 %)",
    ]
    # The first step begins it; then a line comes with the first one that is half a minute later.
    assert len(lines) == 99 // -(-LINE_EVERY // 7)


def test_what_is_soon_done_or_has_no_end_needs_no_line_and_a_terminal_has_its_bar() -> None:
    heard, clock = io.StringIO(), Clock()
    with LoggedProgress(console=Console(file=heard), disable=True, get_time=clock) as bar:
        task = bar.add_task("x", total=None, note="")
        clock.now += 10 * LINE_EVERY
        bar.update(task, note="speakers prepared")
        clock.now += 10 * LINE_EVERY
        bar.update(task, note="speakers prepared")
        bar.update(task, total=3)
        clock.now += LINE_EVERY / 2
        bar.advance(task)
    assert heard.getvalue() == "x: 0 of 3 (speakers prepared)\n"
    seen = io.StringIO()
    with LoggedProgress(console=Console(file=seen), disable=False, auto_refresh=False, get_time=clock) as bar:
        task = bar.add_task("x", total=3, note="")
        for _ in range(3):
            clock.now += 10 * LINE_EVERY
            bar.advance(task)
    assert "of 3" not in seen.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_is_whole_at_80_columns(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    useful = {"population_size": 1_234_567, "cohort_size": 54_321, "epsilon_rdp": 7.9}
    spent = PRIVACY | {"useful": useful, "epsilon_pld": 120_600.0, "epsilon_rdp": 436_800.0}
    folders = {label: a_run(tmp_path / label, wer=0.4, privacy=spent) for label in ("no-noise", "per-layer")}
    report = write_report(folders, tmp_path, title="All")
    monkeypatch.setattr(console, "stdout", Console(width=width))
    monkeypatch.setattr(finished, "stdout", console.stdout)
    finished.print_results(report)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("per-layer")]
    assert max(map(len, lines)) <= width
    for cell in ("40.0%", "38.0% to 42.0%", "120,600 / 436,800", "1,234,567"):
        assert cell in row
    assert ("cohort 54,321" in row) == (width == 200)
    # The page and the text have all of it at any width.
    assert "1,234,567 (cohort 54,321, ε = 7.9)" in (tmp_path / "report.txt").read_text()


def test_paragraphs_of_help_fill_a_terminal_of_any_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Docstrings are broken at 120 columns; printed as they are, every second line of a narrower one was short."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["sottovoce", "run", "--help"])
    with pytest.raises(SystemExit):
        main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("All that it needs is checked first"))
    for line, following in itertools.takewhile(lambda pair: pair[1], itertools.pairwise(lines[first:])):
        assert len(line) + len(following.split()[0]) + 1 > 76, f"{line!r} has room for {following.split()[0]!r}"


@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads it when it is loaded, which no command does before it has begun."""
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("sys.argv", ["sottovoce", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["OMP_WAIT_POLICY"] == used
