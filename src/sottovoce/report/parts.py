"""What a page is made of, as data: each part names the macro of `templates/parts.html` that sets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sottovoce.report.drawings import Drawing
from sottovoce.tables import Table

UNFOLDED = 3  # runs, beyond which what belongs to a single one is folded away


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `style` is a class of the style sheet, such as `notice`, `quiet` or `strong`."""

    macro: ClassVar[str] = "words"

    text: str
    style: str = ""


@dataclass(frozen=True)
class MacroPart:
    """What only one chapter has, set by a macro of its own."""

    macro: str
    content: Any = None


@dataclass(frozen=True)
class Fold:
    """Parts behind a line that opens them."""

    macro: ClassVar[str] = "fold"

    title: str
    parts: tuple["PagePart", ...]
    is_open: bool = False


PagePart = Drawing | Table | Paragraph | MacroPart | Fold


@dataclass(frozen=True)
class Chapter:
    """One section of a page."""

    anchor: str
    title: str
    intro: str
    parts: tuple[PagePart, ...]

    @property
    def all_parts(self) -> list[PagePart]:
        """Those inside folds, too."""
        return [inner for part in self.parts for inner in _inner(part)]


def chapter(anchor: str, title: str, parts: Sequence[PagePart], intro: str = "") -> Chapter | None:
    """Of what there is: tables without rows are left out, and None is what nothing is left of."""
    shown = tuple(part for part in parts if not isinstance(part, Table) or part.rows)
    return Chapter(anchor, title, intro, shown) if shown else None


def by_run(parts: Mapping[str, Sequence[PagePart]]) -> list[PagePart]:
    """What belongs to single runs: of one as it is, of several behind their labels, open if they are few."""
    if len(parts) == 1:
        return [part for own in parts.values() for part in own]
    return [Fold(label, tuple(own), is_open=len(parts) <= UNFOLDED) for label, own in parts.items()]


def notice(words: str) -> Paragraph:
    return Paragraph(words, "notice")


def _inner(part: PagePart) -> list[PagePart]:
    return [inner for one in part.parts for inner in _inner(one)] if isinstance(part, Fold) else [part]
