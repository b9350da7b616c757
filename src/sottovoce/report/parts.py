"""What a page is made of, as data: sections and their parts, and how numbers and names are shown in cells.

Each part names the macro of `templates/parts.html` that renders it. Titles, captions and notes are in
`templates/texts.yaml`.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Literal, TypeVar

import yaml
from matplotlib.figure import Figure

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.privacy.guarantee import format_epsilon
from sottovoce.report.drawings import Drawing

OPEN_FOLDS = 3  # runs, beyond which what belongs to a single one is folded away
LABELS_NAMED = 4  # more labels than this make a list that nobody reads
Content = TypeVar("Content", bound=Hashable)


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `style` is a class of the style sheet, such as `notice`, `quiet` or `strong`."""

    macro: ClassVar[str] = "words"

    text: str
    style: str = ""


@dataclass(frozen=True)
class MacroPart:
    """What only one section has, rendered by a macro of its own."""

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
class PageSection:
    """One section of a page, folded on a screen. On paper only what is open there and what `is_printed` appears."""

    anchor: str
    title: str
    intro: str
    parts: tuple[PagePart, ...]
    is_printed: bool = False

    @property
    def all_parts(self) -> list[PagePart]:
        """Those inside folds, too."""
        return [inner for part in self.parts for inner in _inner(part)]


@cache
def _texts() -> Any:
    return yaml.safe_load(files("sottovoce").joinpath("templates/texts.yaml").read_text(encoding="utf-8"))


def make_section(anchor: str, parts: Sequence[PagePart], **values: Any) -> PageSection | None:
    """The section of that name. Tables without rows are left out; None where nothing is left."""
    text = _texts()["sections"][anchor]
    shown = tuple(part for part in parts if not isinstance(part, Table) or part.rows)
    return PageSection(anchor, text["title"], text.get("intro", "").format(**values), shown) if shown else None


def make_drawing(name: str, alt: str, draw: Callable[[], Figure], *, kind: str = "", **values: Any) -> Drawing:
    """The figure called `name`, with the words of its `kind`, if that is another."""
    text = _texts()["figures"][kind or name]
    return Drawing(name, text["title"].format(**values), text["caption"].format(**values), alt, draw)


def figure_text(kind: str, name: Literal["title", "axis"]) -> str:
    found: str = _texts()["figures"][kind][name]
    return found


def screen_text(name: str, **values: Any) -> str:
    """A sentence of the first screen."""
    found: str = _texts()["screen"][name]
    return found.format(**values)


def make_table(
    name: str, rows: Iterable[Row], *, kind: str = "", headings: Sequence[str] = (), words: int = 1, **values: Any
) -> Table:
    """The table called `name`, with the words of its `kind`, if that is another."""
    text = _texts()["tables"][kind or name]
    return Table(
        name,
        text["title"].format(**values),
        tuple(text.get("headings", headings)),
        tuple(rows),
        text.get("note", "").format(**values),
        words=text.get("words", words),
        all_words=text.get("all_words", False),
    )


def fold_by_run(parts: Mapping[str, Sequence[PagePart]]) -> list[PagePart]:
    """What belongs to single runs: of one as it is, of several behind their labels, open if they are few."""
    if len(parts) == 1:
        return [part for own in parts.values() for part in own]
    return [Fold(label, tuple(own), is_open=len(parts) <= OPEN_FOLDS) for label, own in parts.items()]


def notice(text: str) -> Paragraph:
    return Paragraph(text, "notice")


def notices(found: Iterable[tuple[str, str]], form: str = "{}: {}") -> list[Paragraph]:
    """A notice for each text, with all labels it is about."""
    return [notice(form.format(labels, text)) for labels, text in merge_labels(found)]


def _inner(part: PagePart) -> list[PagePart]:
    return [inner for one in part.parts for inner in _inner(one)] if isinstance(part, Fold) else [part]


def merge_labels(found: Iterable[tuple[str, Content]]) -> list[tuple[str, Content]]:
    """Each content once, with the labels of all runs that have it.

    >>> merge_labels([("a", "no noise"), ("b", "z = 1"), ("c", "no noise")])
    [('a, c', 'no noise'), ('b', 'z = 1')]
    """
    labels: dict[Content, list[str]] = {}
    for label, content in found:
        labels.setdefault(content, []).append(label)
    return [(", ".join(names), content) for content, names in labels.items()]


def merge_starts(found: Iterable[tuple[str, Content]]) -> list[tuple[str, Content]]:
    """The same for the models that runs started from: `before` where all started from one.

    >>> merge_starts([("a", 1), ("b", 1)]), merge_starts([("a", 1), ("b", 2)])
    ([('before', 1)], [('before: a', 1), ('before: b', 2)])
    """
    starts = merge_labels(found)
    return [(f"before: {labels}" if len(starts) > 1 else "before", content) for labels, content in starts]


def join_labels(labels: Sequence[str]) -> str:
    """In a sentence; of many the first ones, and how many more there are.

    >>> join_labels(["a"]), join_labels(["a", "b", "c"]), join_labels(["a", "b", "c", "d", "e"])
    ('a', 'a, b and c', 'a, b, c and 2 more')
    """
    if len(labels) > LABELS_NAMED:
        labels = [*labels[: LABELS_NAMED - 1], f"{len(labels) - LABELS_NAMED + 1} more"]
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


def unique_slugs(names: Iterable[str]) -> dict[str, str]:
    """A name for files and anchors for each of `names`, none of them twice.

    >>> unique_slugs(["Dev clean", "dev/clean", "test"])
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


def show_text(value: Any) -> str:
    return NOTHING if value is None or value == "" else str(value)


def show_count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def show_number(value: float | None) -> str:
    """Three significant digits."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def show_percent(rate: float | None) -> str:
    return NOTHING if rate is None else f"{100 * rate:.1f} %"


def show_epsilon(value: float | None) -> str:
    return NOTHING if value is None else format_epsilon(value)
