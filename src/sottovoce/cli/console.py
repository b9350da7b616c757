"""How commands print, show progress and exit."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, final

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

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it
WIDEST = 250  # columns of a table that a terminal may wrap
LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal


def print_json(content: Any) -> None:
    """One JSON document on standard output, and nothing else there."""
    json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_line(line: str, *, to: Console = stderr) -> None:
    """One line as it is: paths are neither broken at the edge of the screen nor read as markup."""
    to.print(line, markup=False, highlight=False, soft_wrap=True)


def exit_interrupted(message: str) -> NoReturn:
    """Print how to resume, and exit with the code of an interrupted command."""
    print_line(message)
    raise typer.Exit(INTERRUPTED)


def print_wide(table: Table) -> None:
    """As wide as its numbers need: a terminal may wrap a line, but a number must not be cut."""
    Console(width=max(stdout.width, _needed_width(table))).print(table)


def fits_terminal(table: Table) -> bool:
    """Whether a table is as wide as the terminal at most, with nothing in it wrapped."""
    return _needed_width(table) <= stdout.width


def _needed_width(table: Table) -> int:
    return Measurement.get(stdout, stdout.options.update(width=WIDEST), table).maximum


@final
class LoggedProgress(Progress):
    """A progress bar; where there is no terminal, a line now and then, so that a log shows how far it is."""

    _last_line: float | None = None

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_line(task_id)

    def _print_line(self, task_id: TaskID) -> None:
        if not self.disable:
            return
        now = self.get_time()
        if self._last_line is None:  # the first change starts the clock: what is soon done needs no line
            self._last_line = now
        task = next(task for task in self.tasks if task.id == task_id)
        if task.total is None or now - self._last_line < LINE_EVERY:
            return
        self._last_line = now
        note = f" ({task.fields['note']})" if task.fields["note"] else ""
        print_line(f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}{note}", to=self.console)


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
    with LoggedProgress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        progress.add_task(description, total=None, note="")
        yield progress


@contextmanager
def counting_bar(description: str, *, total: int, unit: str = "utterances") -> Iterator[Callable[[int], None]]:
    """A progress bar over `total` things; what it yields is called with the number that are done."""
    with progress_bar(description) as bar:
        (task,) = bar.task_ids
        bar.update(task, total=total, note=unit)
        yield lambda done: bar.update(task, completed=done)
