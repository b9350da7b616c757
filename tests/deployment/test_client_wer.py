"""How well people are understood, measured where they are: the same sums as in a simulation, and what was accepted."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.deployment.places import CPU, Place, check_same
from tests.deployment.village import NAMES, NUMBERS, Village, content, recipe_of
from tests.tones import pack_tones, say, speaker

from sottovoce.corpora.corpus import RenderedSpeaker
from sottovoce.deployment.consent import words
from sottovoce.deployment.invitation import Invitation, SecureSums
from sottovoce.deployment.messages import Code, Kind, Order
from sottovoce.deployment.network import with_noise_by_clients
from sottovoce.deployment.own_ledger import Quota
from sottovoce.deployment.own_speech import own_client
from sottovoce.deployment.own_training import OwnTraining, prepare
from sottovoce.deployment.payloads import read_words, total_of, write_model
from sottovoce.errors import InputError
from sottovoce.federated import client_wer
from sottovoce.federated.client_wer import held_out_speech
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.client_wer import PAIR, contribution
from sottovoce.privacy.events import poisson_release, run_event
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.store import Store
from sottovoce.training.run import run_recipe
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.run_folder import LEDGER
from sottovoce.training.start_model import split_trained_part
from sottovoce.training.testing import check_can_transcribe
from sottovoce.users.population import Client

ANNA = NAMES[0]
ASKED = {"words": 1.5, "noise_multiplier": 2.0, "every": 2}  # everybody holds out two words
WITH = {"clients": {"holdout": 0.5}, "client_wer": ASKED}


@pytest.fixture
def hears_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model from nothing hears nothing: here, instead, words of two letters are understood, and longer ones not."""

    def recognise(model: Recogniser, store: Store, rows: Any, **_: Any) -> list[str]:
        texts = [store.utterance(row).text or "" for row in rows.tolist()]
        return [text if len(text) == 2 else "nothing like it" for text in texts]

    monkeypatch.setattr(client_wer, "recognise", recognise)


Villages = Callable[..., Village]


@pytest.fixture
def settle(tmp_path: Path, four_each: Path) -> Iterator[Villages]:
    made: list[Village] = []

    def settled(given: dict[str, Any] | None = None, **options: Any) -> Village:
        recipe = recipe_of(content(**(WITH if given is None else given)))
        made.append(Village(tmp_path / str(len(made)), options.pop("stores", four_each), recipe, **options))
        return made[-1]

    yield settled
    for village in made:
        village.close()


def listening(village: Village, name: str, step: int = 2, **changes: Any) -> Order:
    village.attempt += 1
    model_P = village.layout.flatten(split_trained_part(village.recipe, village.start).initial)
    order = village.order(name, Kind.WER, write_model(model_P, village.layout), step=step, attempt=village.attempt)
    return order if not changes else village.order(name, Kind.WER, order.payload, **({"step": step} | changes))


def own_pair(village: Village, name: str, store: Store) -> torch.Tensor:
    """What `name` should send, counted by hand."""
    people, index = own_client(village.recipe, store, user=name)
    texts = [text for _, text in held_out_speech(store, people.client(index))]
    wrong = sum(3 for text in texts if len(text) != 2)  # three words in the place of one
    return contribution(wrong, len(texts), most_words=ASKED["words"])


# The same sums everywhere.


@pytest.fixture
def settled(tmp_path: Path, four_each: Path) -> Callable[..., Place]:
    def made(**federation: Any) -> Place:
        place = Place(tmp_path, four_each)
        place.settle(**(WITH | federation))
        return place

    return made


