"""Whom a model understands worst: the group whose error rate is furthest above that of everybody else.

Whoever looks at many groups finds one that is worst, by chance if by nothing else. The interval is therefore made to
hold for all groups that were looked at, at once (Bonferroni), and so for the one that was picked.

Shapes: S speakers.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.parsing import Record
from sottovoce.base.seeds import stream
from sottovoce.evaluation.evaluate import FACTS, OTHERS, UNKNOWN, pooled
from sottovoce.evaluation.paired import PAIRED_DRAWS, errors, expanded, people
from sottovoce.evaluation.per_speaker import CONFIDENCE, FEWEST_SPEAKERS, Interval, drawn_rates, percentiles

WORST_GROUP = "worst_group"  # in a release's results: nobody can find it there afterwards


@dataclass(frozen=True, slots=True)
class Gap:
    """How much more often than everybody else one group is misheard, of `groups` that have enough people.

    The interval holds for all of them at once, 95 % of the time; None where nobody's words were counted.
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


def gap_from_json(told: Record) -> Gap:
    low, high = told["interval"]
    return Gap(**{name: told[name] for name in ("fact", "group", "groups", "wer", "others_wer")}, interval=(low, high))


def worst_by_totals(test: Record) -> Gap | None:
    """The same without an interval, of results that count words by group alone: older releases, and runs in brief."""
    if not test.get("groups"):
        return None
    everybody = _totals(test)
    gaps = []
    for fact, groups in test["groups"].items():
        for value, group in groups.items():
            words, wrong = _totals(group)
            others = everybody[0] - words, everybody[1] - wrong
            enough = min(group["speakers"], test["speakers"] - group["speakers"]) >= FEWEST_SPEAKERS
            if value not in (OTHERS, UNKNOWN) and enough and words and others[0]:
                gaps.append((fact, value, wrong / words, others[1] / others[0]))
    if not gaps:
        return None
    fact, value, wer, others_wer = max(gaps, key=lambda gap: gap[2] - gap[3])
    return Gap(fact, value, groups=len(gaps), wer=wer, others_wer=others_wer, interval=None)


def _totals(counted: Record) -> tuple[int, int]:
    return counted["words"], sum(counted[name] for name in ("substitutions", "deletions", "insertions"))


def worst_group(test: Record) -> Gap | None:
    """Of what `results.json` says of a test set; None where no group of at least `FEWEST_SPEAKERS` people who speak has
    as many others beside it."""
    if not people(test):
        return None
    words_S = np.array([person["words"] for person in test["per_speaker"]], dtype=np.int64)
    errors_S = errors(test)
    members = _groups(test, words_S > 0)
    if not members:
        return None

    def rates(name: tuple[str, str]) -> tuple[float, float]:
        inside_S = members[name]
        ours, others = (int(errors_S[who].sum()) / int(words_S[who].sum()) for who in (inside_S, ~inside_S))
        return ours, others

    worst = max(members, key=lambda name: rates(name)[0] - rates(name)[1])
    inside_S = members[worst]
    generator = stream(1, "evaluation", "gap", *worst)
    drawn_D = [
        drawn_rates(words_S[who], errors_S[who], generator=generator, draws=PAIRED_DRAWS)
        for who in (inside_S, ~inside_S)
    ]
    draws = min(map(len, drawn_D))  # a draw of nobody who speaks has no rate
    fewest = min(int((words_S[who] > 0).sum()) for who in (inside_S, ~inside_S))
    confidence = expanded(1 - (1 - CONFIDENCE) / len(members), speakers=fewest)
    interval = percentiles(drawn_D[0][:draws] - drawn_D[1][:draws], confidence=confidence)
    wer, others_wer = rates(worst)
    return Gap(*worst, groups=len(members), wer=wer, others_wer=others_wer, interval=interval)


def _groups(test: Record, speaks_S: NDArray[np.bool_]) -> dict[tuple[str, str], NDArray[np.bool_]]:
    """(fact, value) of groups that are large enough, with who is in them. Small ones are one, as in a release."""
    found = {}
    known = [person.get("groups") or {} for person in test["per_speaker"]]
    for fact in FACTS:
        values = np.array(pooled([person.get(fact, UNKNOWN) for person in known], smallest=FEWEST_SPEAKERS))
        for value in sorted({*values.tolist()} - {OTHERS, UNKNOWN}):
            inside_S = values == value
            if min((inside_S & speaks_S).sum(), (~inside_S & speaks_S).sum()) >= FEWEST_SPEAKERS:
                found[fact, value] = inside_S
    return found
