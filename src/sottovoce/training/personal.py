"""Personal parts in a simulation: what one's own part does for clients, on speech that they have held out.

    best model ─┬─► recognises what people hold out                           public
                └─► everybody's part, trained on their training speech ─► …   personal, where the guard keeps it
                                                                              unguarded, in any case

It comes after the last round and writes `personal.json` alone: no update, checkpoint, ledger or result depends on it.
What it says of single clients is private, no ε covers it, and a release is refused it.

Shapes: N people, U utterances; columns as in `error_rates`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.base.files import write_json
from sottovoce.base.seeds import keyed_order
from sottovoce.data.loading import Speech
from sottovoce.data.population import Client
from sottovoce.data.store import Store
from sottovoce.evaluation.error_rates import count_word_errors
from sottovoce.evaluation.score import FACTS, unite_spellings
from sottovoce.federated.client_wer import held_out_speech
from sottovoce.federated.personal import (
    Decision,
    Personaliser,
    build_personaliser,
    order_speech,
    take_speech,
    train_and_judge,
)
from sottovoce.models.recogniser import Recogniser
from sottovoce.training.assemble import Federation
from sottovoce.training.run_folder import PERSONAL, RunFolder

_PEOPLE = 1  # decides who is among those asked for, in all runs alike

WAYS = ("public", "unguarded", "personal")


@dataclass(frozen=True, eq=False)
class Person:
    """A client with speech to train on and held-out speech to be tested on."""

    client: Client
    speech: Speech
    held_out: NDArray[np.int64]
    texts: tuple[str, ...]
    facts: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class ChosenPeople:
    """The people asked for; of those looked at, so many lack speech to be tested on, or to train on."""

    people: tuple[Person, ...]
    without_holdout: int
    without_speech: int


def write_personal_results(federation: Federation, run: RunFolder, best: Recogniser) -> None:
    """Write what the recipe's `personal` asks for; nothing where it asks for nothing."""
    settings = federation.settings.personal
    if settings is None:
        return
    check_invariant(not federation.is_release, "a release says nothing of single clients")
    federation.context.on_stage("personal parts")
    recipe, context = federation.recipe, federation.context
    personaliser = build_personaliser(
        best, federation.population, settings, seed=recipe.seed, device=context.device, decoding=recipe.decoding
    )
    chosen = choose_people(personaliser, people=settings.people)
    measured = measure_people(personaliser, chosen.people, amounts=settings.amounts)
    results = {
        "accounted": False,
        "part": settings.part,
        "parameters": personaliser.parameter_count,
        "folds": settings.folds,
        "margin": settings.margin,
        "population_size": len(federation.population),
        "people": len(chosen.people),
        "without_holdout": chosen.without_holdout,
        "without_speech": chosen.without_speech,
        "per_client": measured,
    }
    write_json(run.path / PERSONAL, results)
    kept = sum(person["is_kept"] for person in measured)
    context.say(f"personal parts of {len(chosen.people):,} clients: {kept:,} are kept by the guard")


def choose_people(personaliser: Personaliser, *, people: int | str) -> ChosenPeople:
    """So many clients who can train and be tested: the same whatever the seed, in an order of their names' keys."""
    population, store = personaliser.context.population, personaliser.context.store
    keys = np.array([client.key for client in population], dtype=np.uint64)
    found: list[Person] = []
    without_holdout = without_speech = 0
    for index in keyed_order(keys, _PEOPLE, "personal").tolist():
        if len(found) == people:
            break
        client = population.client(index)
        spoken = held_out_speech(store, client)
        if not spoken:
            without_holdout += 1
            continue
        try:
            speech = personaliser.speech(client)
        except InputError:
            without_speech += 1
            continue
        rows = np.array([row for row, _ in spoken], dtype=np.int64)
        found.append(Person(client, speech, rows, tuple(text for _, text in spoken), _facts(store, client)))
    united = unite_spellings([person.facts for person in found])
    known = [Person(p.client, p.speech, p.held_out, p.texts, facts) for p, facts in zip(found, united, strict=True)]
    return ChosenPeople(tuple(known), without_holdout, without_speech)


def _facts(store: Store, client: Client) -> dict[str, str]:
    """What the corpus knows of the client, where that is one person."""
    if len(client.speakers) != 1:
        return {}
    known = store.user(int(client.speakers[0])).metadata
    return {fact: str(known[fact]) for fact in FACTS if known.get(fact)}


def measure_people(
    personaliser: Personaliser, people: Sequence[Person], *, amounts: Sequence[int]
) -> list[dict[str, Any]]:
    """What `personal.json` says of each of `people`, who have numbers for names: the same in repeats with other seeds.

    `training` is how well the public model does on what they train on: who is worst by that was not chosen by the
    speech they are tested on.
    """
    held_out = _recognise_all(personaliser, [person.held_out for person in people])
    training = _recognise_all(personaliser, [person.speech.rows for person in people])
    return [
        _measure_person(personaliser, person, public, trained_on, amounts=amounts) | {"client": number}
        for number, (person, public, trained_on) in enumerate(zip(people, held_out, training, strict=True), start=1)
    ]


def _recognise_all(personaliser: Personaliser, rows: Sequence[NDArray[np.int64]]) -> list[list[str]]:
    """The public model's texts for each person, all recognised together."""
    if not rows:
        return []
    texts = personaliser.recognise(personaliser.model, np.concatenate(rows))
    ends = np.cumsum([len(own) for own in rows]).tolist()
    return [texts[end - len(own) : end] for end, own in zip(ends, rows, strict=True)]


def _measure_person(
    personaliser: Personaliser,
    person: Person,
    public: Sequence[str],
    training: Sequence[str],
    *,
    amounts: Sequence[int],
) -> dict[str, Any]:
    store, speech = personaliser.context.store, person.speech
    said = [store.utterance(row).text or "" for row in speech.rows.tolist()]
    on_training = count_word_errors(said, training)
    public_U4 = count_word_errors(person.texts, public)
    public_errors = int(public_U4[:, 1:].sum())

    def measure(places: NDArray[np.int64]) -> dict[str, Any]:
        own, recognised = take_speech(speech, places), [training[place] for place in places.tolist()]
        trained, decision = train_and_judge(personaliser, person.client, own, public=recognised)
        unguarded = public_errors
        if trained is not None:
            texts = personaliser.recognise(personaliser.with_part(trained), person.held_out)
            unguarded = int(count_word_errors(person.texts, texts)[:, 1:].sum())
        return _describe(decision, own, public=public_errors, unguarded=unguarded)

    order = order_speech(personaliser, speech)
    return {
        "groups": dict(person.facts),
        "words": int(public_U4[:, 0].sum()),
        "training": {"words": int(on_training[:, 0].sum()), "errors": int(on_training[:, 1:].sum())},
        **measure(np.arange(len(speech.rows))),
        "by_amount": [measure(np.sort(order[:amount])) for amount in sorted(set(amounts)) if amount < len(order)],
    }


def _describe(decision: Decision, speech: Speech, *, public: int, unguarded: int) -> dict[str, Any]:
    errors = {"public": public, "unguarded": unguarded, "personal": unguarded if decision.is_kept else public}
    return {
        "utterances": len(speech.rows),
        "seconds": round(3600 * speech.hours, 2),
        "is_kept": decision.is_kept,
        "errors": errors,
        "guard": decision.as_json(),
    }
