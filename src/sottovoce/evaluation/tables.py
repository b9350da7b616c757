"""Evaluations and comparisons as tables and sentences. Nothing is computed here."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from rich.console import Group as Lines
from rich.text import Text

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.data.text.normalisation import OURS
from sottovoce.evaluation.compare import Comparison, Difference
from sottovoce.evaluation.error_rates import FEWEST_SPEAKERS, Interval
from sottovoce.evaluation.score import Evaluation, SpeakerGroup

# Contributors describe their accents in hundreds of ways; the largest groups are shown, all are in the JSON.
GROUPS_SHOWN = 8
ERRORS_BY_GROUP = ("group", "speakers", "words", "WER", "95 % interval", "subst.", "del.", "ins.")
RATES_OF_BOTH = ("group", "speakers", "words", "A", "B", "A − B", "95 % interval")

OfSpeakers = TypeVar("OfSpeakers", bound=SpeakerGroup | Difference)


def format_evaluation(evaluation: Evaluation, *, title: str) -> Lines:
    """The errors overall and by group, and below them how speakers differ, for the terminal."""
    return _with_notes(tabulate_errors(evaluation, title=title), format_evaluation_notes(evaluation))


def format_evaluation_notes(evaluation: Evaluation) -> list[str]:
    """What is not in the table: character errors, the spread over speakers, what was left out."""
    spread = evaluation.spread
    lines = [
        f"CER {format_rate(evaluation.cer)}; {evaluation.utterances:,} utterances, "
        f"{evaluation.audio_seconds / 3600:.2f} h",
        f"WER per speaker: mean {format_rate(spread.mean)}, std {format_rate(spread.std)}, "
        f"quartiles {format_rate(spread.p25)} · {format_rate(spread.median)} · {format_rate(spread.p75)}, "
        f"best tenth {format_rate(spread.best_tenth)}, worst tenth {format_rate(spread.worst_tenth)}",
    ]
    if evaluation.normalisation != OURS.as_json():
        lines.append("texts normalised by {name} {version}".format(**evaluation.normalisation))
    if evaluation.without_text:
        lines.append(f"left out: {evaluation.without_text:,} utterances without text")
    if evaluation.too_long:
        lines.append(f"left out: {evaluation.too_long:,} utterances that are too long")
    return lines


def tabulate_errors(evaluation: Evaluation, *, title: str = "") -> Table:
    """The errors of all speakers, then those of the groups of each fact."""
    everybody = SpeakerGroup("all", len(evaluation.speakers), evaluation.words, evaluation.interval)
    return _tabulate_groups(title, ERRORS_BY_GROUP, everybody, evaluation.groups, _error_row)


def format_comparison(comparison: Comparison, *, title: str) -> Lines:
    """The differences overall and by group, and below them what they mean."""
    groups = {**comparison.groups, **comparison.intersections}
    table = _tabulate_groups(title, RATES_OF_BOTH, comparison.everybody, groups, _difference_row)
    return _with_notes(table, format_comparison_notes(comparison))


def format_comparison_notes(comparison: Comparison) -> list[str]:
    """What the table means, in sentences."""
    everybody = comparison.everybody
    alike = everybody.speakers - everybody.better - everybody.worse
    lines = [
        _format_better(everybody),
        f"Of {everybody.speakers:,} speakers {everybody.better:,} have fewer errors with A, {everybody.worse:,} with "
        f"B, {alike:,} as many with both.",
    ]
    groups = len([*chain(*comparison.groups.values(), *comparison.intersections.values())])
    if groups > 1:
        lines.append(f"Where there is no difference, one in twenty of {groups} intervals excludes 0 by chance.")
    if not comparison.groups:
        lines.append("Nothing is known of who is in which group.")
    if comparison.too_small:
        lines.append(f"Left out, intersections of fewer than {FEWEST_SPEAKERS} speakers: {comparison.too_small:,}.")
    return lines


def keep_largest_groups(groups: Sequence[OfSpeakers]) -> list[OfSpeakers]:
    """The groups with most words, in the order they have."""
    largest = sorted(groups, key=_count_words, reverse=True)[:GROUPS_SHOWN]
    return [group for group in groups if group in largest]


def format_rate(rate: float | None) -> str:
    return NOTHING if rate is None else f"{100 * rate:.1f} %" if rate < 9.995 else f"{100 * rate:,.0f} %"


def format_points(difference: float | None) -> str:
    """With its sign, in points of per cent; a difference that rounds to 0 has none.

    >>> format_points(-0.0123), format_points(0.0004), format_points(-0.0004)
    ('-1.2', '0.0', '0.0')
    """
    if difference is None:
        return NOTHING
    rounded = f"{100 * difference:+.1f}"
    return rounded if rounded.strip("+-0.") else "0.0"


def format_interval(interval: Interval | None) -> str:
    return NOTHING if interval is None else f"{format_points(interval[0])} to {format_points(interval[1])}"


def _format_better(everybody: Difference) -> str:
    """Which of the two is better, as far as these speakers show it."""
    if everybody.interval is None:
        return f"Fewer than {FEWEST_SPEAKERS} speakers: nothing can be said of others."
    points = f"{format_points(everybody.difference)} points ({format_interval(everybody.interval)})"
    if not everybody.is_significant:
        return f"No significant difference on these speakers: {points}."
    return f"{'A' if everybody.interval[1] < 0 else 'B'} is better: {points}."


def _tabulate_groups(
    title: str,
    headings: Row,
    everybody: OfSpeakers,
    facts: Mapping[str, Sequence[OfSpeakers]],
    row: Callable[[OfSpeakers], Row],
) -> Table:
    """A row for all speakers, then for each fact its name in a row of its own and its groups."""
    rows, begins = [row(everybody)], list[int]()
    nothing = ("",) * (len(headings) - 1)
    for fact, groups in facts.items():
        shown = keep_largest_groups(groups)
        begins.append(len(rows))
        rows.append((fact, *nothing))
        rows += [(f"  {cells[0]}", *cells[1:]) for cells in map(row, shown)]
        if len(shown) < len(groups):
            rows.append((f"  and {len(groups) - len(shown)} smaller", *nothing))
    return Table("groups", title, headings, tuple(rows), total=0, groups=tuple(begins))


def _with_notes(table: Table, notes: Sequence[str]) -> Lines:
    return Lines(table.for_terminal(breaking=True, overflow="fold"), Text(), *map(Text, notes))


def _error_row(group: SpeakerGroup) -> Row:
    words, interval = group.words, group.interval
    between = NOTHING if interval is None else f"{100 * interval[0]:.1f} – {100 * interval[1]:.1f} %"
    kinds = (words.substitutions, words.deletions, words.insertions)
    shares = [None if not words.length else count / words.length for count in kinds]
    counts = (f"{group.speakers:,}", f"{words.length:,}", format_rate(words.rate), between)
    return (group.name, *counts, *map(format_rate, shares))


def _difference_row(group: Difference) -> Row:
    counts = (f"{group.speakers:,}", f"{group.words:,}", format_rate(group.first), format_rate(group.second))
    return (group.name, *counts, format_points(group.difference), format_interval(group.interval))


def _count_words(group: SpeakerGroup | Difference) -> int:
    return group.words if isinstance(group, Difference) else group.words.length
