"""What every command shares: where it prints, how it shows progress, how it ends."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, final

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# No emoji: ":on:" in somebody's path or text is just that.
stdout = Console(emoji=False)
stderr = Console(stderr=True, emoji=False)

INTERRUPTED = 130  # the exit code of what somebody has told to stop, as shells have it for Ctrl-C
WIDEST = 250  # columns of a table that a terminal may wrap
LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines instead of tables.")]


def print_json(content: Any) -> None:
    """One JSON document on standard output, and nothing else there."""
    json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def say(line: str, *, to: Console = stderr) -> None:
    """One line just as it is: paths are neither broken at the edge of the screen nor read as markup."""
    to.print(line, markup=False, highlight=False, soft_wrap=True)


def end_interrupted(words: str) -> NoReturn:
    """Say how what was interrupted goes on, and end with the exit code that scripts know such an end by."""
    say(words)
    raise typer.Exit(INTERRUPTED)


def print_wide(table: Table) -> None:
    """As wide as its numbers need: a terminal may wrap a line, but half a number tells nothing."""
    Console(width=max(stdout.width, _needed(table))).print(table)


def fits(table: Table) -> bool:
    """Whether a table is as wide as the terminal at most, with nothing in it wrapped."""
    return _needed(table) <= stdout.width


def _needed(table: Table) -> int:
    return Measurement.get(stdout, stdout.options.update(width=WIDEST), table).maximum


@final
class Told(Progress):
    """A progress bar; where there is no terminal, a line now and then, so that a log shows how far it is."""

    _told_at: float | None = None

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        if not self.disable:
            return
        now = self.get_time()
        if self._told_at is None:  # the first change begins it: what is soon done needs no line
            self._told_at = now
        task = next(task for task in self.tasks if task.id == task_id)
        if task.total is None or now - self._told_at < LINE_EVERY:
            return
        self._told_at = now
        done = f"{task.completed:,.0f} of {task.total:,.0f}"
        say(
            f"{task.description}: {done}" + (f" ({task.fields['note']})" if task.fields["note"] else ""),
            to=self.console,
        )


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A progress bar on standard error; a line now and then where that is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Told(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        progress.add_task(description, total=None, note="")
        yield progress
