"""Which of two models makes fewer errors, and on which group of speakers a model makes most.

Some speakers are hard for every model. Drawing the same speakers for both takes that out of the difference, whose
interval is then far narrower than those of the two rates. Both read what `results.json` says of a test set
(`Evaluation.as_json`): nothing is recognised again.

Shapes: S speakers, D draws.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import Record
from sottovoce.base.seeds import stream
from sottovoce.evaluation.error_rates import CONFIDENCE, FEWEST_SPEAKERS, Interval, bootstrap_rates, percentile_interval
from sottovoce.evaluation.score import FACTS, OTHERS, UNKNOWN, group_speakers

SEED = 1  # of the bootstrap's draws
PAIRED_DRAWS = 10_000  # intervals of few speakers lie far out, where only a few draws are
LESS_START = "less_start"  # in a release's results: the difference from the model that it started from
WORST_GROUP = "worst_group"  # in a release's results, which no longer say who was in which group
CROSSED = " × "  # between the facts of an intersection, and between its values


@dataclass(frozen=True, slots=True)
class Difference:
    """How the first model's error rate differs from the second's among some speakers: below 0, the first is better.

    `better` of them have fewer errors with the first, `worse` more. Rates are None where no word was said.
    """

    name: str
    speakers: int
    words: int
    first: float | None
    second: float | None
    interval: Interval | None
    better: int
    worse: int

    @property
    def difference(self) -> float | None:
        return None if self.first is None or self.second is None else self.first - self.second

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def in_brief(self) -> dict[str, Any]:
        """What a release may say: it counts nobody."""
        return {"difference": self.difference, "difference_interval": self.interval}

    def as_json(self) -> dict[str, Any]:
        return {
            "speakers": self.speakers,
            "words": self.words,
            "first_wer": self.first,
            "second_wer": self.second,
            **self.in_brief(),
            "better": self.better,
            "worse": self.worse,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same speech: all speakers, by group, and by intersections of `FEWEST_SPEAKERS` or more.

    `groups` has facts as keys, `intersections` several joined by `CROSSED`; `too_small` intersections are left out.
    """

    everybody: Difference
    groups: Mapping[str, tuple[Difference, ...]]
    intersections: Mapping[str, tuple[Difference, ...]]
    too_small: int

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines. Rates are shares (0.05 is five per cent); intervals hold 95 % of the draws."""
        return self.everybody.as_json() | {
            "groups": _by_name(self.groups),
            "intersections": _by_name(self.intersections),
            "intersections_too_small": self.too_small,
        }


@dataclass(frozen=True, slots=True)
class GroupGap:
    """How much higher one group's error rate is than everybody else's, of `groups` that have enough speakers.

    The interval holds for all of them at once, 95 % of the time; None where words were not counted by speaker.
    """

    fact: str
    group: str
    groups: int
    wer: float
    others_wer: float
    interval: Interval | None

    @property
    def gap(self) -> float:
        return self.wer - self.others_wer

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap}


def compare_tests(first: Record, second: Record) -> Comparison:
    """The first's rates less the second's, of two tests on the same speech."""
    counts_S3 = _paired_counts(first, second)
    by_name = sorted(first["per_speaker"], key=lambda speaker: str(speaker["speaker"]))
    known = [speaker.get("groups") or {} for speaker in by_name]
    groups = {
        fact: tuple(_difference(counts_S3[who], fact, value) for value, who in found.items())
        for fact, found in group_speakers(known).items()
    }
    intersections, too_small = _intersections(counts_S3, known)
    return Comparison(_difference(counts_S3, "", "all"), groups, intersections, too_small)


def compute_difference(first: Record, second: Record) -> Difference:
    """`compare_tests` for all speakers together only."""
    return _difference(_paired_counts(first, second), "", "all")


def explain_incomparable(first: Record, second: Record) -> str:
    """Why two tests cannot be compared; empty where they can. What older results do not say is taken to be equal."""
    for test in (first, second):
        if "wer" not in test:
            return "a model that writes no text has no word error rate"
        if not count_words_by_speaker(test):
            return "there is no count of words by speaker, as in releases and in results kept in brief"
    for name, words in (("store", "stores"), ("normalisation", "normalisations of text")):
        one, other = first.get(name), second.get(name)
        if None not in (one, other) and one != other:
            return f"they were tested with other {words}, {_format_setting(one)} and {_format_setting(other)}"
    ours, theirs = dict(count_words_by_speaker(first)), dict(count_words_by_speaker(second))
    if ours.keys() != theirs.keys():
        shared = len(ours.keys() & theirs.keys())
        return f"they were tested on other speakers ({len(ours):,} and {len(theirs):,}, {shared:,} in both)"
    if ours != theirs:
        return "the same speakers said other texts"
    if None not in (first.get("speech"), second.get("speech")) and first["speech"] != second["speech"]:
        return "the same speakers were tested with other recordings or texts"
    return ""


def count_words_by_speaker(test: Record) -> list[tuple[str, int]]:
    """The speakers of a test and how many words each has said; none where a release has left that out."""
    speakers = test.get("per_speaker") or ()
    return [(speaker["speaker"], speaker["words"]) for speaker in speakers if "words" in speaker]


def count_errors_by_speaker(test: Record) -> NDArray[np.int64]:
    """From rates that were written with all their digits; 0 for a speaker who has said no word."""
    counts = [round((speaker["wer"] or 0.0) * speaker["words"]) for speaker in test["per_speaker"]]
    return np.array(counts, dtype=np.int64)


def expand_confidence(confidence: float, *, speakers: int) -> float:
    """The share of the draws that has to be held so that the truth is, `confidence` of the time.

    Draws from few people vary less than people do: as if the variance were divided by n, and its being an estimate were
    forgotten. Expanded percentiles mend both (Hesterberg, The American Statistician 69(4), 2015).

    >>> [round(expand_confidence(0.95, speakers=n), 4) for n in (5, 20, 1000)]
    [0.9981, 0.9682, 0.9504]
    """
    reach = math.sqrt(speakers / (speakers - 1)) * stdtrit(speakers - 1, (1 + confidence) / 2)
    return float(1 - 2 * ndtr(-reach))


def read_gap(record: Record) -> GroupGap:
    """What `GroupGap.as_json` has written."""
    low, high = record["interval"]
    names = ("fact", "group", "groups", "wer", "others_wer")
    return GroupGap(**{name: record[name] for name in names}, interval=(low, high))


def find_worst_group(test: Record) -> GroupGap | None:
    """The group whose error rate is furthest above everybody else's.

    One of many groups is worst by chance if by nothing else. The interval is therefore made to hold for all groups at
    once (Bonferroni), and so for the one that was picked. None where no group of at least `FEWEST_SPEAKERS` people who
    speak has as many others beside it.
    """
    if not count_words_by_speaker(test):
        return None
    words_S = np.array([speaker["words"] for speaker in test["per_speaker"]], dtype=np.int64)
    errors_S = count_errors_by_speaker(test)
    members = _large_groups(test, words_S > 0)
    if not members:
        return None

    def rates(name: tuple[str, str]) -> tuple[float, float]:
        inside_S = members[name]
        ours, others = (int(errors_S[who].sum()) / int(words_S[who].sum()) for who in (inside_S, ~inside_S))
        return ours, others

    worst = max(members, key=lambda name: rates(name)[0] - rates(name)[1])
    sides = members[worst], ~members[worst]
    generator = stream(SEED, "evaluation", "gap", *worst)
    inside_D, outside_D = (
        bootstrap_rates(words_S[who], errors_S[who], generator=generator, draws=PAIRED_DRAWS) for who in sides
    )
    draws = min(len(inside_D), len(outside_D))  # a draw of nobody who speaks has no rate
    fewest = min(int((words_S[who] > 0).sum()) for who in sides)
    confidence = expand_confidence(1 - (1 - CONFIDENCE) / len(members), speakers=fewest)
    interval = percentile_interval(inside_D[:draws] - outside_D[:draws], confidence=confidence)
    wer, others_wer = rates(worst)
    return GroupGap(*worst, groups=len(members), wer=wer, others_wer=others_wer, interval=interval)


def find_worst_group_by_totals(test: Record) -> GroupGap | None:
    """The same without an interval, of results that count words by group only: older releases, and runs in brief."""
    if not test.get("groups"):
        return None
    all_words, all_errors = _totals(test)
    gaps = []
    for fact, groups in test["groups"].items():
        for value, group in groups.items():
            words, errors = _totals(group)
            enough = min(group["speakers"], test["speakers"] - group["speakers"]) >= FEWEST_SPEAKERS
            if value not in (OTHERS, UNKNOWN) and enough and words and all_words > words:
                gaps.append((fact, value, errors / words, (all_errors - errors) / (all_words - words)))
    if not gaps:
        return None
    fact, value, wer, others_wer = max(gaps, key=lambda gap: gap[2] - gap[3])
    return GroupGap(fact, value, groups=len(gaps), wer=wer, others_wer=others_wer, interval=None)


def _paired_counts(first: Record, second: Record) -> NDArray[np.int64]:
    """Words, the first's errors and the second's, of each speaker by name: [S, 3]."""
    if reason := explain_incomparable(first, second):
        raise InputError(f"cannot be compared: {reason}")
    one, other = (
        sorted(zip(count_words_by_speaker(test), count_errors_by_speaker(test).tolist(), strict=True))
        for test in (first, second)
    )
    rows = [(words, ours, theirs) for ((_, words), ours), (_, theirs) in zip(one, other, strict=True)]
    return np.array(rows, dtype=np.int64)


def _intersections(
    counts_S3: NDArray[np.int64], known: Sequence[Mapping[str, str]]
) -> tuple[dict[str, tuple[Difference, ...]], int]:
    """Intersections of two or more facts, of speakers of whom they are known; and how many have too few speakers.

    A fact that is the same for everybody divides nobody and is left out.
    """
    varying = [fact for fact in FACTS if len({speaker[fact] for speaker in known if fact in speaker}) > 1]
    found: dict[str, tuple[Difference, ...]] = {}
    too_small = 0
    for facts in (crossed for size in range(2, len(varying) + 1) for crossed in combinations(varying, size)):
        cells: dict[str, list[int]] = {}
        for place, speaker in enumerate(known):
            if speaker.keys() >= {*facts}:
                cells.setdefault(CROSSED.join(speaker[fact] for fact in facts), []).append(place)
        large = {value: who for value, who in sorted(cells.items()) if len(who) >= FEWEST_SPEAKERS}
        too_small += len(cells) - len(large)
        if large:
            fact = CROSSED.join(facts)
            found[fact] = tuple(_difference(counts_S3[who], fact, value) for value, who in large.items())
    return found, too_small


def _difference(counts_S3: NDArray[np.int64], fact: str, value: str) -> Difference:
    """Of the speakers in the rows of `counts_S3`, the group `value` of `fact`."""
    words_S, first_S, second_S = counts_S3.T
    words, less_S = int(words_S.sum()), first_S - second_S
    interval, speaking = None, int((words_S > 0).sum())
    if speaking >= FEWEST_SPEAKERS:
        generator = stream(SEED, "evaluation", "paired", fact, value)
        drawn_D = bootstrap_rates(words_S, less_S, generator=generator, draws=PAIRED_DRAWS)
        interval = percentile_interval(drawn_D, confidence=expand_confidence(CONFIDENCE, speakers=speaking))
    return Difference(
        name=value,
        speakers=len(counts_S3),
        words=words,
        first=int(first_S.sum()) / words if words else None,
        second=int(second_S.sum()) / words if words else None,
        interval=interval,
        better=int((less_S < 0).sum()),
        worse=int((less_S > 0).sum()),
    )


def _large_groups(test: Record, speaks_S: NDArray[np.bool_]) -> dict[tuple[str, str], NDArray[np.bool_]]:
    """(fact, value) of groups that are large enough, with who is in them. Small ones are one, as in a release."""
    known = [speaker.get("groups") or {} for speaker in test["per_speaker"]]
    return {
        (fact, value): inside_S
        for fact, groups in group_speakers(known, smallest=FEWEST_SPEAKERS).items()
        for value, inside_S in groups.items()
        if value not in (OTHERS, UNKNOWN)
        and min((inside_S & speaks_S).sum(), (~inside_S & speaks_S).sum()) >= FEWEST_SPEAKERS
    }


def _totals(counted: Record) -> tuple[int, int]:
    return counted["words"], sum(counted[name] for name in ("substitutions", "deletions", "insertions"))


def _by_name(groups: Mapping[str, Sequence[Difference]]) -> dict[str, dict[str, Any]]:
    return {fact: {one.name: one.as_json() for one in found} for fact, found in groups.items()}


def _format_setting(value: Any) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)
