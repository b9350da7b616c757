"""A comparison of two models as a table for the terminal. It prints; it computes nothing."""

from rich.console import Group as Lines
from rich.text import Text

from sottovoce.base.tables import NOTHING, Row
from sottovoce.evaluation.paired import Comparison, Difference
from sottovoce.evaluation.per_speaker import FEWEST_SPEAKERS, Interval
from sottovoce.evaluation.table import grouped_table, rate_text

RATES_OF_BOTH = ("group", "speakers", "words", "A", "B", "A − B", "95 % interval")


def comparison_table(comparison: Comparison, *, title: str) -> Lines:
    """The differences among all and by group, and below them what they mean."""
    facts = (*comparison.groups.items(), *comparison.intersections.items())
    rows = grouped_table(title, RATES_OF_BOTH, comparison.everybody, facts, _row, _words)
    printed = rows.for_terminal(breaking=True, overflow="fold")
    return Lines(printed, Text(), *(Text(line) for line in comparison_notes(comparison)))


def comparison_notes(comparison: Comparison) -> list[str]:
    """What the table means, in sentences."""
    everybody = comparison.everybody
    alike = everybody.speakers - everybody.better - everybody.worse
    lines = [
        which_is_better(everybody),
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


def which_is_better(everybody: Difference) -> str:
    """Which of the two is better, as far as these people can tell."""
    if everybody.interval is None:
        return f"Fewer than {FEWEST_SPEAKERS} speakers: nothing can be said of others."
    told = f"{points(everybody.difference)} points ({between(everybody.interval)})"
    if not everybody.is_told_apart:
        return f"Not told apart by these speakers: {told}."
    return f"{'A' if everybody.interval[1] < 0 else 'B'} is better: {told}."


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


def _words(group: Difference) -> int:
    return group.words


def _row(group: Difference) -> Row:
    counts = (f"{group.speakers:,}", f"{group.words:,}", rate_text(group.first), rate_text(group.second))
    return (group.name, *counts, points(group.difference), between(group.interval))
