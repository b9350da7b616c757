"""Which of two models understands people better: the difference of their error rates on the same speech, by speaker.

Some people are hard for every model. Drawing the same people for both takes that out of the difference, which so is
far surer than two rates with an interval each. What is compared is what `results.json` says of a test set
(`Evaluation.as_json`), so that runs which have been tested need not be heard again.

Shapes: S speakers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import Record as Record
from sottovoce.base.seeds import stream
from sottovoce.evaluation.evaluate import FACTS, UNKNOWN, in_order
from sottovoce.evaluation.per_speaker import CONFIDENCE, FEWEST_SPEAKERS, Interval, drawn_rates, percentiles

PAIRED_DRAWS = 10_000  # of few people nearly all are held, so that the ends hang on a few draws
LESS_START = "less_start"  # in a release's results: the difference from the model that it started from
CROSSED = " × "  # between the facts of an intersection, and between its values


@dataclass(frozen=True, slots=True)
class Difference:
    """How the first model's error rate differs from the second's among some people: below 0, the first is better.

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
    def is_told_apart(self) -> bool:
        """Whether the interval leaves 0 out."""
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
    """Two models on the same speech: among all, by group, and where groups meet in at least `FEWEST_SPEAKERS` people.

    `groups` has facts as keys, `intersections` several with `CROSSED` between them; `too_small` intersections are left
    out.
    """

    everybody: Difference
    groups: Mapping[str, tuple[Difference, ...]]
    intersections: Mapping[str, tuple[Difference, ...]]
    too_small: int

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines. Rates are shares (0.05 is five per cent); intervals hold 95 % of the draws."""
        return self.everybody.as_json() | {
            "groups": _named(self.groups),
            "intersections": _named(self.intersections),
            "intersections_too_small": self.too_small,
        }


def compare(first: Record, second: Record, *, seed: int = 1) -> Comparison:
    """The first's rates less the second's, of two tests on the same speech; `seed` decides the bootstrap's draws."""
    counts_S3 = _paired(first, second)
    in_this_order = sorted(first["per_speaker"], key=lambda person: str(person["speaker"]))
    known = [person.get("groups") or {} for person in in_this_order]
    groups = {}
    for fact in FACTS:
        values = [person.get(fact, UNKNOWN) for person in known]
        if present := in_order(values):
            members = {value: [place for place, own in enumerate(values) if own == value] for value in present}
            groups[fact] = tuple(_among(counts_S3, who, fact, value, seed=seed) for value, who in members.items())
    intersections, too_small = _intersections(counts_S3, known, seed=seed)
    return Comparison(_among_all(counts_S3, seed=seed), groups, intersections, too_small)


def difference(first: Record, second: Record, *, seed: int = 1) -> Difference:
    """The same among all people alone."""
    return _among_all(_paired(first, second), seed=seed)


def why_not(first: Record, second: Record) -> str:
    """Why two tests cannot be compared; empty where they can. Older results say less, and what neither says is taken
    to be the same."""
    for test in (first, second):
        if "wer" not in test:
            return "a model that writes nothing down has no word error rate"
        if not people(test):
            return "there is no count of words by speaker, as in releases and in results kept in brief"
    for name, words in (("store", "stores"), ("normalisation", "normalisations of text")):
        one, other = first.get(name), second.get(name)
        if None not in (one, other) and one != other:
            return f"they were tested with other {words}, {_told(one)} and {_told(other)}"
    ours, theirs = dict(people(first)), dict(people(second))
    if ours.keys() != theirs.keys():
        shared = len(ours.keys() & theirs.keys())
        return f"they were tested on other people ({len(ours):,} and {len(theirs):,}, {shared:,} in both)"
    if ours != theirs:
        return "the same people said other texts"
    if None not in (first.get("speech"), second.get("speech")) and first["speech"] != second["speech"]:
        return "the same people were tested with other recordings or texts"
    return ""


def people(test: Record) -> list[tuple[str, int]]:
    """The speakers of a test and how many words each has said; none where a release has left that out."""
    told = test.get("per_speaker") or ()
    return [(person["speaker"], person["words"]) for person in told if "words" in person]


