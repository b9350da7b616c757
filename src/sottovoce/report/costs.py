"""What a run's privacy costs: its error rate beside the same run without noise, or beside its start; and who pays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sottovoce.evaluation.gaps import WORST_GROUP, Gap, gap_from_json, worst_by_totals, worst_group
from sottovoce.evaluation.paired import LESS_START, difference, why_not
from sottovoce.evaluation.paired_table import between, points
from sottovoce.evaluation.per_speaker import Interval
from sottovoce.report.cells import percent
from sottovoce.report.records import RunRecord

ITS_START = "start"
# Of a recipe's privacy: what two runs may differ in that are the same but for noise.
NOISE_SETTINGS = (
    "noise_multiplier",
    "sigma_dp",
    "target_epsilon",
    "accountant",
    "epsilon_budget",
    "delta",
    "extrapolate",
    "mode",
)


@dataclass(frozen=True)
class PrivacyCost:
    """The error rate on `test`, and how far it is from another's, paired by speaker; None where nothing is beside it.

    `base` is that of a run without noise, by its label, or of the start.
    """

    test: str
    wer: float
    base: str | None = None
    difference: float | None = None
    interval: Interval | None = None

    @property
    def words(self) -> str:
        told = f"Word error rate on {self.test}: {percent(self.wer)}"
        if self.base is None or self.difference is None:
            return f"{told}."
        beside = "the model it started from" if self.base == ITS_START else f"{self.base}, the same without noise"
        by = f"{points(self.difference)} points beside {beside}"
        if self.interval is None:
            return f"{told}, {by}; too few speakers for an interval."
        low, high = self.interval
        meaning = "fewer errors" if high < 0 else "more errors" if low > 0 else "not told apart"
        return f"{told}, {by} (95 % interval {between(self.interval)}, paired by speaker): {meaning}."

    def as_json(self) -> dict[str, Any]:
        beside = {"beside": self.base, "difference": self.difference, "difference_interval": self.interval}
        return {"test": self.test, "wer": self.wer} | ({} if self.base is None else beside)


def cost_of(run: RunRecord, runs: Sequence[RunRecord]) -> PrivacyCost | None:
    """Beside the same run without noise, where `runs` has one with the same test speakers; else beside its start."""
    name = run.headline_test
    test = {} if name is None else run.tests[name]
    if name is None or "wer" not in test:
        return None
    for other in runs:
        if _is_noiseless_twin(other, run) and not why_not(test, theirs := other.tests.get(name, {})):
            found = difference(test, theirs)
            return PrivacyCost(name, test["wer"], other.label, found.difference, found.interval)
    if (told := test.get(LESS_START)) is not None:
        low_high = told["difference_interval"]
        return PrivacyCost(
            name, test["wer"], ITS_START, told["difference"], None if low_high is None else tuple(low_high)
        )
    start = run.start_tests.get(name, {})
    if not start or why_not(test, start):
        return PrivacyCost(name, test["wer"])
    found = difference(test, start)
    return PrivacyCost(name, test["wer"], ITS_START, found.difference, found.interval)


def gap_of(run: RunRecord) -> Gap | None:
    """The worst group of the test set that the run is known by, as far as it can be told."""
    name = run.headline_test
    test = {} if name is None else run.tests[name]
    if "wer" not in test:
        return None
    return gap_from_json(test[WORST_GROUP]) if WORST_GROUP in test else worst_group(test) or worst_by_totals(test)


def gap_words(gap: Gap | None) -> str:
    if gap is None:
        return "Not known: no two groups of at least five test speakers each can be told apart."
    told = (
        f"Worst understood of {gap.groups} groups: {gap.fact} {gap.group}, {percent(gap.wer)} against "
        f"{percent(gap.others_wer)} of everybody else, {points(gap.gap)} points"
    )
    if gap.interval is None:
        return f"{told}; without an interval, since nobody’s words were counted."
    at_once = f", for all {gap.groups} groups at once" if gap.groups > 1 else ""
    chance = "" if gap.interval[0] > 0 else "; chance alone may do that"
    return f"{told} (95 % interval {between(gap.interval)}{at_once}){chance}."


def _is_noiseless_twin(other: RunRecord, run: RunRecord) -> bool:
    """Whether they are one recipe, of which the other adds no noise and this one does."""
    if other is run or not (other.is_federated and run.is_federated):
        return False
    theirs, ours = (one.header.get("plan", {}).get("noise_multiplier") for one in (other, run))
    return theirs == 0 and ours != 0 and _but_noise(other) == _but_noise(run)


def _but_noise(run: RunRecord) -> str:
    return run.settings_but(own=("about", "paper"), privacy=NOISE_SETTINGS)
