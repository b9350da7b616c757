"""Tables as data, and what becomes of them: rows for the terminal, lines of text, CSV for programs.

On a page they are set by the macro `table` of `templates/parts.html`.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod, OverflowMethod
from rich.table import Table as TerminalTable
from rich.text import Text

Row = tuple[str, ...]
NOTHING = "–"

# A cell of numbers: "1,234", "75.6 %", "64.5 to 88.1 %", "2 / 23 / 1", "25.0 (24.1–26.0)", "21,103 (cohort 2,029)".
_NUMBER = r"(?:[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|∞)"
_SEVERAL = rf"{_NUMBER} ?%?(?:(?: to | / |–){_NUMBER} ?%?)*"
_CELL = re.compile(rf"(?P<own>{_SEVERAL})(?: \((?:(?P<around>{_SEVERAL})|.*)\))?")


@dataclass(frozen=True)
class Table:
    """Cells with headings. `words` columns are text and stand to the left; the others are numbers.

    `total` is the row in bold, if any. `groups` are the rows that begin a new group. `spans` are words over several
    columns each, above the headings of a page.
    """

    macro: ClassVar[str] = "table"

    name: str
    title: str
    headings: Row
    rows: tuple[Row, ...]
    note: str = ""
    words: int = 1
    all_words: bool = False
    total: int | None = None
    groups: tuple[int, ...] = ()
    spans: tuple[tuple[str, int], ...] = ()

    def is_words(self, place: int) -> bool:
        return self.all_words or place < self.words

    def without_column(self, place: int) -> "Table":
        """What is the same in all rows need not be a column."""
        headings, *rows = ((*row[:place], *row[place + 1 :]) for row in (self.headings, *self.rows))
        return replace(self, headings=headings, rows=tuple(rows), words=self.words - (place < self.words))

    def as_csv(self) -> str:
        """As it stands, but that cells of numbers are numbers: what a cell has several of, columns have one each."""
        columns: list[Row] = []
        for place, (heading, *cells) in enumerate(zip(self.headings, *self.rows, strict=True)):
            columns += [(heading, *cells)] if self.is_words(place) else number_columns(heading, cells)
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(zip(*columns, strict=True))
        return lines.getvalue()

    def as_lines(self) -> list[str]:
        """For a file of text: columns of the same width, without title and note."""
        rows = (self.headings, *self.rows)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

    def for_terminal(self, *, breaking: bool = False, overflow: OverflowMethod = "ellipsis") -> TerminalTable:
        """Numbers stand on one line; so do words, unless `breaking` allows them more."""
        shown = plain_table(self.title, caption=self.note)
        for place, heading in enumerate(self.headings):
            is_words = self.is_words(place)
            justify: JustifyMethod = "left" if is_words else "right"
            shown.add_column(heading, justify=justify, no_wrap=not (breaking and is_words), overflow=overflow)
        for number, row in enumerate(self.rows):
            if number in self.groups:
                shown.add_section()
            # Cells are wrapped in Text: a bracket in a name is no markup.
            shown.add_row(*map(Text, row), style="bold" if number == self.total else "")
        return shown


def plain_table(title: str = "", *, caption: str = "") -> TerminalTable:
    """One without columns or rows yet: a line below its headings and none around it."""
    return TerminalTable(
        title=Text(title, style="bold"),
        title_justify="left",
        caption=Text(caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )


def number_columns(heading: str, cells: Sequence[str]) -> list[Row]:
    """A column as columns of numbers without commas and signs of per cent; empty where a cell says none.

    One with a cell that has digits and is no number, such as a hash, is left as it is.

    >>> number_columns("95 % interval", ["64.5% to 88.1%", "–"])
    [('95 % interval, low, %', '64.5', ''), ('95 % interval, high, %', '88.1', '')]
    >>> number_columns("ε here (PLD / RDP)", ["not private", "120,600 / 436,800"])
    [('ε here PLD', '', '120600'), ('ε here RDP', '', '436800')]
    >>> number_columns("population", ["21,103 (cohort 2,029)"]), number_columns("head", ["26de…"])
    ([('population', '21103')], [('head', '26de…')])
    """
    found = [_CELL.fullmatch(cell) for cell in cells]
    if any(match is None and re.search(r"\d", cell) for match, cell in zip(found, cells, strict=True)):
        return [(heading, *cells)]
    said = [[] if match is None else re.findall(_NUMBER, f"{match['own']} {match['around'] or ''}") for match in found]
    width = max(map(len, said), default=0) or 1
    unit = ", %" if any("%" in cell for cell, match in zip(cells, found, strict=True) if match) else ""
    rows = [
        [*(number.replace(",", "").replace("∞", "inf") for number in row), *[""] * (width - len(row))] for row in said
    ]
    return list(zip([name + unit for name in _parted(heading, width)], *rows, strict=True))


def _parted(heading: str, width: int) -> list[str]:
    """The heading of each of `width` numbers in a cell: its own parts, "PLD / RDP", or the ends of an interval."""
    if width == 1:
        return [heading]
    before, _, within = heading.rpartition("(")
    parts = within.rstrip(")").split(" / ")
    if len(parts) == width:
        return [before + part for part in parts]
    ends = [f"{heading}, low", f"{heading}, high"]
    return {2: ends, 3: [heading, *ends]}.get(width) or [f"{heading}, {n}" for n in range(1, width + 1)]
