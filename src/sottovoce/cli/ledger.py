"""`sottovoce ledger`: what a run has spent, and whether its record is whole."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import Json, print_json, stderr, stdout
from sottovoce.errors import InputError


def ledger(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its ledger.jsonl.")],
    json: Json = False,
) -> None:
    """Verify a run's ledger line by line, and print what it has spent.

    Example: sottovoce ledger runs/demo
    """
    from sottovoce.privacy.ledger import verify

    path = run / "ledger.jsonl" if run.is_dir() else run
    try:
        report = verify(path)
    except InputError as problem:
        if json:
            print_json({"path": str(path), "valid": False, "problem": str(problem)})
        raise
    if json:
        print_json(report.as_json())
    else:
        stdout.print(report.table())
    if report.torn_bytes:
        stderr.print(f"[yellow]warning:[/] {path}: the last line was never finished", highlight=False, soft_wrap=True)