@pytest.mark.usefixtures("hears_half")
@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
def test_a_run_finds_what_its_simulation_finds(settled: Callable[..., Place], secure: bool) -> None:
    """Model, ledger and rates, to the bit: after the second of three rounds, and the third."""
    place = settled()
    outcome = place.run_here("served", secure=secure)
    simulated = place.simulate("simulated")
    check_same(outcome.folder, simulated)
    assert outcome.results is not None
    found = outcome.results["client_wer"]
    assert found == json.loads((simulated / "results.json").read_text())["client_wer"]
    assert [each["step"] for each in found] == [2, 3]
    report = verify(outcome.folder / LEDGER)
    assert (report.steps, report.measured, report.measured_attempts) == (3, 2, 2)
    privacy = outcome.results["privacy"]
    assert privacy["epsilon_rdp"] == report.epsilon.rdp  # of all that was promised, which is all that was spent
    assert place.recipe.federated.measured is not None
    measured = place.recipe.federated.measured.event(population_size=9, cohort_size=4)
    assert report.spent == run_event(poisson_release(8.0, sampling_rate=4 / 9), 3, measured)


@pytest.mark.usefixtures("hears_half")
def test_a_plain_simulation_finds_it_too(settled: Callable[..., Place]) -> None:
    """Without a grid for its updates the model is another by a rounding, but people are understood as well."""
    place = settled()
    plain = run_recipe(place.recipe, out=place.folder / "plain", resume=False, context=place.around)
    assert plain.results is not None
    grid = json.loads((place.simulate("simulated") / "results.json").read_text())
    assert plain.results["client_wer"] == grid["client_wer"]


@pytest.mark.usefixtures("hears_half")
@pytest.mark.parametrize("secure", [None, SecureSums(least=3)], ids=["open", "masked"])
@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_the_sum_is_exact(settle: Villages, secure: SecureSums | None, mode: str) -> None:
    village = settle({**WITH, "cohort_size": 9, "privacy": {"mode": mode}}, secure=secure)
    plan = village.invitation.wer_plan
    assert plan is not None
    expected = plan.new_total()
    for name in village.people:
        village.welcome(name)
        plan.accumulate(expected, own_pair(village, name, Store(village.stores / name)))
    assert sum_of(village, village.people) == [float(part) for part in PAIR.parts(expected)]
    wrong, right = (float(part) for part in PAIR.parts(expected))
    assert wrong > 0
    assert right > 0


def sum_of(village: Village, people: list[str]) -> list[float]:
    """What the server makes of the pairs of `people`."""
    plan = village.invitation.wer_plan
    assert plan is not None
    order, when = listening(village, ANNA), {"step": 2, "attempt": village.attempt}
    totals = np.zeros(2, dtype="<u8")
    for name in people:
        answer = village.ask(name, village.order(name, Kind.WER, order.payload, **when))
        assert answer.code is Code.DONE
        if village.secure is None:
            totals += read_words(answer.payload, plan)
    if village.secure is not None:
        totals = village.opened([village.people.index(name) for name in people], plan=plan, **when)
    return [float(part) for part in PAIR.parts(total_of(totals, plan))]


@pytest.mark.usefixtures("hears_half")
def test_with_noise_by_clients_a_run_is_made_and_topped_up(settled: Callable[..., Place]) -> None:
    place = settled(cohort_size=9, privacy={"mode": "secure", "noise_multiplier": 8.0})
    planned = partial(with_noise_by_clients, least=3, colluding=1)
    outcome = place.run_here("served", secure=True, planned=planned)
    assert outcome.results is not None
    for found in outcome.results["client_wer"]:
        assert found["wer_interval"][0] <= found["wer_interval"][1]
    assert verify(outcome.folder / LEDGER).measured == 2


# What was accepted, and no more.


@pytest.fixture
def village(settle: Villages, hears_half: None) -> Village:
    return settle()


def code(village: Village, order: Order) -> Code:
    answer = village.ask(ANNA, order)
    assert answer.code is Code.DONE or answer.payload == b""
    return answer.code


def test_a_recipe_that_does_not_ask_is_not_answered(settle: Villages) -> None:
    village = settle({"clients": {"holdout": 0.5}})
    village.welcome(ANNA)
    assert code(village, listening(village, ANNA)) is Code.NOT_ACCEPTED
    assert code(village, village.train(ANNA)) is Code.DONE


@pytest.mark.parametrize("step", [0, 1, 3, 13, 14])
def test_only_after_the_rounds_that_were_accepted(village: Village, step: int) -> None:
    village.welcome(ANNA)
    assert code(village, listening(village, ANNA, step)) is Code.NOT_ACCEPTED
    assert code(village, listening(village, ANNA, 4)) is Code.DONE


