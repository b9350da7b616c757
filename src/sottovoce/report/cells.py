"""How numbers and names stand in the cells of a report."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from sottovoce.privacy.promise import written_out
from sottovoce.tables import NOTHING

NAMED = 4  # more labels than this make a list that nobody reads
Said = TypeVar("Said", bound=Hashable)


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


def number_text(value: float | None) -> str:
    """Three digits that count."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def percent(rate: float | None) -> str:
    return NOTHING if rate is None else f"{100 * rate:.1f} %"


def epsilon_text(value: float | None) -> str:
    return NOTHING if value is None else written_out(value)
