"""`sottovoce report`: what runs did, on one page."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import Json, print_json, say
from sottovoce.errors import InputError


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

    Reads run folders and nothing else. An unfinished run is shown as far as it has come. Where a ledger does not hold,
    the page says so before all else, and the command ends with exit code 2.
    """
    from sottovoce.reporting.archives import as_typed
    from sottovoce.reporting.page import write_figures, write_page, write_tables
    from sottovoce.reporting.records import find_runs, read_run
    from sottovoce.reporting.shared_people import Declared
    from sottovoce.reporting.statement import write_statement
    from sottovoce.reporting.summary import summarise

    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"out={out}: expected a file name that ends in .html")
    if not out.parent.is_dir():
        raise InputError(f"out={out}: the folder {out.parent} does not exist")
    folders = find_runs(runs)
    if statement is not None and len(folders) > 1:
        raise InputError(f"--statement is on one run: expected one of {', '.join(folders)}")
    records = [read_run(label, folder) for label, folder in folders.items()]
    summary = summarise(records, path=out, declared=Declared.read(disjoint or [], list(folders)))
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
                "runs": {label: as_typed(str(folder)) for label, folder in folders.items()},
                "verdicts": {one.label: one.as_json() for one in summary.verdicts},
                "together": list(summary.together),
                "written": list(map(str, written)),
                "not_sound": {record.label: record.unsound for record in records if record.unsound},
            }
        )
    else:
        for line in (summary.verdict, *summary.together):
            say(line)
        say(f"wrote {out}" + (f" and {len(written) - 1:,} files beside it" if written[1:] else ""))
    for alarm in made.alarms:
        say(f"error: NOT SOUND: {alarm}")
    if made.alarms:
        raise typer.Exit(2)
