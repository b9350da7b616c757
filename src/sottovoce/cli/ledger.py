"""`sottovoce ledger`: what a run has spent, and whether its record is whole."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json

if TYPE_CHECKING:
    from sottovoce.privacy.guarantee import Guarantee
    from sottovoce.privacy.ledger_report import LedgerReport, SignatureCheck
    from sottovoce.training.ledger_check import CheckedLedger

END_UNKNOWN = "alone it cannot show that its end is missing"


def ledger(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Folders of runs, or their ledger.jsonl; each may be in an archive."),
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
    """Verify a run's ledger line by line and against its whole folder; print ε spent and guaranteed.

    Example: sottovoce ledger runs/demo/private

    Model, checkpoints, recipe and results are compared with the digests that the ledger has of them. Only a head that
    you have kept (--expect-head) or a signature (--key) can show that not all of it was rewritten since.

    Of several runs it states the joint guarantee for somebody who is in all of them. Folders hardly ever show whether
    somebody is; unknown means shared.

    Of a run that was served with open sums it also shows, for each client, the number of rounds and ε.
    """
    from sottovoce.base.signatures import read_fingerprint

    expected = None if key is None else read_fingerprint(key)
    if len(runs) > 1:
        if expect_head is not None:
            raise InputError("--expect-head is about one run: expected no other")
        _print_several(runs, disjoint or [], expected_key=expected, json=json)
        return
    if disjoint:
        raise InputError("--disjoint is about several runs: expected more than one")
    from sottovoce.privacy.guarantee import guarantee_of, guarantee_to_json
    from sottovoce.report.archives import open_path, restore_archive_names

    (run,) = runs
    try:
        found = _verify(run, expected_key=expected)
        _check_head(found.report, _locate(run), expect_head)
    except InputError as error:
        problem = restore_archive_names(str(error))
        if json:
            print_json({"path": str(_locate(run)), "valid": False, "problem": problem})
        raise InputError(problem) from None
    place, path, report = open_path(run), _locate(run), found.report
    accounts = _read_accounts(place, report)
    guarantee = guarantee_of(report)  # of a ledger that does not say how many steps were planned: what is spent
    if json:
        promised = {name: value for name, value in guarantee_to_json(guarantee, report).items() if name != "spent"}
        checks: dict[str, object] = {"agrees_with": found.consistent_files, "unreadable": found.unread}
        checks |= {"held": found.held, "notes": found.notes, "signature": found.signature.as_json()}
        print_json({**report.as_json(), "promised": promised, **checks, **({"accounts": accounts} if accounts else {})})
    else:
        table = report.table()
        table.add_row("promised", guarantee.words or "no guarantee")
        table.add_row("agrees with", escape(", ".join(found.consistent_files) or END_UNKNOWN))
        table.add_row("held", escape(", ".join(found.held) or "no file: the ledger has no digest of any that is here"))
        for note in found.notes:
            table.add_row("not held", escape(note))
        table.add_row("signature", found.signature.words)
        table.add_row("proves", _format_proof(found.signature, expect_head))
        stdout.print(table)
        print_line(f"head: {report.mark.head}", to=stdout)
        if accounts:
            stdout.print(_tabulate_accounts(accounts))
    for file in found.unread:
        print_line(f"warning: {run / file} cannot be read: the ledger could not be held against it")
    if not found.consistent_files:
        advice = "the folder holds nothing else of the run" if place.is_dir() else "give the run folder"
        print_line(f"{path}: chain valid; {END_UNKNOWN}: {advice}")
    if report.torn_bytes:
        print_line(f"warning: {path}: the last line was never finished")


def _check_head(report: "LedgerReport", path: Path, expected: str | None) -> None:
    """Refuse a ledger that has never had the head that the user has kept."""
    if expected is None:
        return
    if not re.fullmatch(r"[0-9a-fA-F]{64}", expected):
        raise InputError(f"--expect-head {expected}: expected the 64 hexadecimal digits of a head, as printed here")
    if expected.lower() not in report.hashes:
        raise InputError(f"{path} never had the head {expected}: it was written anew, or is of another run")


def _format_proof(signature: "SignatureCheck", head: str | None) -> str:
    """What the checks prove of a ledger, and what they cannot."""
    if signature.is_expected:
        return "that the key's owner has signed these lines; not that the noise was really added"
    if head is not None:
        return "that no line up to the head that you have kept was changed since; not that they were true then"
    return (
        "that lines and files fit together; not that nobody has written all of them anew: keep the head elsewhere "
        "(--expect-head), or have it signed (run --sign) and know the key (--key)"
    )


def _locate(run: Path) -> Path:
    """The path of a run's ledger as a user would type it; `run` is its folder, or the ledger itself."""
    from sottovoce.report.archives import open_path
    from sottovoce.training.run_folder import LEDGER

    return run / LEDGER if open_path(run).is_dir() else run


