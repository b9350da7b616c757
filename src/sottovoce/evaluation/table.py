"""An evaluation as tables for the terminal. They print; they compute nothing."""

from rich.console import Group as Lines
from rich.text import Text

from sottovoce.evaluation.evaluate import Evaluation, Group
from sottovoce.evaluation.per_speaker import Interval
from sottovoce.tables import plain_table
from sottovoce.text.normalisers import OURS

# A crowd describes its accents in hundreds of ways; the largest groups are shown, all are in the JSON.
GROUPS_SHOWN = 8
HEADINGS = ("group", "speakers", "words", "WER", "95 % interval", "subst.", "del.", "ins.")


def table(evaluation: Evaluation, *, title: str) -> Lines:
    """The errors in all and by group, and below them how speakers differ."""
    printed = plain_table(title)
    for number, heading in enumerate(HEADINGS):
        printed.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold")
    for cells in group_rows(evaluation):
        if cells[0] in evaluation.groups:
            printed.add_section()
        # Names are wrapped in Text: a bracket in them is no markup.
        printed.add_row(*map(Text, cells), style="bold" if cells[0] == "all" else "")
    return Lines(printed, Text(), *(Text(line) for line in summary(evaluation)))


def summary(evaluation: Evaluation) -> list[str]:
    """What is not in the table, in sentences: characters, the spread over speakers, what was left out."""
    spread = evaluation.spread
    lines = [
        f"CER {percent(evaluation.cer)}; {evaluation.utterances:,} utterances, {evaluation.audio_seconds / 3600:.2f} h",
        f"WER per speaker: mean {percent(spread.mean)}, std {percent(spread.std)}, "
        f"quartiles {percent(spread.p25)} · {percent(spread.median)} · {percent(spread.p75)}, "
        f"best tenth {percent(spread.best_tenth)}, worst tenth {percent(spread.worst_tenth)}",
    ]
    if evaluation.normalisation != OURS.as_json():
        lines.append("texts spelled by {name} {version}".format(**evaluation.normalisation))
    if evaluation.without_text:
        lines.append(f"left out: {evaluation.without_text:,} utterances without text")
    if evaluation.too_long:
        lines.append(f"left out: {evaluation.too_long:,} utterances that are too long")
    return lines


def group_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """The cells of the table: all speakers, then for each fact its name in a row of its own and its groups."""
    everybody = Group("all", len(evaluation.speakers), evaluation.words, evaluation.interval)
    rows = [_row(everybody)]
    for fact, groups in evaluation.groups.items():
        shown = shown_groups(groups)
        nothing = [""] * (len(HEADINGS) - 1)
        rows.append((fact, *nothing))
        rows.extend(_row(group, indent="  ") for group in shown)
        if len(shown) < len(groups):
            rows.append((f"  and {len(groups) - len(shown)} smaller", *nothing))
    return rows


def shown_groups(groups: tuple[Group, ...]) -> list[Group]:
    """The groups with most words, in the order they have."""
    largest = sorted(groups, key=lambda group: -group.words.length)[:GROUPS_SHOWN]
    return [group for group in groups if group in largest]


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %" if rate < 9.995 else f"{100 * rate:,.0f} %"


def _row(group: Group, *, indent: str = "") -> tuple[str, ...]:
    words = group.words
    shares = [None if not words.length else part / words.length for part in _parts(group)]
    counts = (f"{group.speakers:,}", f"{words.length:,}", percent(words.rate), _between(group.interval))
    return (indent + group.name, *counts, *map(percent, shares))


def _parts(group: Group) -> tuple[int, int, int]:
    return group.words.substitutions, group.words.deletions, group.words.insertions


def _between(interval: Interval | None) -> str:
    return "–" if interval is None else f"{100 * interval[0]:.1f} – {100 * interval[1]:.1f} %"
