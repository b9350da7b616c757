"""Which runs are told apart by their test speakers: differences of word error rates, paired by speaker.

Rates of two runs on the same people rise and fall together, so that their own intervals say little of the difference.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sottovoce.evaluation.paired import LESS_START, difference, why_not
from sottovoce.evaluation.paired_table import between, points
from sottovoce.report.cells import said_once
from sottovoce.report.records import Record, RunRecord
from sottovoce.tables import NOTHING, Row, Table

PAIRED_HEADINGS = ("", "test set", "points of WER", "95 % interval", "better / worse / same")


class _Pair(NamedTuple):
    label: str
    name: str
    test: Record
    base: Record


def difference_table(runs: Sequence[RunRecord], *, start: str) -> Table | None:
    """Every run's WER less that of the first; of a single run, less that of the model it started from.

    That model, where all have the same, is compared as well and called `start`. None where nothing can be compared.
    """
    if not runs:
        return None
    first, *others = runs
    before = _common_start(runs)
    if others:
        baseline, base = first.label, first.tests
        compared = {start: before} | {run.label: run.tests for run in others}
    else:
        baseline, base = start, before
        compared = {first.label: first.tests}
    pairs = [
        _Pair(label, name, test, base[name])
        for label, tests in compared.items()
        for name, test in tests.items()
        if name in base and "wer" in test
    ]
    reasons = {
        (pair.label, pair.name): "" if not others and LESS_START in pair.test else why_not(pair.test, pair.base)
        for pair in pairs
    }
    rows = [_row(pair, first) for pair in pairs if not reasons[pair.label, pair.name]]
    if not rows:
        return None
    note = (
        f"WER less that of {baseline}, on the same people: below 0 is better. An interval that holds 0 does not tell "
        "the two apart. Better and worse are people with fewer and with more errors."
    )
    left_out = dict.fromkeys((label, reason) for (label, _), reason in reasons.items() if reason)
    note += "".join(f" Not compared: {labels} ({reason})." for labels, reason in said_once(left_out))
    tests = {row[1] for row in rows}
    table = Table(
        "paired", f"Difference from {baseline}, paired by speaker", PAIRED_HEADINGS, tuple(rows), note, words=2
    )
    return table if len(tests) > 1 else replace(table.without_column(1), title=f"{table.title} ({tests.pop()})")


def _common_start(runs: Sequence[RunRecord]) -> Record:
    """What the runs say of the model that they started from; nothing where they started from different ones."""
    starts: list[Record] = [run.results["start"]["test"] for run in runs if run.results.get("start")]
    rates = [{name: test.get("wer") for name, test in start.items()} for start in starts]
    return starts[0] if starts and all(rate == rates[0] for rate in rates) else {}


def _row(pair: _Pair, first: RunRecord) -> Row:
    which = pair.label, first.named(pair.name)
    if (told := pair.test.get(LESS_START)) is not None:  # a release, beside its start alone
        return *which, points(told["difference"]), between(told["difference_interval"]), NOTHING
    found = difference(pair.test, pair.base)
    people = f"{found.better:,} / {found.worse:,} / {found.speakers - found.better - found.worse:,}"
    return *which, points(found.difference), between(found.interval), people
