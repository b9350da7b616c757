"""What every command shares: where it prints, how it shows progress, how it ends."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# No emoji: ":on:" in somebody's path or text is just that.
stdout = Console(emoji=False)
stderr = Console(stderr=True, emoji=False)

INTERRUPTED = 130  # the exit code of what somebody has told to stop, as shells have it for Ctrl-C
WIDEST = 250  # columns of a table that a terminal may wrap

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
    needed = Measurement.get(stdout, stdout.options.update(width=WIDEST), table).maximum
    Console(width=max(stdout.width, needed)).print(table)


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A progress bar on standard error; silent when that is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        progress.add_task(description, total=None, note="")
        yield progress
