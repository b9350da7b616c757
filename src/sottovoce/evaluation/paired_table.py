"""A comparison of two models as a table for the terminal. It prints; it computes nothing."""

from collections.abc import Sequence

from rich.console import Group as Lines
from rich.text import Text

from sottovoce.evaluation.paired import Comparison, Difference
from sottovoce.evaluation.per_speaker import FEWEST_SPEAKERS, Interval
from sottovoce.evaluation.table import GROUPS_SHOWN, percent
from sottovoce.tables import plain_table

HEADINGS = ("group", "speakers", "words", "A", "B", "A − B", "95 % interval")
NOTHING = "–"


def table(comparison: Comparison, *, title: str) -> Lines:
    """The differences among all and by group, and below them what they mean."""
    printed = plain_table(title)
    for number, heading in enumerate(HEADINGS):
        printed.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold")
    printed.add_row(*map(Text, _row(comparison.everybody)), style="bold")
    for fact, found in (*comparison.groups.items(), *comparison.intersections.items()):
        printed.add_section()
        printed.add_row(Text(fact))
        shown = largest(found)
        for group in shown:
            printed.add_row(*map(Text, _row(group, indent="  ")))
        if len(shown) < len(found):
            printed.add_row(Text(f"  and {len(found) - len(shown)} smaller"))
    return Lines(printed, Text(), *(Text(line) for line in summary(comparison)))


def summary(comparison: Comparison) -> list[str]:
    """What the table means, in sentences."""
    everybody = comparison.everybody
    alike = everybody.speakers - everybody.better - everybody.worse
    lines = [
        verdict(everybody),
        f"Of {everybody.speakers:,} speakers {everybody.better:,} have fewer errors with A, {everybody.worse:,} with "
        f"B, {alike:,} as many with both.",
    ]
    groups = sum(map(len, (*comparison.groups.values(), *comparison.intersections.values())))
    if groups > 1:
        lines.append(f"Of {groups} groups, one in twenty leaves 0 out by chance, where there is no difference.")
    if not comparison.groups:
        lines.append("Nothing is known of who is in which group.")
    if comparison.too_small:
        lines.append(f"Left out, intersections of fewer than {FEWEST_SPEAKERS} speakers: {comparison.too_small:,}.")
    return lines


def verdict(everybody: Difference) -> str:
    """Which of the two is better, as far as these people can tell."""
    if everybody.interval is None:
        return f"Fewer than {FEWEST_SPEAKERS} speakers: nothing can be said of others."
    told = f"{points(everybody.difference)} points ({between(everybody.interval)})"
    if not everybody.is_told_apart:
        return f"Not told apart by these speakers: {told}."
    return f"{'A' if everybody.interval[1] < 0 else 'B'} is better: {told}."


def largest(found: Sequence[Difference]) -> list[Difference]:
    """The groups with most words, in the order they have."""
    most = sorted(found, key=lambda group: -group.words)[:GROUPS_SHOWN]
    return [group for group in found if group in most]


def points(difference: float | None) -> str:
    """With its sign, in points of per cent; a difference that rounds to 0 has none.

    >>> points(-0.0123), points(0.0004), points(-0.0004)
    ('-1.2', '0.0', '0.0')
    """
    if difference is None:
        return NOTHING
    told = f"{100 * difference:+.1f}"
    return told if told.strip("+-0.") else "0.0"


def between(interval: Interval | None) -> str:
    return NOTHING if interval is None else f"{points(interval[0])} to {points(interval[1])}"


def _row(group: Difference, *, indent: str = "") -> tuple[str, ...]:
    counts = (f"{group.speakers:,}", f"{group.words:,}", percent(group.first), percent(group.second))
    return (indent + group.name, *counts, points(group.difference), between(group.interval))
