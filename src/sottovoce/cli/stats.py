"""`sottovoce stats`: how much speech there is and how it is spread over people."""

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import Json, print_json, say, stdout


def stats(
    store: Annotated[Path, typer.Argument(help="A store made by `sottovoce prepare`.")],
    plot: Annotated[
        Path | None, typer.Option(help="Draw minutes and utterances per speaker: FILE.png, .svg or .html.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read the whole store first: is it as `prepare` wrote it?")
    ] = False,
    json: Json = False,
) -> None:
    """Hours, speakers and minutes per speaker of a store, per split and in all.

    Example: sottovoce stats stores/crowd --plot crowd.html
    """
    from sottovoce.store import Store
    from sottovoce.users.statistics import statistics, table

    if plot is not None:
        from sottovoce.drawing import check_plot  # only here: matplotlib takes its time to load

        check_plot(plot)
    opened = Store(store)
    opened.check(audio=check)
    figures = statistics(opened)
    if json:
        print_json(figures)
    else:
        stdout.print(table(figures, title=f"{opened.name} ({opened.language})"))
    if plot is not None:
        from sottovoce.users.figure import draw

        draw(opened, plot)
        say(f"wrote {plot}")
