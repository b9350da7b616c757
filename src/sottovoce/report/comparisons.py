"""Word error rates of runs compared on the same test speakers: what privacy costs, for which group, and which runs
differ.

Rates of two runs on the same people rise and fall together, so that only differences paired by speaker compare them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.evaluation.compare import (
    LESS_START,
    WORST_GROUP,
    GroupGap,
    compute_difference,
    count_words_by_speaker,
    explain_incomparable,
    find_worst_group,
    find_worst_group_by_totals,
    read_gap,
)
from sottovoce.evaluation.error_rates import Interval
from sottovoce.evaluation.measures import MEASURES
from sottovoce.evaluation.tables import format_interval, format_points
from sottovoce.report.parts import make_table, merge_labels, show_percent
from sottovoce.report.records import Record, RunRecord

ITS_START = "start"
# Of a recipe's privacy: what two runs may differ in that are the same but for noise.
NOISE_SETTINGS = (
    *("noise_multiplier", "sigma_dp", "target_epsilon", "accountant"),
    *("epsilon_budget", "delta", "extrapolate", "mode"),
)
# And in what besides, where the one without noise does not clip either.
CLIP_SETTINGS = ("clip_bound", "share", "normalise", "layer_groups", "alpha", "adaptive", "noise_scope")
NOT_COUNTED = "words are not counted by speaker here"
TOO_FEW = "too few speakers"


@dataclass(frozen=True)
class RateDifference:
    """An error rate less `wer`, that of `base`. Without an interval there is a `reason` for it."""

    base: str
    wer: float
    difference: float
    interval: Interval | None
    reason: str = ""

    @property
    def is_significant(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def certainty(self) -> str:
        """The interval, or why there is none."""
        if self.interval is None:
            return f"without an interval: {self.reason}"
        return f"95 % interval {format_interval(self.interval)}, paired by speaker"

    def compare(self, base: str) -> str:
        """In words, where the base is called `base`."""
        fewer = "fewer errors" if self.difference < 0 else "more errors"
        meaning = "" if self.interval is None else f": {fewer if self.is_significant else 'no significant difference'}"
        return f"{format_points(self.difference)} points compared with {base} ({self.certainty}){meaning}"

    def as_json(self) -> dict[str, Any]:
        return {"wer": self.wer, "difference": self.difference, "difference_interval": self.interval}


@dataclass(frozen=True)
class PrivacyCost:
    """The error rate on `test`, less that of the model it started from and less that of its twin without noise.

    Each is None where there is nothing to compare with. `twin_is` says in what the twin differs.
    """

    test: str
    wer: float
    start: RateDifference | None = None
    twin: RateDifference | None = None
    twin_is: str = ""

    @property
    def words(self) -> str:
        found = [show_percent(self.wer)]
        if self.start is not None:
            found.append(self.start.compare("the model it started from"))
        if self.twin is not None:
            found.append(self.twin.compare(f"{self.twin.base}, {self.twin_is}"))
        return f"Word error rate on {self.test}: {'; '.join(found)}."

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"test": self.test, "wer": self.wer}
        if (beside := self.twin or self.start) is not None:
            found |= {"beside": beside.base, "difference": beside.difference, "difference_interval": beside.interval}
        if self.start is not None:
            found["from_start"] = self.start.as_json()
        if self.twin is not None:
            found["from_twin"] = {"run": self.twin.base, **self.twin.as_json()}
        return found


def privacy_cost(run: RunRecord, runs: Sequence[RunRecord]) -> PrivacyCost | None:
    """What its errors are compared with its start, and with its twin without noise where `runs` has one."""
    name = run.headline_test
    test = {} if name is None else run.tests[name]
    if name is None or "wer" not in test:
        return None
    start = _subtract(test, run.start_tests.get(name, {}), base=ITS_START)
    if (less := test.get(LESS_START)) is not None and start is not None:
        ends = less["difference_interval"]
        interval = None if ends is None else (float(ends[0]), float(ends[1]))
        start = replace(start, difference=less["difference"], interval=interval, reason=TOO_FEW)
    twin = find_noiseless_twin(run, runs)
    if twin is None:
        return PrivacyCost(name, test["wer"], start)
    clipped = "noise" if _clips(twin) or not _clips(run) else "clipping and noise"
    tuned = "" if _recipe(twin, rates=True) == _recipe(run, rates=True) else ", with learning rates of its own"
    found = _subtract(test, twin.tests[name], base=twin.label)
    return PrivacyCost(name, test["wer"], start, found, f"the same without {clipped}{tuned}")


def find_noiseless_twin(run: RunRecord, runs: Sequence[RunRecord]) -> RunRecord | None:
    """Of `runs`, the one of the same recipe that adds no noise; it may have learning rates of its own.

    One that clips alike comes first, then one that does not clip. Of several, the one with the fewest errors on the
    dev speakers: what noise costs is then not understated by rates that do not suit the twin.
    """
    name = run.headline_test
    if name is None or not run.is_federated or not adds_noise(run):
        return None
    twins = [
        other
        for other in runs
        if other is not run
        and other.is_federated
        and not adds_noise(other)
        and _recipe(other, clips=_clips(other)) == _recipe(run, clips=_clips(other))
        and _subtract(run.tests[name], other.tests.get(name, {}), base="") is not None
    ]
    return min(twins, key=lambda other: (_clips(run) and not _clips(other), dev_rate(other)), default=None)


def dev_rate(run: RunRecord) -> float:
    """The error rate on the dev speakers by which its model was chosen; infinite where there is none."""
    model = run.results.get("model") or {}
    rates = (model.get(measure.key("dev")) for measure in MEASURES.values() if measure.is_rate)
    return next((float(rate) for rate in rates if isinstance(rate, int | float)), math.inf)


def _subtract(test: Record, other: Record, *, base: str) -> RateDifference | None:
    """Paired by speaker where words are counted so, else of the plain rates; None if the speech is not the same."""
    if "wer" not in test or "wer" not in other:
        return None
    if not explain_incomparable(test, other):
        found = compute_difference(test, other)
        assert found.difference is not None
        return RateDifference(base, other["wer"], found.difference, found.interval, TOO_FEW)
    is_counted = count_words_by_speaker(test) and count_words_by_speaker(other)
    known = [(test.get(key), other.get(key)) for key in ("store", "speech", "normalisation")]
    if is_counted or any(ours != theirs for ours, theirs in known if None not in (ours, theirs)):
        return None
    return RateDifference(base, other["wer"], test["wer"] - other["wer"], None, NOT_COUNTED)


def adds_noise(run: RunRecord) -> bool:
    """By the ledger; without one, by the recipe."""
    if plan := run.header.get("plan"):
        return bool(plan.get("noise_multiplier") != 0)
    return any(run.privacy_settings.get(name) for name in ("noise_multiplier", "sigma_dp", "target_epsilon"))


def _clips(run: RunRecord) -> bool:
    bound = run.privacy_settings.get("clip_bound")
    return bound is not None and not math.isinf(float(bound))


def _recipe(run: RunRecord, *, clips: bool = False, rates: bool = False) -> str:
    """What twins have in common, as text; with how they clip, and their learning rates, where these count."""
    counted = run if rates else replace(run, config=_drop_rates(run.config))
    others = NOISE_SETTINGS if clips else (*NOISE_SETTINGS, *CLIP_SETTINGS)
    return counted.settings_but(own=("about", "paper"), privacy=others)


def _drop_rates(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {name: _drop_rates(value) for name, value in settings.items() if name != "lr"}


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