def _verify(run: Path, *, expected_key: str | None) -> "CheckedLedger":
    """The ledger of a run, verified; raises InputError where it is not valid."""
    from sottovoce.base.files import list_folders_holding
    from sottovoce.privacy.ledger import verify
    from sottovoce.privacy.ledger_report import check_ledger_signature
    from sottovoce.report.archives import open_path
    from sottovoce.training.ledger_check import CheckedLedger, check_ledger
    from sottovoce.training.run_folder import LEDGER

    place, path = open_path(run), _locate(run)
    if place.is_dir() and not (place / LEDGER).exists() and (inside := list_folders_holding(place, LEDGER)):
        raise InputError(f"{path}: no ledger there, but runs that have one each: expected one of {inside}")
    if place.is_dir():
        found = check_ledger(place, expected_key=expected_key)
    else:
        alone = verify(place)
        signature = check_ledger_signature(alone, place, expected=expected_key)
        found = CheckedLedger(alone, consistent_files=(), unread=(), signature=signature)
    return replace(found, report=replace(found.report, path=path))


def _print_several(runs: list[Path], disjoint: list[str], *, expected_key: str | None, json: bool) -> None:
    """Each run's guarantee, and their joint one. A ledger that is not valid ends it with exit code 2."""
    from sottovoce.privacy.guarantee import guarantee_of, guarantee_to_json
    from sottovoce.report.archives import open_path, restore_archive_names
    from sottovoce.report.joint import Declared, joint_groups, joint_sentences
    from sottovoce.report.records import label_paths, read_ledger_alone, read_run

    places = {path.resolve(): path for path in runs}
    if len(places) < len(runs):
        raise InputError("the same run is given twice: expected different ones")
    named = label_paths(list(places.values()))
    declared = Declared.read(disjoint, list(named))
    shown: dict[str, dict[str, Any]] = {}
    records, problems = [], []
    table = Table(title="Guarantee of each run")
    for heading in ("", "mode", "for each", "rounds", "ε promised (PLD / RDP)", "δ"):
        table.add_column(heading)
    for label, run in named.items():
        try:
            report = _verify(run, expected_key=expected_key).report
        except InputError as error:
            problems.append(restore_archive_names(str(error)))
            shown[label] = {"path": str(_locate(run)), "valid": False, "problem": problems[-1]}
            table.add_row(escape(label), "NOT SOUND", "", "", "", "")
            continue
        place = open_path(run)
        record = read_run(label, place) if place.is_dir() else read_ledger_alone(label, report)
        records.append(record)
        guarantee = record.guarantee or guarantee_of(report)
        promised = {name: value for name, value in guarantee_to_json(guarantee, report).items() if name != "spent"}
        shown[label] = {**report.as_json(), "promised": promised}
        table.add_row(escape(label), *map(escape, _format_row(guarantee, report)))
    lines = () if problems else joint_sentences(records, declared)
    if json:
        joint = None if problems else [group.as_json() for group in joint_groups(records, declared)]
        print_json({"runs": shown, "together": list(lines), "joint": joint})
    else:
        stdout.print(table)
        for line in lines:
            print_line(line, to=stdout)
    if problems:
        raise InputError(f"{'; '.join(problems)}: their joint guarantee is not stated")


def _format_row(guarantee: "Guarantee", report: "LedgerReport") -> tuple[str, ...]:
    from sottovoce.privacy.guarantee import format_epsilons

    rounds = f"{guarantee.made:,} of {guarantee.steps:,}"
    if guarantee.words is None:
        return str(report.header["mode"]), "nobody", rounds, "no guarantee", ""
    inside = guarantee.epsilon_inside
    epsilon = (
        format_epsilons(guarantee.epsilon)
        if inside is None
        else f"{format_epsilons(guarantee.epsilon)}; one inside {format_epsilons(inside)}"
    )
    return str(report.header["mode"]), guarantee.unit.short, rounds, epsilon, f"{guarantee.delta:g}"


def _read_accounts(place: Path, report: "LedgerReport") -> dict[str, dict[str, Any]]:
    """Clients whose updates the server has seen one by one, where that was recorded: with the ε of each."""
    from sottovoce.network.server.accounts import find_accounts, read_accounts
    from sottovoce.privacy.events import GaussianRelease, event_from_json
    from sottovoce.privacy.secret_files import SECRETS

    path = find_accounts(place) if place.is_dir() else None
    if path is None:
        return {}
    if path.parent == place and report.header["mode"] == "secure":
        print_line(
            f"warning: {path} names people, and is in a folder that may be published: move it into {place / SECRETS}"
        )
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


def _tabulate_accounts(accounts: dict[str, dict[str, Any]]) -> Table:
    from sottovoce.privacy.guarantee import format_epsilon

    table = Table(title="Account of each client, against somebody who knows the rounds that they are in")
    for heading in ("client", "summed in", "clipped again", "missing", "ε (PLD)", "ε (RDP)"):
        table.add_column(heading)
    for name, one in accounts.items():
        missing = ", ".join(f"{count} {reason}" for reason, count in one["missing"].items())
        spent = ["none" if one[key] is None else format_epsilon(one[key]) for key in ("epsilon_pld", "epsilon_rdp")]
        table.add_row(escape(name), str(one["summed"]), str(one["clipped_again"]), escape(missing) or "never", *spent)
    return table
