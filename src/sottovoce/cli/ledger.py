"""`sottovoce ledger`: what a run has spent, and whether its record is whole."""

import re
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
    from sottovoce.privacy.ledger_signature import SignatureCheck
    from sottovoce.privacy.promise import Promise
    from sottovoce.training.ledger_check import CheckedLedger

END_UNKNOWN = "alone it cannot show that its end is missing"


def ledger(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Folders of runs, or their ledger.jsonl; each may lie in an archive."),
    ],
    expect_head: Annotated[
        str | None, typer.Option(metavar="HASH", help="Refuse a ledger that never had this head, which you have kept.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC", help="Refuse what this key has not signed: its file, or its fingerprint."),
    ] = None,
    disjoint: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN,RUN…", help="Of several: declare that nobody is in two of these; it is quoted."),
    ] = None,
    json: Json = False,
) -> None:
    """Verify a run's ledger line by line and against all that its folder says of it; print what is spent and promised.

    Example: sottovoce ledger runs/demo/global

    Model, checkpoints, recipe and results are held against the digests that the ledger has of them. That all of it was
    not written anew since, only a head that you have kept (--expect-head) or a signature (--key) can show.

    Of several runs it states what they promise together to somebody who is in all of them. Whether somebody is, folders
    hardly ever show; unknown means shared.

    Of a run that was served with open sums it shows everybody's own account besides: in how many rounds they were.
    """
    from sottovoce.signatures import expected_fingerprint

    expected = None if key is None else expected_fingerprint(key)
    if len(runs) > 1:
        if expect_head is not None:
            raise InputError("--expect-head is about one run: expected no other")
        _several(runs, disjoint or [], expected_key=expected, json=json)
        return
    if disjoint:
        raise InputError("--disjoint is about several runs: expected more than one")
    from sottovoce.privacy.promise import figures, promise_of
    from sottovoce.reporting.archives import as_typed, open_path

    (run,) = runs
    try:
        found = _checked(run, expected_key=expected)
        _check_head(found.report, _ledger_of(run), expect_head)
    except InputError as error:
        problem = as_typed(str(error))
        if json:
            print_json({"path": str(_ledger_of(run)), "valid": False, "problem": problem})
        raise InputError(problem) from None
    place, path, report = open_path(run), _ledger_of(run), found.report
    accounts = _accounts(place, report)
    promise = promise_of(report)  # of a ledger that does not say how many steps were planned: what is spent
    if json:
        promised = {name: value for name, value in figures(promise, report).items() if name != "spent"}
        marks: dict[str, object] = {"agrees_with": found.consistent_files, "unreadable": found.unread}
        marks |= {"held": found.held, "notes": found.notes, "signature": found.signature.as_json()}
        print_json({**report.as_json(), "promised": promised, **marks, **({"accounts": accounts} if accounts else {})})
    else:
        table = report.table()
        table.add_row("promised", promise.words or "no guarantee")
        table.add_row("agrees with", escape(", ".join(found.consistent_files) or END_UNKNOWN))
        table.add_row("held", escape(", ".join(found.held) or "no file: the ledger has no digest of any that is here"))
        for note in found.notes:
            table.add_row("not held", escape(note))
        table.add_row("signature", found.signature.words)
        table.add_row("proves", _proved(found.signature, expect_head))
        stdout.print(table)
        say(f"head: {report.mark.head}", to=stdout)
        if accounts:
            stdout.print(_table(accounts))
    for file in found.unread:
        say(f"warning: {run / file} cannot be read: the ledger could not be held against it")
    if not found.consistent_files:
        advice = "the folder holds nothing else of the run" if place.is_dir() else "give the run folder"
        say(f"{path}: chain valid; {END_UNKNOWN}: {advice}")
    if report.torn_bytes:
        stderr.print(f"[yellow]warning:[/] {path}: the last line was never finished", highlight=False, soft_wrap=True)


def _check_head(report: "LedgerReport", path: Path, expected: str | None) -> None:
    """Refuse a ledger that has never had the head that somebody has kept."""
    if expected is None:
        return
    if not re.fullmatch(r"[0-9a-fA-F]{64}", expected):
        raise InputError(f"--expect-head {expected}: expected the 64 hexadecimal digits of a head, as printed here")
    if expected.lower() not in report.hashes:
        raise InputError(f"{path} never had the head {expected}: it was written anew, or is of another run")


def _proved(signature: "SignatureCheck", head: str | None) -> str:
    """What all this shows of a ledger, and what it cannot."""
    if signature.is_expected:
        return "that the key's owner has signed these lines; not that the noise was really added"
    if head is not None:
        return "that no line up to the head that you have kept was changed since; not that they were true then"
    return (
        "that lines and files fit together; not that nobody has written all of them anew: keep the head elsewhere "
        "(--expect-head), or have it signed (run --sign) and know the key (--key)"
    )


