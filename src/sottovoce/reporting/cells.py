"""A table of a report, and how numbers stand in its cells: on the page as in the CSV."""

import csv
import io
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from sottovoce.privacy.promise import written_out

NOTHING = "–"
Row = tuple[str, ...]
Said = TypeVar("Said", bound=Hashable)


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
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows((self.headings, *self.rows))
        return lines.getvalue()


def said_once(told: Iterable[tuple[str, Said]]) -> list[tuple[str, Said]]:
    """What several runs say in the same words, once, with all of their labels before it.

    >>> said_once([("a", "no noise"), ("b", "z = 1"), ("c", "no noise")])
    [('a, c', 'no noise'), ('b', 'z = 1')]
    """
    labels: dict[Said, list[str]] = {}
    for label, words in told:
        labels.setdefault(words, []).append(label)
    return [(", ".join(names), words) for words, names in labels.items()]


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
