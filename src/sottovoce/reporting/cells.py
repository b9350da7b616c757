"""A table of a report, and how numbers stand in its cells: on the page for readers, in the CSV for programs."""

import csv
import io
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sottovoce.privacy.promise import written_out

NOTHING = "–"
NAMED = 4  # more labels than this make a list that nobody reads
Row = tuple[str, ...]
Said = TypeVar("Said", bound=Hashable)

# A cell of numbers: "1,234", "75.6 %", "64.5 to 88.1 %", "2 / 23 / 1", "25.0 (24.1–26.0)", "21,103 (cohort 2,029)".
_NUMBER = r"(?:[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|∞)"
_SEVERAL = rf"{_NUMBER} ?%?(?:(?: to | / |–){_NUMBER} ?%?)*"
_CELL = re.compile(rf"(?P<own>{_SEVERAL})(?: \((?:(?P<around>{_SEVERAL})|.*)\))?")


@dataclass(frozen=True)
class Table:
    """Cells with headings. `words` columns are text and stand to the left; the others are numbers."""

    name: str
    title: str
    headings: Row
    rows: tuple[Row, ...]
    note: str = ""
    words: int = 1
    all_words: bool = False

    def as_csv(self) -> str:
        """As it stands, but that cells of numbers are numbers: what a cell has several of, columns have one each."""
        columns: list[tuple[str, ...]] = []
        for place, (heading, *cells) in enumerate(zip(self.headings, *self.rows, strict=True)):
            is_words = self.all_words or place < self.words
            columns += [(heading, *cells)] if is_words else plain_numbers(heading, cells)
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(zip(*columns, strict=True))
        return lines.getvalue()


def plain_numbers(heading: str, cells: Sequence[str]) -> list[tuple[str, ...]]:
    """A column as columns of numbers without commas and signs of per cent; empty where a cell says none.

    One with a cell that has digits and is no number, such as a hash, is left as it is.

    >>> plain_numbers("95 % interval", ["64.5% to 88.1%", "–"])
    [('95 % interval, low, %', '64.5', ''), ('95 % interval, high, %', '88.1', '')]
    >>> plain_numbers("ε here (PLD / RDP)", ["not private", "120,600 / 436,800"])
    [('ε here PLD', '', '120600'), ('ε here RDP', '', '436800')]
    >>> plain_numbers("population", ["21,103 (cohort 2,029)"]), plain_numbers("head", ["26de…"])
    ([('population', '21103')], [('head', '26de…')])
    """
    found = [_CELL.fullmatch(cell) for cell in cells]
    if any(match is None and re.search(r"\d", cell) for match, cell in zip(found, cells, strict=True)):
        return [(heading, *cells)]
    said = [[] if match is None else re.findall(_NUMBER, f"{match['own']} {match['around'] or ''}") for match in found]
    width = max(map(len, said), default=0) or 1
    unit = ", %" if any("%" in cell for cell, match in zip(cells, found, strict=True) if match) else ""
    rows = [[*(told.replace(",", "").replace("∞", "inf") for told in row), *[""] * (width - len(row))] for row in said]
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


def said_once(told: Iterable[tuple[str, Said]]) -> list[tuple[str, Said]]:
    """What several runs say in the same words, once, with all of their labels before it.

    >>> said_once([("a", "no noise"), ("b", "z = 1"), ("c", "no noise")])
    [('a, c', 'no noise'), ('b', 'z = 1')]
    """
    labels: dict[Said, list[str]] = {}
    for label, words in told:
        labels.setdefault(words, []).append(label)
    return [(", ".join(names), words) for words, names in labels.items()]


def listed(labels: Sequence[str]) -> str:
    """In a sentence; of many the first alone, and how many more there are.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d", "e"])
    ('a', 'a, b and c', 'a, b, c and 2 more')
    """
    if len(labels) > NAMED:
        labels = [*labels[: NAMED - 1], f"{len(labels) - NAMED + 1} more"]
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A name for files and anchors for each of `names`, none of them twice.

    >>> slugs(["Dev clean", "dev/clean", "test"])
    {'Dev clean': 'dev-clean', 'dev/clean': 'dev-clean-2', 'test': 'test'}
    """
    found: dict[str, str] = {}
    for name in names:
        plain = slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        number = 2
        while slug in found.values():
            slug, number = f"{plain}-{number}", number + 1
        found[name] = slug
    return found


def text(value: Any) -> str:
    return NOTHING if value is None or value == "" else str(value)


def integer(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def percent(rate: float | None) -> str:
    return NOTHING if rate is None else f"{100 * rate:.1f} %"


def epsilon(value: float | None) -> str:
    return NOTHING if value is None else written_out(value)
