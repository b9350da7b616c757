"""How a page opens: the verdict on its runs, before any table or figure."""

from collections.abc import Sequence

from sottovoce.evaluation.paired_table import between, points
from sottovoce.report.cells import epsilon_text, listed
from sottovoce.report.parts import Chapter, Fold, MacroPart, PagePart, Paragraph
from sottovoce.report.verdict import EVERY_TIME, Verdict, odds_words, of_hundred, told_together
from sottovoce.tables import NOTHING, Row, Table

WORDS = 4  # columns of the table, before the numbers
IN_WORDS = 6  # runs, beyond which nobody reads a verdict on each
BY_PLD = "ε (PLD, else RDP)"  # the smaller bound: RDP alone where no PLD is known


def verdict_section(found: Sequence[Verdict]) -> Chapter:
    """One run's verdict in full; of several a sentence and a table, and each one's words behind a line."""
    parts: list[PagePart] = [MacroPart("verdict", one) for one in found]
    if len(found) > 1:
        folds = [
            Fold(f"{one.label}, in words", (MacroPart("verdict", one),)) for one in found if len(found) <= IN_WORDS
        ]
        parts = [Paragraph(told_together(found), "verdict-headline"), verdict_table(found), *folds]
    return Chapter("verdict", "Verdict", "", tuple(parts))


def verdict_table(found: Sequence[Verdict]) -> Table:
    """One line a run: what it is, what its mechanism allows, what it costs."""
    headings = (
        *("", "verdict", "worst group", "WER beside", BY_PLD, "right guesses in 100", "odds of 1 : 1 become"),
        *("points of WER", "95 % interval", "worst group’s gap", "95 % interval"),
    )
    alike: dict[Row, list[str]] = {}
    for one in found:
        alike.setdefault(_cells(one), []).append(one.label)
    rows: list[Row] = [(listed(labels), *cells) for cells, labels in alike.items()]
    told = [n for n in range(len(headings)) if n < 2 or any(row[n] != NOTHING for row in rows)]
    note = (
        "Right guesses, at most, of whether one person took part, where a coin is right 50 times in 100; of a "
        "simulation, what a release of its recipe would allow."
    )
    if any(one.cost is not None and one.cost.base is not None for one in found):
        note += " WER beside the same run without noise, where it is here, or beside the start."
    shown, *cells = (tuple(row[n] for n in told) for row in (headings, *rows))
    return Table("verdicts", "What each is worth", shown, tuple(cells), note, words=sum(n < WORDS for n in told))


def _cells(one: Verdict) -> Row:
    private = (NOTHING, "any", "any")
    if one.epsilon is not None and one.odds is not None:
        right = "100" if one.odds.right >= EVERY_TIME else f"{of_hundred(one.odds.right)}"
        assert one.epsilon_of_one is not None
        inside = "" if one.epsilon_inside is None else f" (one inside: {epsilon_text(one.epsilon_inside)})"
        private = (epsilon_text(one.epsilon) + inside, right, odds_words(one.epsilon_of_one))
    base, cost = NOTHING, (NOTHING, NOTHING)
    if one.cost is not None and one.cost.base is not None:
        base, cost = one.cost.base, (points(one.cost.difference), between(one.cost.interval))
    group, gap = NOTHING, (NOTHING, NOTHING)
    if one.gap is not None:
        group, gap = f"{one.gap.fact} {one.gap.group}", (points(one.gap.gap), between(one.gap.interval))
    return one.brief, group, base, *private, *cost, *gap