def errors(test: Record) -> NDArray[np.int64]:
    """Of each speaker, from rates that were written with all their digits; 0 for one who has said no word."""
    return np.array([round((person["wer"] or 0.0) * person["words"]) for person in test["per_speaker"]], dtype=np.int64)


def _paired(first: Record, second: Record) -> NDArray[np.int64]:
    """Words, the first's errors and the second's, of each speaker: [S, 3], in the order of names, so that the draws do
    not hang on which of the two comes first."""
    if reason := why_not(first, second):
        raise InputError(f"cannot be compared: {reason}")
    one, other = (sorted(zip(people(test), errors(test).tolist(), strict=True)) for test in (first, second))
    rows = [(words, ours, theirs) for ((_, words), ours), (_, theirs) in zip(one, other, strict=True)]
    return np.array(rows, dtype=np.int64)


def _intersections(
    counts_S3: NDArray[np.int64], known: Sequence[Mapping[str, str]], *, seed: int
) -> tuple[dict[str, tuple[Difference, ...]], int]:
    """Where two facts or all meet, of people of whom they are known; and how many have too few people.

    A fact that is the same of everybody is no group to meet.
    """
    telling = [fact for fact in FACTS if len({person[fact] for person in known if fact in person}) > 1]
    found: dict[str, tuple[Difference, ...]] = {}
    too_small = 0
    for facts in (crossed for size in range(2, len(telling) + 1) for crossed in combinations(telling, size)):
        cells: dict[str, list[int]] = {}
        for place, person in enumerate(known):
            if person.keys() >= {*facts}:
                cells.setdefault(CROSSED.join(person[fact] for fact in facts), []).append(place)
        large = {value: who for value, who in sorted(cells.items()) if len(who) >= FEWEST_SPEAKERS}
        too_small += len(cells) - len(large)
        if large:
            fact = CROSSED.join(facts)
            found[fact] = tuple(_among(counts_S3, who, fact, value, seed=seed) for value, who in large.items())
    return found, too_small


def _among_all(counts_S3: NDArray[np.int64], *, seed: int) -> Difference:
    return _among(counts_S3, range(len(counts_S3)), "", "all", seed=seed)


def _among(counts_S3: NDArray[np.int64], members: Sequence[int], fact: str, value: str, *, seed: int) -> Difference:
    """Of the people in the rows `members`."""
    words_S, first_S, second_S = counts_S3[list(members)].T
    words, less_S = int(words_S.sum()), first_S - second_S
    interval, speaking = None, int((words_S > 0).sum())
    if speaking >= FEWEST_SPEAKERS:
        generator = stream(seed, "evaluation", "paired", fact, value)
        drawn_D = drawn_rates(words_S, less_S, generator=generator, draws=PAIRED_DRAWS)
        interval = percentiles(drawn_D, confidence=expanded(CONFIDENCE, speakers=speaking))
    return Difference(
        name=value,
        speakers=len(members),
        words=words,
        first=int(first_S.sum()) / words if words else None,
        second=int(second_S.sum()) / words if words else None,
        interval=interval,
        better=int((less_S < 0).sum()),
        worse=int((less_S > 0).sum()),
    )


def expanded(confidence: float, *, speakers: int) -> float:
    """The share of the draws that has to be held so that the truth is, `confidence` of the time.

    Draws from few people vary less than people do: as if the variance were divided by n, and its being an estimate were
    forgotten. Expanded percentiles mend both (Hesterberg, The American Statistician 69(4), 2015).

    >>> [round(expanded(0.95, speakers=n), 4) for n in (5, 20, 1000)]
    [0.9981, 0.9682, 0.9504]
    """
    reach = math.sqrt(speakers / (speakers - 1)) * stdtrit(speakers - 1, (1 + confidence) / 2)
    return float(1 - 2 * ndtr(-reach))


def _named(groups: Mapping[str, Sequence[Difference]]) -> dict[str, dict[str, Any]]:
    return {fact: {one.name: one.as_json() for one in found} for fact, found in groups.items()}


def _told(value: Any) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)