def _ledger_of(run: Path) -> Path:
    """Where the ledger of a run lies, as somebody would type it; `run` is its folder, or the ledger itself."""
    from sottovoce.reporting.archives import open_path
    from sottovoce.training.run_folder import LEDGER

    return run / LEDGER if open_path(run).is_dir() else run


def _checked(run: Path, *, expected_key: str | None) -> "CheckedLedger":
    """The ledger of a run, verified; raises InputError where it does not hold."""
    from sottovoce.files import named_inside
    from sottovoce.privacy.ledger import verify
    from sottovoce.privacy.ledger_signature import check_signature
    from sottovoce.reporting.archives import open_path
    from sottovoce.training.ledger_check import CheckedLedger, check_ledger
    from sottovoce.training.run_folder import LEDGER

    place, path = open_path(run), _ledger_of(run)
    if place.is_dir() and not (place / LEDGER).exists() and (inside := named_inside(place, LEDGER)):
        raise InputError(f"{path}: no ledger there, but runs that have one each: expected one of {inside}")
    if place.is_dir():
        found = check_ledger(place, expected_key=expected_key)
    else:
        alone = verify(place)
        signature = check_signature(alone, place, expected=expected_key)
        found = CheckedLedger(alone, consistent_files=(), unread=(), signature=signature)
    return replace(found, report=replace(found.report, path=path))


def _several(runs: list[Path], disjoint: list[str], *, expected_key: str | None, json: bool) -> None:
    """Each run's promise, and what they promise together. One that does not hold ends it with exit code 2."""
    from sottovoce.privacy.promise import figures, promise_of
    from sottovoce.reporting.archives import as_typed, open_path
    from sottovoce.reporting.joint import groups_of, together
    from sottovoce.reporting.records import labelled, read_ledger_alone, read_run
    from sottovoce.reporting.shared_people import Declared

    places = {path.resolve(): path for path in runs}
    if len(places) < len(runs):
        raise InputError("the same run is given twice: expected different ones")
    named = labelled(list(places.values()))
    declared = Declared.read(disjoint, list(named))
    told: dict[str, dict[str, Any]] = {}
    records, problems = [], []
    table = Table(title="What each promises")
    for heading in ("", "mode", "for each", "rounds", "ε promised (PLD / RDP)", "δ"):
        table.add_column(heading)
    for label, run in named.items():
        try:
            report = _checked(run, expected_key=expected_key).report
        except InputError as error:
            problems.append(as_typed(str(error)))
            told[label] = {"path": str(_ledger_of(run)), "valid": False, "problem": problems[-1]}
            table.add_row(escape(label), "NOT SOUND", "", "", "", "")
            continue
        place = open_path(run)
        record = read_run(label, place) if place.is_dir() else read_ledger_alone(label, report)
        records.append(record)
        promise = record.promise or promise_of(report)
        promised = {name: value for name, value in figures(promise, report).items() if name != "spent"}
        told[label] = {**report.as_json(), "promised": promised}
        table.add_row(escape(label), *map(escape, _row(promise, report)))
    lines = () if problems else together(records, declared)
    if json:
        joint = None if problems else [group.as_json() for group in groups_of(records, declared)]
        print_json({"runs": told, "together": list(lines), "joint": joint})
    else:
        stdout.print(table)
        for line in lines:
            say(line, to=stdout)
    if problems:
        raise InputError(f"{'; '.join(problems)}: what these runs promise together is not stated")


def _row(promise: "Promise", report: "LedgerReport") -> tuple[str, ...]:
    from sottovoce.privacy.promise import both

    rounds = f"{promise.made:,} of {promise.steps:,}"
    if promise.words is None:
        return str(report.header["mode"]), "nobody", rounds, "no guarantee", ""
    inside = promise.epsilon_inside
    told = both(promise.epsilon) if inside is None else f"{both(promise.epsilon)}; one inside {both(inside)}"
    return str(report.header["mode"]), promise.unit.short, rounds, told, f"{promise.delta:g}"


def _accounts(place: Path, report: "LedgerReport") -> dict[str, dict[str, Any]]:
    """Of those whose updates the server has seen one by one, where they were written down: with ε of each as a unit."""
    from sottovoce.deployment.accounts import find_accounts, read_accounts
    from sottovoce.privacy.events import GaussianRelease, event_from_json
    from sottovoce.privacy.secret_files import SECRETS

    path = find_accounts(place) if place.is_dir() else None
    if path is None:
        return {}
    if path.parent == place and report.header["mode"] == "secure":
        say(f"warning: {path} names people, and lies in a folder that may be published: move it into {place / SECRETS}")
    release, found = event_from_json(report.header["event"]), {}
    measurement: GaussianRelease | None = None
    if report.measured_attempts:
        asked = event_from_json(report.header["client_wer"]["event"])
        assert isinstance(asked, GaussianRelease)
        measurement = asked
    for name, account in read_accounts(path).items():
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