def test_before_anybody_has_accepted_nothing_is_said(village: Village) -> None:
    participant = village.join(ANNA)
    assert code(village, listening(village, ANNA)) is Code.UNEXPECTED
    assert code(village, village.terms(ANNA)) is Code.NOT_ACCEPTED
    assert participant.invited is not None


def test_an_attempt_is_answered_once_also_by_who_was_killed(village: Village) -> None:
    village.welcome(ANNA)
    order = listening(village, ANNA)
    assert code(village, order) is Code.DONE
    assert code(village, order) is Code.REPEATED
    village.welcome(ANNA)
    assert code(village, order) is Code.REPEATED
    assert code(village, village.train(ANNA, attempt=order.attempt)) is Code.REPEATED
    assert code(village, listening(village, ANNA)) is Code.DONE  # a rehearsal that was killed asks again


def test_in_a_release_no_more_often_than_was_accepted(settle: Villages) -> None:
    """Six times in twelve rounds, whatever the server says was lost; updates are counted by themselves."""
    village = settle({**WITH, "cohort_size": 9, "privacy": {"mode": "secure"}})
    village.welcome(ANNA)
    assert [code(village, listening(village, ANNA)) for _ in range(6)] == [Code.DONE] * 6
    village.join(ANNA)  # started again, it remembers
    assert code(village, village.terms(ANNA)) is Code.DONE
    assert code(village, listening(village, ANNA)) is Code.ABOVE_ACCEPTED
    assert code(village, village.train(ANNA)) is Code.DONE


def test_it_counts_towards_a_quota(village: Village) -> None:
    village.welcome(ANNA, quota=Quota(rounds=1))
    assert any(village.ask(ANNA, listening(village, ANNA)).payload)
    assert village.ask(ANNA, listening(village, ANNA)).payload == bytes(16)  # as for an update: nobody sees that


