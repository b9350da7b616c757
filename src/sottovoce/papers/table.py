"""Heterogeneity as a table for the terminal and the page. It prints what `as_json` has and computes nothing."""

from typing import Any

from rich.console import Group as Lines
from rich.text import Text

from sottovoce.papers.signals import MEASURES
from sottovoce.tables import plain_table

HEADINGS = ("measure", "store", "mean", "std of means", "kurtosis", "mean of stds", "std of stds")


def table(figures: dict[str, Any]) -> Lines:
    """A row per measure and store, and below them what they mean."""
    printed = plain_table()
    for number, heading in enumerate(HEADINGS):
        # Two lines a heading and no break in a title: all of it fits 80 columns.
        lines = heading.replace(" of ", " of\n") if " of " in heading else f"\n{heading}"
        printed.add_column(lines, justify="left" if number < 2 else "right", no_wrap=number == 0, overflow="fold")
    for cells in rows(figures):
        # Names are wrapped in Text: a bracket in them is no markup.
        printed.add_row(*map(Text, cells))
    return Lines(printed, Text(), *map(Text, notes(figures)))


def rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table; purity, one number a store, stands in the column of means."""
    cells = []
    for measure in MEASURES:
        for number, store in enumerate(figures["stores"]):
            title = measure.title if number == 0 else ""
            cells.append((title, store["store"], *_cells(store["measures"][measure.name])))
    for number, store in enumerate(figures["stores"]):
        title = f"purity ({figures['embedding']})" if number == 0 else ""
        cells.append((title, store["store"], _number(store["purity"]), *("",) * 4))
    return cells


def notes(figures: dict[str, Any]) -> list[str]:
    """Who was listened to, what each row means, and that none of it is private."""
    lines = []
    for store in figures["stores"]:
        heard = f"{store['store']} ({store['language']}): {store['utterances']:,} utterances, {store['hours']:.2f} h"
        clients = (
            f"{store['clients']:,} of {store['clients_in_store']:,} clients ({store['purity_clients']:,} for purity)"
        )
        lines.append(f"{heard}, {clients}, seed {figures['seed']}")
        lines += [
            f"{store['store']}: {without:,} utterances have no {measure.title}"
            for measure in MEASURES
            if (without := store["measures"][measure.name]["utterances_without"])
        ]
    titles = {measure.name: measure.title for measure in MEASURES}
    lines += [f"{titles.get(name, name)}: {meaning}." for name, meaning in figures["definitions"].items()]
    return [*lines, figures["note"]]


def _cells(spread: dict[str, Any]) -> tuple[str, ...]:
    names = ("mean", "std_of_means", "kurtosis_of_means", "mean_of_stds", "std_of_stds")
    return tuple(_number(spread[name]) for name in names)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
