"""How well models understand the people of the test sets, and how that is said without saying who they are.

A release names and quotes nobody; a report of a simulation quotes voices that nobody owns.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from sottovoce.config import Recipe, SyntheticCorpus
from sottovoce.evaluation.compare import LESS_START, WORST_GROUP, compute_difference, find_worst_group
from sottovoce.evaluation.error_rates import FEWEST_SPEAKERS
from sottovoce.evaluation.losses import select_speech, summarise_figures
from sottovoce.evaluation.score import Selection, score_hypotheses, select_utterances
from sottovoce.models.saved import Recogniser
from sottovoce.store import Store
from sottovoce.training.team import Team

Tested = dict[str, dict[str, Any]]

# An exact rate is a fraction, and its denominator tells how many words somebody has said.
PERSON_DIGITS = 2
QUOTED = 8  # transcripts of a test set, for a report


def score_models(
    models: Sequence[Recogniser],
    recipe: Recipe,
    tests: Mapping[str, tuple[Store, str]],
    team: Team,
    *,
    is_release: bool = False,
) -> list[Tested]:
    """What `results.json` says of each model, by test set.

    Of a release it names nobody, quotes nobody and counts nobody's words, and a group has at least five people: those
    who hold the corpus can look people up by each of these. Nobody can pair such results by speaker any more, so that
    of the first model it says how far it is from the second, which it started from, and of each which group it
    understands worst. One person has one pseudonym in all that is returned. Of models that write no text it says
    their loss, and what else they are measured by.
    """
    if any(model.family.recognition is None for model in models):
        return [_measure_model(model, tests, team) for model in models]
    found = [_score_model(model, recipe, tests, team, is_release=is_release) for model in models]
    if is_release:
        for first, second in pairwise(found):
            for name, test in first.items():
                test[LESS_START] = compute_difference(test, second[name]).in_brief()
        for test in (test for tested in found for test in tested.values()):
            if (gap := find_worst_group(test)) is not None:
                test[WORST_GROUP] = gap.as_json()
        hide_names([test for tested in found for test in tested.values()])
    return found


def _score_model(
    model: Recogniser, recipe: Recipe, tests: Mapping[str, tuple[Store, str]], team: Team, *, is_release: bool
) -> Tested:
    found = {}
    for name, (store, split) in tests.items():
        chosen, collapses = select_utterances(store, split=split), list[int]()
        hypotheses = team.recognise(model, store, chosen.rows, on_collapse=collapses.append)
        smallest = FEWEST_SPEAKERS if is_release else 1
        found[name] = score_hypotheses(
            store, chosen, hypotheses, smallest_group=smallest, collapses=collapses
        ).as_json()
        if may_quote(recipe, store) and not is_release:
            found[name]["samples"] = quotes(chosen, hypotheses)
    return found


def _measure_model(model: Recogniser, tests: Mapping[str, tuple[Store, str]], team: Team) -> Tested:
    return {
        name: summarise_figures(select_speech(model, store, split=split), team.mean_figures(model, store, split=split))
        for name, (store, split) in tests.items()
    }


def may_quote(recipe: Recipe, store: Store) -> bool:
    """Whether a report may quote from `store`: only where the recipe itself has made it, of voices nobody owns."""
    made = recipe.data.prepare
    return isinstance(made, SyntheticCorpus) and store.name == f"synthetic-{made.task}"


def quotes(chosen: Selection, hypotheses: Sequence[str], *, count: int = QUOTED) -> list[dict[str, str]]:
    """Up to `count` transcripts, evenly spread over the set, so that they come from different speakers."""
    picked = sorted({position * len(hypotheses) // count for position in range(count)})
    return [{"reference": chosen.references[row], "hypothesis": hypotheses[row]} for row in picked]


def hide_names(tests: Sequence[dict[str, Any]]) -> None:
    """Give the speakers of `tests` pseudonyms, one person the same in all of them, and round what is said of each."""
    names = sorted({person["speaker"] for test in tests for person in test["per_speaker"]})
    random.SystemRandom().shuffle(names)  # the order of a corpus tells who is who
    numbers = {name: number for number, name in enumerate(names, start=1)}
    for test in tests:
        people = sorted(test["per_speaker"], key=lambda person: numbers[person["speaker"]])
        test["per_speaker"] = [
            {"speaker": f"speaker {numbers[person['speaker']]}", "wer": _rounded(person["wer"])} for person in people
        ]
        test.pop("speech", None)  # who has the corpus could try who was in it
        test["spread"] = {name: _rounded(rate) for name, rate in test["spread"].items()}


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, PERSON_DIGITS)
