"""Kept runs as `sottovoce run` shows them when they are over."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from findings.kept import Kept, each
from sottovoce.report.records import RunRecord
from sottovoce.report.summary import REPORT, summarise_runs

COLUMNS = 104


def shown(kept: Kept, runs: Sequence[str]) -> str:
    """The table of `runs` and that of their differences, the first being the one that others are compared with."""
    summary = summarise_runs([_alone(run) for run in each(kept.run, runs)], path=Path(REPORT))
    console = Console(file=io.StringIO(), width=COLUMNS, color_system=None)
    console.print(summary.for_terminal())
    if summary.differences is not None:
        console.print()
        console.print(replace(summary.differences, note="").for_terminal())
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(["```", *lines, "```"])


def _alone(run: RunRecord) -> RunRecord:
    """By its own name, without its suite's."""
    return replace(run, label=run.label.partition("/")[2])
