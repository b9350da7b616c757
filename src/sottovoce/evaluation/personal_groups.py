"""Public model and personal part beside one another, person by person, from what `personal.json` says.

Who is worst off is decided by the public model's errors on people's training speech: those who are worst on the speech
that they are tested on were partly unlucky there, and would look better with any other model.

Shapes: N people, D draws.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import Record
from sottovoce.base.seeds import stream
from sottovoce.evaluation.compare import (
    PAIRED_DRAWS,
    SEED,
    Difference,
    GroupGap,
    compute_difference,
    expand_confidence,
    find_worst_group,
)
from sottovoce.evaluation.error_rates import CONFIDENCE, FEWEST_SPEAKERS, Interval, percentile_interval
from sottovoce.evaluation.score import UNKNOWN, group_speakers

EVERYBODY, WORST, LEAST, MOST = "everybody", "worst tenth", "least speech", "most speech"
PUBLIC, PERSONAL, UNGUARDED = "public", "personal", "unguarded"
QUARTER = 4


@dataclass(frozen=True)
class GroupResult:
    """A group of people: the second way's rate is the public model's, `kept` of `tried` parts passed the guard."""

    name: str
    difference: Difference
    kept: int
    tried: int

    @property
    def is_worse(self) -> bool:
        """Whether the first way has more errors by more than its interval."""
        return self.difference.interval is not None and self.difference.interval[0] > 0


@dataclass(frozen=True)
class Recovered:
    """The share of what noise costs that personal parts give back, with its interval; both None where it costs none."""

    share: float | None
    interval: Interval | None


def describe_people(people: Sequence[Record], way: str) -> Record:
    """What one way does for `people`, as `results.json` says it of test speakers."""
    words = sum(person["words"] for person in people)
    return {
        "wer": sum(person["errors"][way] for person in people) / words if words else None,
        "per_speaker": [
            {
                "speaker": f"{person['client']:06d}",
                "words": person["words"],
                "wer": person["errors"][way] / person["words"] if person["words"] else None,
                "groups": person["groups"],
            }
            for person in people
        ],
    }


def pool_seeds(repeats: Sequence[Sequence[Record]]) -> list[dict[str, Any]]:
    """The same people under several seeds as one: words and errors are summed, parts that were kept are counted."""
    found = []
    for of_one in zip(*(sorted(people, key=_number) for people in repeats), strict=True):
        if len({_number(person) for person in of_one}) > 1:
            raise InputError("personal parts of other people under another seed: expected one population")
        first = of_one[0]
        found.append(
            {
                **{name: first[name] for name in ("client", "groups")},
                "utterances": sum(person["utterances"] for person in of_one) / len(of_one),
                "words": sum(person["words"] for person in of_one),
                "errors": {way: sum(person["errors"][way] for person in of_one) for way in first["errors"]},
                "training": {name: sum(person["training"][name] for person in of_one) for name in ("words", "errors")},
                "kept": sum(_kept(person) for person in of_one),
                "tried": sum(_tried(person) for person in of_one),
            }
        )
    return found


def list_groups(people: Sequence[Record]) -> dict[str, list[Record]]:
    """Everybody, the worst tenth, the quarters with least and most speech, and groups of `FEWEST_SPEAKERS` or more."""
    by_rate = sorted(people, key=lambda person: (-_training_rate(person), _number(person)))
    by_amount = sorted(people, key=lambda person: (person["utterances"], _number(person)))
    quarter = len(people) // QUARTER
    found = {EVERYBODY: list(people), WORST: by_rate[: max(round(len(people) / 10), 1)]}
    if quarter:
        found |= {LEAST: by_amount[:quarter], MOST: by_amount[-quarter:]}
    for fact, groups in group_speakers([person["groups"] for person in people], smallest=FEWEST_SPEAKERS).items():
        for value, inside_N in groups.items():
            members = [person for person, is_inside in zip(people, inside_N.tolist(), strict=True) if is_inside]
            if value != UNKNOWN and FEWEST_SPEAKERS <= len(members) < len(people):
                found[f"{fact} {value}"] = members
    return found


def compare_groups(people: Sequence[Record], *, first: str = PERSONAL, second: str = PUBLIC) -> list[GroupResult]:
    """How one way differs from another in each group, paired by person."""
    return [
        GroupResult(
            name,
            compute_difference(describe_people(members, first), describe_people(members, second)),
            sum(_kept(person) for person in members),
            sum(_tried(person) for person in members),
        )
        for name, members in list_groups(people).items()
    ]


def find_worst_gaps(people: Sequence[Record]) -> dict[str, GroupGap | None]:
    """The group that is furthest above everybody else, with the public model and with personal parts."""
    return {way: find_worst_group(describe_people(people, way)) for way in (PUBLIC, PERSONAL)}


def measure_recovered(private: Sequence[Record], quiet: Sequence[Record], *, way: str = PERSONAL) -> Recovered:
    """How much of the errors that noise adds to the public model `way` takes away again, of the same people.

    `quiet` is the twin without noise. People are drawn with all that they have; a draw in which noise costs nothing has
    no share.
    """
    others = {_number(person): person for person in quiet}
    if {_number(person) for person in private} != others.keys():
        raise InputError("the twin without noise has personal parts of other people: expected the same")
    gained_N = np.array([person["errors"][PUBLIC] - person["errors"][way] for person in private], dtype=np.int64)
    cost_N = np.array([p["errors"][PUBLIC] - others[_number(p)]["errors"][PUBLIC] for p in private], dtype=np.int64)
    if cost_N.sum() <= 0:
        return Recovered(None, None)
    share = float(gained_N.sum() / cost_N.sum())
    if len(private) < FEWEST_SPEAKERS:
        return Recovered(share, None)
    drawn = stream(SEED, "evaluation", "recovered").integers(len(private), size=(PAIRED_DRAWS, len(private)))
    gained_D, cost_D = gained_N[drawn].sum(axis=1), cost_N[drawn].sum(axis=1)
    if (cost_D <= 0).mean() > (1 - CONFIDENCE) / 2:
        return Recovered(share, None)
    shares_D = gained_D[cost_D > 0] / cost_D[cost_D > 0]
    return Recovered(
        share, percentile_interval(shares_D, confidence=expand_confidence(CONFIDENCE, speakers=len(private)))
    )


def at_amount(people: Sequence[Record], amount: int) -> list[dict[str, Any]]:
    """Those of `people` who were tried with just so many utterances, with what came of that."""
    return [
        {**person, **{name: found[name] for name in ("utterances", "is_kept", "errors")}}
        for person in people
        for found in person["by_amount"]
        if found["utterances"] == amount
    ]


def _number(person: Record) -> int:
    return int(person["client"])


def _training_rate(person: Record) -> float:
    words = person["training"]["words"]
    return person["training"]["errors"] / words if words else -math.inf


def _kept(person: Mapping[str, Any]) -> int:
    return int(person["kept"] if "kept" in person else person["is_kept"])


def _tried(person: Mapping[str, Any]) -> int:
    return int(person.get("tried", 1))
