"""An evaluation as a table, of all speakers and by group. It prints; it computes nothing."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Group as Lines
from rich.text import Text

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.evaluation.evaluate import Evaluation, Group
from sottovoce.evaluation.per_speaker import Interval
from sottovoce.text.normalisers import OURS

# A crowd describes its accents in hundreds of ways; the largest groups are shown, all are in the JSON.
GROUPS_SHOWN = 8
ERRORS_BY_GROUP = ("group", "speakers", "words", "WER", "95 % interval", "subst.", "del.", "ins.")

OfSpeakers = TypeVar("OfSpeakers")


def evaluation_table(evaluation: Evaluation, *, title: str) -> Lines:
    """The errors in all and by group, and below them how speakers differ, for the terminal."""
    printed = error_table_of(evaluation, title=title).for_terminal(breaking=True, overflow="fold")
    return Lines(printed, Text(), *(Text(line) for line in evaluation_notes(evaluation)))


def evaluation_notes(evaluation: Evaluation) -> list[str]:
    """What is not in the table, in sentences: characters, the spread over speakers, what was left out."""
    spread = evaluation.spread
    lines = [
        f"CER {rate_text(evaluation.cer)}; {evaluation.utterances:,} utterances, "
        f"{evaluation.audio_seconds / 3600:.2f} h",
        f"WER per speaker: mean {rate_text(spread.mean)}, std {rate_text(spread.std)}, "
        f"quartiles {rate_text(spread.p25)} · {rate_text(spread.median)} · {rate_text(spread.p75)}, "
        f"best tenth {rate_text(spread.best_tenth)}, worst tenth {rate_text(spread.worst_tenth)}",
    ]
    if evaluation.normalisation != OURS.as_json():
        lines.append("texts spelled by {name} {version}".format(**evaluation.normalisation))
    if evaluation.without_text:
        lines.append(f"left out: {evaluation.without_text:,} utterances without text")
    if evaluation.too_long:
        lines.append(f"left out: {evaluation.too_long:,} utterances that are too long")
    return lines


def error_table_of(evaluation: Evaluation, *, title: str = "") -> Table:
    """The errors of all speakers, then those of the groups of each fact."""
    everybody = Group("all", len(evaluation.speakers), evaluation.words, evaluation.interval)
    return grouped_table(title, ERRORS_BY_GROUP, everybody, evaluation.groups.items(), _row, group_words)


def grouped_table(
    title: str,
    headings: Row,
    everybody: OfSpeakers,
    facts: Iterable[tuple[str, Sequence[OfSpeakers]]],
    row: Callable[[OfSpeakers], Row],
    size: Callable[[OfSpeakers], int],
) -> Table:
    """A row for all speakers, then for each fact its name in a row of its own and its groups."""
    rows, begins, nothing = [row(everybody)], [], [""] * (len(headings) - 1)
    for fact, groups in facts:
        shown = largest_groups(groups, size)
        begins.append(len(rows))
        rows.append((fact, *nothing))
        rows += [(f"  {cells[0]}", *cells[1:]) for cells in map(row, shown)]
        if len(shown) < len(groups):
            rows.append((f"  and {len(groups) - len(shown)} smaller", *nothing))
    return Table("groups", title, headings, tuple(rows), total=0, groups=tuple(begins))


def group_words(group: Group) -> int:
    return group.words.length


def largest_groups(groups: Sequence[OfSpeakers], size: Callable[[OfSpeakers], int]) -> list[OfSpeakers]:
    """The groups with most words, in the order they have."""
    largest = sorted(groups, key=size, reverse=True)[:GROUPS_SHOWN]
    return [group for group in groups if group in largest]


def rate_text(rate: float | None) -> str:
    return NOTHING if rate is None else f"{100 * rate:.1f} %" if rate < 9.995 else f"{100 * rate:,.0f} %"


def _row(group: Group) -> Row:
    words = group.words
    shares = [None if not words.length else part / words.length for part in _parts(group)]
    counts = (f"{group.speakers:,}", f"{words.length:,}", rate_text(words.rate), _between(group.interval))
    return (group.name, *counts, *map(rate_text, shares))


def _parts(group: Group) -> tuple[int, int, int]:
    return group.words.substitutions, group.words.deletions, group.words.insertions


def _between(interval: Interval | None) -> str:
    return NOTHING if interval is None else f"{100 * interval[0]:.1f} – {100 * interval[1]:.1f} %"
