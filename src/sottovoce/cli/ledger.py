"""`sottovoce ledger`: what a run has spent, and whether its record is whole."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sottovoce.cli.console import Json, print_json, say, stderr, stdout
from sottovoce.errors import InputError

if TYPE_CHECKING:
    from sottovoce.privacy.ledger_report import LedgerReport

END_UNKNOWN = "alone it cannot show that its end is missing"


def ledger(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its ledger.jsonl; either may lie in an archive.")],
    json: Json = False,
) -> None:
    """Verify a run's ledger line by line and against all that its folder says of it; print what is spent and promised.

    Example: sottovoce ledger runs/demo/global

    Of a run that was served with open sums it shows everybody's own account besides: in how many rounds they were.
    """
    from sottovoce.files import named_inside
    from sottovoce.privacy.ledger import verify
    from sottovoce.privacy.promise import figures, promise_of
    from sottovoce.reporting.archives import as_typed, open_path
    from sottovoce.training.marks import CheckedLedger, check_ledger
    from sottovoce.training.run_folder import LEDGER

    place = open_path(run)
    path = run / LEDGER if place.is_dir() else run
    try:
        if place.is_dir() and not (place / LEDGER).exists() and (inside := named_inside(place, LEDGER)):
            raise InputError(f"{path}: no ledger there, but runs that have one each: expected one of {inside}")
        found = check_ledger(place) if place.is_dir() else CheckedLedger(verify(place), agreeing=(), unread=())
    except InputError as error:
        problem = as_typed(str(error))
        if json:
            print_json({"path": str(path), "valid": False, "problem": problem})
        raise InputError(problem) from None
    report = replace(found.report, path=path)
    accounts = _accounts(place, report)
    promise = promise_of(report)  # of a ledger that does not say how many steps were planned: what is spent
    if json:
        promised = {name: value for name, value in figures(promise, report).items() if name != "spent"}
        marks = {"agrees_with": found.agreeing, "unreadable": found.unread}
        print_json({**report.as_json(), "promised": promised, **marks, **({"accounts": accounts} if accounts else {})})
    else:
        table = report.table()
        table.add_row("promised", promise.words or "no guarantee")
        table.add_row("agrees with", escape(", ".join(found.agreeing) or END_UNKNOWN))
        stdout.print(table)
        if accounts:
            stdout.print(_table(accounts))
    for file in found.unread:
        say(f"warning: {run / file} cannot be read: the ledger could not be held against it")
    if not found.agreeing:
        advice = "the folder holds nothing else of the run" if place.is_dir() else "give the run folder"
        say(f"{path}: chain valid; {END_UNKNOWN}: {advice}")
    if report.torn_bytes:
        stderr.print(f"[yellow]warning:[/] {path}: the last line was never finished", highlight=False, soft_wrap=True)


def _accounts(place: Path, report: "LedgerReport") -> dict[str, dict[str, Any]]:
    """Of those whose updates the server has seen one by one, where they were written down: with ε of each as a unit."""
    from sottovoce.deployment.accounts import ACCOUNTS, read_accounts
    from sottovoce.privacy.events import GaussianRelease, event_from_json

    if not place.is_dir() or not (place / ACCOUNTS).is_file():
        return {}
    release, found = event_from_json(report.header["event"]), {}
    measurement: GaussianRelease | None = None
    if report.measured_attempts:
        asked = event_from_json(report.header["client_wer"]["event"])
        assert isinstance(asked, GaussianRelease)
        measurement = asked
    for name, account in read_accounts(place / ACCOUNTS).items():
        spent = None
        if isinstance(release, GaussianRelease):
            spent = account.spent(
                release, delta=report.header["delta"], measurement=measurement, measured=report.measured_attempts
            )
        found[name] = {
            "summed": account.summed,
            "clipped_again": account.clipped_again,
            "missing": dict(account.missing),
            "epsilon_pld": None if spent is None else spent.pld,
            "epsilon_rdp": None if spent is None else spent.rdp,
        }
    return found


def _table(accounts: dict[str, dict[str, Any]]) -> Table:
    from sottovoce.privacy.promise import written_out

    table = Table(title="Everybody's own account, for who knows the rounds that they are in")
    for heading in ("client", "summed in", "clipped again", "missing", "ε (PLD)", "ε (RDP)"):
        table.add_column(heading)
    for name, one in accounts.items():
        missing = ", ".join(f"{count} {reason}" for reason, count in one["missing"].items())
        spent = ["none" if one[key] is None else written_out(one[key]) for key in ("epsilon_pld", "epsilon_rdp")]
        table.add_row(escape(name), str(one["summed"]), str(one["clipped_again"]), escape(missing) or "never", *spent)
    return table
