"""Word error rates of runs compared on the same test speakers: what privacy costs, for which group, and which runs
differ.

Rates of two runs on the same people rise and fall together, so that only differences paired by speaker compare them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.evaluation.compare import (
    LESS_START,
    WORST_GROUP,
    GroupGap,
    compute_difference,
    explain_incomparable,
    find_worst_group,
    find_worst_group_by_totals,
    read_gap,
)
from sottovoce.evaluation.error_rates import Interval
from sottovoce.evaluation.tables import format_interval, format_points
from sottovoce.report.parts import make_table, merge_labels, show_percent
from sottovoce.report.records import Record, RunRecord

ITS_START = "start"
# Of a recipe's privacy: what two runs may differ in that are the same but for noise.
NOISE_SETTINGS = (
    *("noise_multiplier", "sigma_dp", "target_epsilon", "accountant"),
    *("epsilon_budget", "delta", "extrapolate", "mode"),
)


@dataclass(frozen=True)
class PrivacyCost:
    """The error rate on `test`, and its difference from that of `base`: a run without noise (its label) or the start.

    None where there is nothing to compare with.
    """

    test: str
    wer: float
    base: str | None = None
    difference: float | None = None
    interval: Interval | None = None

    @property
    def words(self) -> str:
        rate = f"Word error rate on {self.test}: {show_percent(self.wer)}"
        if self.base is None or self.difference is None:
            return f"{rate}."
        base = "the model it started from" if self.base == ITS_START else f"{self.base}, the same without noise"
        by = f"{format_points(self.difference)} points compared with {base}"
        if self.interval is None:
            return f"{rate}, {by}; too few speakers for an interval."
        low, high = self.interval
        meaning = "fewer errors" if high < 0 else "more errors" if low > 0 else "no significant difference"
        return f"{rate}, {by} (95 % interval {format_interval(self.interval)}, paired by speaker): {meaning}."

    def as_json(self) -> dict[str, Any]:
        beside = {"beside": self.base, "difference": self.difference, "difference_interval": self.interval}
        return {"test": self.test, "wer": self.wer} | ({} if self.base is None else beside)


def privacy_cost(run: RunRecord, runs: Sequence[RunRecord]) -> PrivacyCost | None:
    """Compared with the same run without noise, where `runs` has one with the same test speakers; else its start."""
    name = run.headline_test
    test = {} if name is None else run.tests[name]
    if name is None or "wer" not in test:
        return None
    for other in runs:
        if _is_noiseless_twin(other, run) and not explain_incomparable(test, theirs := other.tests.get(name, {})):
            found = compute_difference(test, theirs)
            return PrivacyCost(name, test["wer"], other.label, found.difference, found.interval)
    if (less := test.get(LESS_START)) is not None:
        ends = less["difference_interval"]
        return PrivacyCost(name, test["wer"], ITS_START, less["difference"], None if ends is None else tuple(ends))
    start = run.start_tests.get(name, {})
    if not start or explain_incomparable(test, start):
        return PrivacyCost(name, test["wer"])
    found = compute_difference(test, start)
    return PrivacyCost(name, test["wer"], ITS_START, found.difference, found.interval)


def worst_group_gap(run: RunRecord) -> GroupGap | None:
    """The worst group of the run's headline test set, as far as it is known."""
    name = run.headline_test
    test = {} if name is None else run.tests[name]
    if "wer" not in test:
        return None
    return (
        read_gap(test[WORST_GROUP])
        if WORST_GROUP in test
        else find_worst_group(test) or find_worst_group_by_totals(test)
    )


def format_gap(gap: GroupGap | None) -> str:
    if gap is None:
        return "Not known: no two groups have at least five test speakers each."
    rates = (
        f"Highest error rate of {gap.groups} groups: {gap.fact} {gap.group}, {show_percent(gap.wer)} against "
        f"{show_percent(gap.others_wer)} of everybody else, {format_points(gap.gap)} points"
    )
    if gap.interval is None:
        return f"{rates}; without an interval, since errors were not counted by speaker."
    at_once = f", for all {gap.groups} groups at once" if gap.groups > 1 else ""
    chance = "" if gap.interval[0] > 0 else "; not significant"
    return f"{rates} (95 % interval {format_interval(gap.interval)}{at_once}){chance}."


def _is_noiseless_twin(other: RunRecord, run: RunRecord) -> bool:
    """Whether they are one recipe, of which the other adds no noise and this one does."""
    if other is run or not (other.is_federated and run.is_federated):
        return False
    theirs, ours = (one.header.get("plan", {}).get("noise_multiplier") for one in (other, run))
    recipes = [one.settings_but(own=("about", "paper"), privacy=NOISE_SETTINGS) for one in (other, run)]
    return theirs == 0 and ours != 0 and recipes[0] == recipes[1]


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
    baseline, base, compared = start, before, {first.label: first.tests}
    if others:
        baseline, base = first.label, first.tests
        compared = {start: before} | {run.label: run.tests for run in others}
    pairs = [
        _Pair(label, name, test, base[name])
        for label, tests in compared.items()
        for name, test in tests.items()
        if name in base and "wer" in test
    ]
    reasons = [
        "" if not others and LESS_START in pair.test else explain_incomparable(pair.test, pair.base) for pair in pairs
    ]
    rows = [_row(pair, first) for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    if not rows:
        return None
    omitted = dict.fromkeys((pair.label, reason) for pair, reason in zip(pairs, reasons, strict=True) if reason)
    noted = "".join(f" Not compared: {labels} ({reason})." for labels, reason in merge_labels(omitted))
    table, tests = make_table("paired", rows, baseline=baseline, omitted=noted), {row[1] for row in rows}
    return table if len(tests) > 1 else replace(table.without_column(1), title=f"{table.title} ({tests.pop()})")


def _common_start(runs: Sequence[RunRecord]) -> Record:
    """The tests of the model that all runs started from; nothing where they started from different ones."""
    starts: list[Record] = [run.results["start"]["test"] for run in runs if run.results.get("start")]
    rates = [{name: test.get("wer") for name, test in start.items()} for start in starts]
    return starts[0] if starts and all(rate == rates[0] for rate in rates) else {}


def _row(pair: _Pair, first: RunRecord) -> Row:
    which = pair.label, first.test_title(pair.name)
    if (less := pair.test.get(LESS_START)) is not None:  # a release, compared with its start alone
        return *which, format_points(less["difference"]), format_interval(less["difference_interval"]), NOTHING
    found = compute_difference(pair.test, pair.base)
    people = f"{found.better:,} / {found.worse:,} / {found.speakers - found.better - found.worse:,}"
    return *which, format_points(found.difference), format_interval(found.interval), people