def test_what_leaves_is_sixteen_bytes_and_what_goes_wrong_is_zeros(
    village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    village.welcome(ANNA)
    answered = village.ask(ANNA, listening(village, ANNA)).payload
    assert len(answered) == 16
    assert any(answered)

    def fails(*_: Any, **__: Any) -> list[str]:
        raise RuntimeError("anna said this")

    monkeypatch.setattr(client_wer, "recognise", fails)
    assert village.ask(ANNA, listening(village, ANNA)).payload == bytes(16)
    assert village.said == []


def test_who_has_nothing_to_hold_out_sends_zeros(settle: Villages, village_stores: Path) -> None:
    village = settle(stores=village_stores)
    village.welcome(ANNA)
    assert village.ask(ANNA, listening(village, ANNA)).payload == bytes(16)


# What people are told.


def test_people_are_told_and_ε_covers_it(settle: Villages) -> None:
    given = {"cohort_size": 9, "privacy": {"mode": "secure"}, "clients": {"holdout": 0.5}}
    without = settle(given).invitation
    asked = settle({**given, "client_wer": ASKED}).invitation
    text = "\n".join(words(asked))
    assert "How well you are understood: 6 times (after every 2 rounds and after the last)" in text
    assert "50% of them, at least two, which are never trained on" in text
    assert "scaled down to 1.5 together" in text
    assert "never more than 12, and 6 times for those numbers" in text
    assert "for all rounds and word counts together, against everybody who sees the models and the error rates" in text
    assert "understood" not in "\n".join(words(without))
    assert asked.epsilon is not None
    assert without.epsilon is not None
    assert asked.epsilon.rdp > without.epsilon.rdp
    assert Invitation.read(asked.content).digest == asked.digest


def test_with_noise_by_clients_people_are_told_what_the_server_sees_of_it(settle: Villages) -> None:
    shares = NoiseShares(most=9, least=3, colluding=1)
    village = settle({**WITH, "cohort_size": 9, "privacy": {"mode": "secure"}})
    invited = village.invite(secure=SecureSums(least=3), noise_shares=shares)
    assert any("one with you in it tells the server ε = " in line for line in words(invited))


def test_a_letter_that_does_not_ask_is_spelt_as_before(settle: Villages) -> None:
    letter = json.loads(settle({"clients": {"holdout": 0.5}}).invitation.content)
    assert set(letter["recipe"]["federation"]) == {
        *("steps", "cohort_size", "trainable", "clients", "local", "privacy", "precision"),
    }
    letter["recipe"]["federation"]["client_wer"] = None
    changed = json.dumps(letter, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(InputError, match="not in its one spelling"):
        Invitation.read(changed)


# What is held out never trains.


def other_when_held_out(held_out: set[str]) -> Callable[[RenderedSpeaker], RenderedSpeaker]:
    """Other speech and other texts in what is held out."""

    def change(rendered: RenderedSpeaker) -> RenderedSpeaker:
        other = {"text": "ee", "raw_text": "ee", "samples": say("ee", pitch=1.7)}
        utterances = [replace(one, **other) if one.id in held_out else one for one in rendered.utterances]
        return replace(rendered, utterances=utterances)

    return change


def test_what_is_held_out_never_trains(settle: Villages, four_each: Path, tmp_path: Path) -> None:
    """The update is the same to the bit with other speech in what is held out, and the pair is not."""
    village = settle()
    store = Store(four_each / ANNA)
    people, index = own_client(village.recipe, store, user=None)
    client = people.client(index)
    assert len(client.held_out) == 2
    assert not set(client.held_out.tolist()) & set(client.utterances.tolist())
    held_out = {store.utterance(row).id for row in client.held_out.tolist()}
    number = next(number for number in NUMBERS if speaker(number).name == ANNA)
    pack_tones(
        tmp_path / "other",
        people=range(number, number + 1),
        letters=(2, 3),
        utterances=4,
        change=other_when_held_out(held_out),
    )
    other = Store(tmp_path / "other")
    server_P = village.layout.flatten(split_trained_part(village.recipe, village.start).initial)

    def prepared(own: Store) -> OwnTraining:
        return prepare(village.invitation, village.start, own, user=None, device=CPU)

    for step in range(4):
        update = prepared(store).update(server_P, step=step)
        assert np.any(update)
        assert np.array_equal(update, prepared(other).update(server_P, step=step))
    texts = [[text for _, text in held_out_speech(own, client_in(village, own))] for own in (store, other)]
    assert texts[0] != texts[1] == ["ee", "ee"]


def client_in(village: Village, store: Store) -> Client:
    people, index = own_client(village.recipe, store, user=None)
    return people.client(index)


def test_everybody_holds_out_the_same_in_a_simulation(settle: Villages, four_each: Path) -> None:
    village = settle()
    recipe = village.recipe
    people = build_recipe_population(recipe, village.store, recipe.federated.clients.population(recipe.data))
    for client in people:
        own = Store(four_each / client.id)
        mine = {own.utterance(row).id for row in client_in(village, own).held_out.tolist()}
        assert mine == {village.store.utterance(row).id for row in client.held_out.tolist()}


# What cannot be.


def test_without_a_holdout_there_is_nothing_to_measure_on() -> None:
    with pytest.raises(InputError, match="client_wer without held-out speech"):
        recipe_of(content(client_wer=ASKED))


def test_a_simulation_of_people_who_hold_nothing_out_is_refused(tmp_path: Path, village_stores: Path) -> None:
    place = Place(tmp_path, village_stores)
    place.settle(**WITH)
    with pytest.raises(InputError, match="none of 9 clients has enough utterances to hold some out"):
        run_recipe(place.recipe, out=tmp_path / "run", resume=False, context=place.around)


def test_models_that_write_nothing_down_are_refused(settle: Villages) -> None:
    village = settle()
    mute = village.start
    object.__setattr__(mute, "family", type("Mute", (), {"recognition": None, "name": "mute"}))
    with pytest.raises(InputError, match="models of family=mute write nothing down"):
        check_can_transcribe(village.recipe, mute)
