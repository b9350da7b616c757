"""`sottovoce ledger`: what a run has spent, and whether its record is whole."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from sottovoce.cli.console import Json, print_json, say, stderr, stdout
from sottovoce.errors import InputError

END_UNKNOWN = "alone it cannot show that its end is missing"


def ledger(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its ledger.jsonl; either may lie in an archive.")],
    json: Json = False,
) -> None:
    """Verify a run's ledger line by line and against all that its folder says of it; print what is spent and promised.

    Example: sottovoce ledger runs/demo
    """
    from sottovoce.privacy.ledger import verify
    from sottovoce.privacy.promise import figures, promise_of
    from sottovoce.reporting.archives import as_typed, open_path
    from sottovoce.training.marks import CheckedLedger, check_ledger

    place = open_path(run)
    path = run / "ledger.jsonl" if place.is_dir() else run
    try:
        found = check_ledger(place) if place.is_dir() else CheckedLedger(verify(place), agreeing=(), unread=())
    except InputError as error:
        problem = as_typed(str(error))
        if json:
            print_json({"path": str(path), "valid": False, "problem": problem})
        raise InputError(problem) from None
    report = replace(found.report, path=path)
    promise = promise_of(report)  # of a ledger that does not say how many steps were planned: what is spent
    if json:
        promised = {name: value for name, value in figures(promise, report).items() if name != "spent"}
        marks = {"agrees_with": found.agreeing, "unreadable": found.unread}
        print_json({**report.as_json(), "promised": promised, **marks})
    else:
        table = report.table()
        table.add_row("promised", promise.words or "no guarantee")
        table.add_row("agrees with", escape(", ".join(found.agreeing) or END_UNKNOWN))
        stdout.print(table)
    for file in found.unread:
        say(f"warning: {run / file} cannot be read: the ledger could not be held against it")
    if not found.agreeing:
        advice = "the folder holds nothing else of the run" if place.is_dir() else "give the run folder"
        say(f"{path}: chain valid; {END_UNKNOWN}: {advice}")
    if report.torn_bytes:
        stderr.print(f"[yellow]warning:[/] {path}: the last line was never finished", highlight=False, soft_wrap=True)
