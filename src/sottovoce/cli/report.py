"""`sottovoce report`: the results and the privacy of runs, on one page."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line
from sottovoce.cli.options import Json


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, or of suites with runs inside, or archives.")
    ],
    out: Annotated[Path, typer.Option(help="The page: one HTML file that fetches nothing.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every figure as PNG and SVG, too.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every table as CSV, too.")] = None,
    statement: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a statement for a data-protection officer, too; of one run."),
    ] = None,
    disjoint: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN,RUN…", help="Declare that nobody is in two of these runs; the report quotes it."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="What the page is called.")] = None,
    json: Json = False,
) -> None:
    """One page about one run, or several compared: a verdict first, then errors, privacy, layers, speakers, speed.

    Example: sottovoce report runs/demo --out report.html --csv tables

    Reads run folders and nothing else. An unfinished run is shown as far as it has come. Where a ledger is not valid,
    or the folder does not match it, the page says so before all else, and the command ends with exit code 2; so it
    does where a file cannot be read. No statement is written then.
    """
    from sottovoce.report.archives import restore_archive_names
    from sottovoce.report.joint import Declared
    from sottovoce.report.page import write_figures, write_page, write_tables
    from sottovoce.report.parts import merge_labels
    from sottovoce.report.records import find_runs, read_run
    from sottovoce.report.statement import write_statement
    from sottovoce.report.summary import summarise_runs

    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"out={out}: expected a file name that ends in .html")
    if not out.parent.is_dir():
        raise InputError(f"out={out}: the folder {out.parent} does not exist")
    if statement is not None and statement.resolve() == out.resolve():
        raise InputError(f"--statement {statement} and --out are one file: expected two, or one would be lost")
    folders = find_runs(runs)
    if statement is not None and any(_is_of_run(statement, folder) for folder in folders.values()):
        raise InputError(f"--statement {statement} is a file of the run itself: expected the name of another")
    if statement is not None and len(folders) > 1:
        raise InputError(f"--statement is on one run: expected one of {', '.join(folders)}")
    records = [read_run(label, folder) for label, folder in folders.items()]
    summary = summarise_runs(records, path=out, declared=Declared.read(disjoint or [], list(folders)))
    name = title or (str(records[0].config.get("about") or records[0].label) if len(records) == 1 else "Runs compared")
    made = summary.report(records, title=name)
    written = [out]
    write_page(out, made)
    if figures is not None:
        written += write_figures(figures, made)
    if csv is not None:
        written += write_tables(csv, made)
    if statement is not None:
        write_statement(statement, records[0], summary.verdicts[0])
        written.append(statement)
    if json:
        print_json(
            {
                "runs": {label: restore_archive_names(str(folder)) for label, folder in folders.items()},
                "verdicts": {one.label: one.as_json() for one in summary.verdicts},
                "together": list(summary.together),
                "written": list(map(str, written)),
                "not_sound": {record.label: record.unsound for record in records if record.unsound},
                "unreadable": {record.label: record.problems for record in records if record.problems},
                "signatures": {r.label: r.ledger.signature.as_json() for r in records if r.ledger and r.ledger.report},
                "not_held": {r.label: r.ledger.notes for r in records if r.ledger and r.ledger.notes},
            }
        )
    else:
        for line in (summary.verdict, *summary.together):
            print_line(line)
        print_line(f"wrote {out}" + (f" and {len(written) - 1:,} files beside it" if written[1:] else ""))
        sound = [(r.label, r.ledger.signature.words) for r in records if r.ledger and r.ledger.report]
        for labels, words in merge_labels(sound):
            print_line(f"{labels}: ledger {words}")
    for alarm in made.alarms:
        print_line(f"error: NOT SOUND: {alarm}")
    damaged = [f"{record.label}: {problem}" for record in records for problem in record.damaged]
    for problem in damaged:
        print_line(f"error: DAMAGED: {problem}")
    if made.alarms or damaged:
        raise typer.Exit(2)


def _is_of_run(path: Path, folder: Path) -> bool:
    """Whether `path` is one of the files that a run has written."""
    from sottovoce.training.run_folder import CHECKPOINTS, FILES, MODEL

    place, run = path.resolve(), folder.resolve()
    within = place.relative_to(run).parts if place.is_relative_to(run) else ()
    return bool(within) and (within[0] in (CHECKPOINTS, MODEL) or (len(within) == 1 and within[0] in FILES))
