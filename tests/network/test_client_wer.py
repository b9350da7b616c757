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
from tests.network.local_cluster import NAMES, NUMBERS, LocalCluster, content, recipe_of
from tests.network.places import CPU, Place, check_same
from tests.tones import pack_tones, say, speaker

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import RenderedSpeaker
from sottovoce.data.population import Client
from sottovoce.data.store import Store
from sottovoce.federated import client_wer
from sottovoce.federated.client_wer import held_out_speech
from sottovoce.models.recogniser import Recogniser
from sottovoce.network.invitation import Invitation, SecureSums
from sottovoce.network.messages import AnswerCode, Order, OrderKind
from sottovoce.network.model_transfer import write_round_model
from sottovoce.network.node.consent import describe_invitation
from sottovoce.network.node.ledger import Quota
from sottovoce.network.node.speech import find_own_client
from sottovoce.network.node.training import NodeTraining, prepare_training
from sottovoce.network.secure_sum.words import decode_sum, read_update
from sottovoce.network.server.setup import with_client_noise
from sottovoce.privacy.client_wer import PAIR, contribution
from sottovoce.privacy.events import poisson_release, run_event
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.training.run import run_recipe
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.run_folder import LEDGER
from sottovoce.training.start_model import split_trained_part
from sottovoce.training.testing import check_can_transcribe

ANNA = NAMES[0]
ASKED = {"words": 1.5, "noise_multiplier": 2.0, "every": 2}  # everybody holds out two words
WITH = {"clients": {"holdout": 0.5}, "client_wer": ASKED}


@pytest.fixture
def hears_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model from nothing hears nothing: here, instead, words of two letters are understood, and longer ones not."""

    def recognise(model: Recogniser, store: Store, rows: Any, **_: Any) -> list[str]:
        texts = [store.utterance(row).text or "" for row in rows.tolist()]
        return [text if len(text) == 2 else "nothing like it" for text in texts]

    monkeypatch.setattr(client_wer, "recognise_utterances", recognise)


MakeCluster = Callable[..., LocalCluster]


@pytest.fixture
def make_cluster(tmp_path: Path, four_each: Path) -> Iterator[MakeCluster]:
    made: list[LocalCluster] = []

    def settled(given: dict[str, Any] | None = None, **options: Any) -> LocalCluster:
        recipe = recipe_of(content(**(WITH if given is None else given)))
        made.append(LocalCluster(tmp_path / str(len(made)), options.pop("stores", four_each), recipe, **options))
        return made[-1]

    yield settled
    for local_cluster in made:
        local_cluster.close()


def listening(local_cluster: LocalCluster, name: str, step: int = 2, **changes: Any) -> Order:
    local_cluster.attempt += 1
    model_P = local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial)
    order = local_cluster.order(
        name, OrderKind.WER, write_round_model(model_P, local_cluster.layout), step=step, attempt=local_cluster.attempt
    )
    return (
        order if not changes else local_cluster.order(name, OrderKind.WER, order.payload, **({"step": step} | changes))
    )


def own_pair(local_cluster: LocalCluster, name: str, store: Store) -> torch.Tensor:
    """What `name` should send, counted by hand."""
    people, index = find_own_client(local_cluster.recipe, store, user=name)
    texts = [text for _, text in held_out_speech(store, people.client(index))]
    wrong = sum(3 for text in texts if len(text) != 2)  # three words in the place of one
    return contribution(wrong, len(texts), most_words=ASKED["words"])


# The same sums everywhere.


@pytest.fixture
def settled(tmp_path: Path, four_each: Path) -> Callable[..., Place]:
    def made(**federation: Any) -> Place:
        place = Place(tmp_path, four_each)
        place.write_files(**(WITH | federation))
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
def test_the_sum_is_exact(make_cluster: MakeCluster, secure: SecureSums | None, mode: str) -> None:
    local_cluster = make_cluster({**WITH, "cohort_size": 9, "privacy": {"mode": mode}}, secure=secure)
    plan = local_cluster.invitation.wer_plan
    assert plan is not None
    expected = plan.new_total()
    for name in local_cluster.people:
        local_cluster.welcome(name)
        plan.accumulate(expected, own_pair(local_cluster, name, Store(local_cluster.stores / name)))
    assert sum_of(local_cluster, local_cluster.people) == [float(part) for part in PAIR.parts(expected)]
    wrong, right = (float(part) for part in PAIR.parts(expected))
    assert wrong > 0
    assert right > 0


def sum_of(local_cluster: LocalCluster, people: list[str]) -> list[float]:
    """What the server makes of the pairs of `people`."""
    plan = local_cluster.invitation.wer_plan
    assert plan is not None
    order, when = listening(local_cluster, ANNA), {"step": 2, "attempt": local_cluster.attempt}
    totals = np.zeros(2, dtype="<u8")
    for name in people:
        answer = local_cluster.ask(name, local_cluster.order(name, OrderKind.WER, order.payload, **when))
        assert answer.code is AnswerCode.DONE
        if local_cluster.secure is None:
            totals += read_update(answer.payload, plan)
    if local_cluster.secure is not None:
        totals = local_cluster.opened([local_cluster.people.index(name) for name in people], plan=plan, **when)
    return [float(part) for part in PAIR.parts(decode_sum(totals, plan))]


@pytest.mark.usefixtures("hears_half")
def test_with_noise_by_clients_a_run_is_made_and_topped_up(settled: Callable[..., Place]) -> None:
    place = settled(cohort_size=9, privacy={"mode": "secure", "noise_multiplier": 8.0})
    planned = partial(with_client_noise, least=3, colluding=1)
    outcome = place.run_here("served", secure=True, planned=planned)
    assert outcome.results is not None
    for found in outcome.results["client_wer"]:
        assert found["wer_interval"][0] <= found["wer_interval"][1]
    assert verify(outcome.folder / LEDGER).measured == 2


# What was accepted, and no more.


@pytest.fixture
def local_cluster(make_cluster: MakeCluster, hears_half: None) -> LocalCluster:
    return make_cluster()


def code(local_cluster: LocalCluster, order: Order) -> AnswerCode:
    answer = local_cluster.ask(ANNA, order)
    assert answer.code is AnswerCode.DONE or answer.payload == b""
    return answer.code


def test_a_recipe_that_does_not_ask_is_not_answered(make_cluster: MakeCluster) -> None:
    local_cluster = make_cluster({"clients": {"holdout": 0.5}})
    local_cluster.welcome(ANNA)
    assert code(local_cluster, listening(local_cluster, ANNA)) is AnswerCode.NOT_ACCEPTED
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


@pytest.mark.parametrize("step", [0, 1, 3, 13, 14])
def test_only_after_the_rounds_that_were_accepted(local_cluster: LocalCluster, step: int) -> None:
    local_cluster.welcome(ANNA)
    assert code(local_cluster, listening(local_cluster, ANNA, step)) is AnswerCode.NOT_ACCEPTED
    assert code(local_cluster, listening(local_cluster, ANNA, 4)) is AnswerCode.DONE


def test_before_anybody_has_accepted_nothing_is_said(local_cluster: LocalCluster) -> None:
    participant = local_cluster.join(ANNA)
    assert code(local_cluster, listening(local_cluster, ANNA)) is AnswerCode.UNEXPECTED
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.NOT_ACCEPTED
    assert participant.invited is not None


def test_an_attempt_is_answered_once_also_by_who_was_killed(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA)
    order = listening(local_cluster, ANNA)
    assert code(local_cluster, order) is AnswerCode.DONE
    assert code(local_cluster, order) is AnswerCode.REPEATED
    local_cluster.welcome(ANNA)
    assert code(local_cluster, order) is AnswerCode.REPEATED
    assert code(local_cluster, local_cluster.train(ANNA, attempt=order.attempt)) is AnswerCode.REPEATED
    assert (
        code(local_cluster, listening(local_cluster, ANNA)) is AnswerCode.DONE
    )  # a rehearsal that was killed asks again


def test_in_a_release_no_more_often_than_was_accepted(make_cluster: MakeCluster) -> None:
    """Six times in twelve rounds, whatever the server says was lost; updates are counted by themselves."""
    local_cluster = make_cluster({**WITH, "cohort_size": 9, "privacy": {"mode": "secure"}})
    local_cluster.welcome(ANNA)
    assert [code(local_cluster, listening(local_cluster, ANNA)) for _ in range(6)] == [AnswerCode.DONE] * 6
    local_cluster.join(ANNA)  # started again, it remembers
    assert code(local_cluster, local_cluster.terms(ANNA)) is AnswerCode.DONE
    assert code(local_cluster, listening(local_cluster, ANNA)) is AnswerCode.ABOVE_ACCEPTED
    assert code(local_cluster, local_cluster.train(ANNA)) is AnswerCode.DONE


def test_it_counts_towards_a_quota(local_cluster: LocalCluster) -> None:
    local_cluster.welcome(ANNA, quota=Quota(rounds=1))
    assert any(local_cluster.ask(ANNA, listening(local_cluster, ANNA)).payload)
    assert local_cluster.ask(ANNA, listening(local_cluster, ANNA)).payload == bytes(
        16
    )  # as for an update: nobody sees that


def test_what_leaves_is_sixteen_bytes_and_what_goes_wrong_is_zeros(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster.welcome(ANNA)
    answered = local_cluster.ask(ANNA, listening(local_cluster, ANNA)).payload
    assert len(answered) == 16
    assert any(answered)

    def fails(*_: Any, **__: Any) -> list[str]:
        raise RuntimeError("anna said this")

    monkeypatch.setattr(client_wer, "recognise_utterances", fails)
    assert local_cluster.ask(ANNA, listening(local_cluster, ANNA)).payload == bytes(16)
    assert local_cluster.said == []


def test_who_has_nothing_to_hold_out_sends_zeros(make_cluster: MakeCluster, cluster_stores: Path) -> None:
    local_cluster = make_cluster(stores=cluster_stores)
    local_cluster.welcome(ANNA)
    assert local_cluster.ask(ANNA, listening(local_cluster, ANNA)).payload == bytes(16)


# What people are told.


def test_people_are_told_and_ε_covers_it(make_cluster: MakeCluster) -> None:
    given = {"cohort_size": 9, "privacy": {"mode": "secure"}, "clients": {"holdout": 0.5}}
    without = make_cluster(given).invitation
    asked = make_cluster({**given, "client_wer": ASKED}).invitation
    text = "\n".join(describe_invitation(asked))
    assert "How well you are understood: 6 times (after every 2 rounds and after the last)" in text
    assert "50% of them, at least two, which are never trained on" in text
    assert "scaled down to 1.5 together" in text
    assert "never more than 12, and 6 times for those numbers" in text
    assert "for all rounds and word counts together, against everybody who sees the models and the error rates" in text
    assert "understood" not in "\n".join(describe_invitation(without))
    assert asked.epsilon is not None
    assert without.epsilon is not None
    assert asked.epsilon.rdp > without.epsilon.rdp
    assert Invitation.read(asked.content).digest == asked.digest


def test_with_noise_by_clients_people_are_told_what_the_server_sees_of_it(make_cluster: MakeCluster) -> None:
    shares = NoiseShares(most=9, least=3, colluding=1)
    local_cluster = make_cluster({**WITH, "cohort_size": 9, "privacy": {"mode": "secure"}})
    invited = local_cluster.invite(secure=SecureSums(least=3), noise_shares=shares)
    assert any("one with you in it tells the server ε = " in line for line in describe_invitation(invited))


def test_a_letter_that_does_not_ask_is_spelt_as_before(make_cluster: MakeCluster) -> None:
    letter = json.loads(make_cluster({"clients": {"holdout": 0.5}}).invitation.content)
    assert set(letter["recipe"]["federation"]) == {
        *("steps", "cohort_size", "trainable", "clients", "local", "privacy", "precision"),
    }
    letter["recipe"]["federation"]["client_wer"] = None
    changed = json.dumps(letter, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(InputError, match="not in its canonical form"):
        Invitation.read(changed)


# What is held out never trains.


def other_when_held_out(held_out: set[str]) -> Callable[[RenderedSpeaker], RenderedSpeaker]:
    """Other speech and other texts in what is held out."""

    def change(rendered: RenderedSpeaker) -> RenderedSpeaker:
        other = {"text": "ee", "raw_text": "ee", "samples": say("ee", pitch=1.7)}
        utterances = [replace(one, **other) if one.id in held_out else one for one in rendered.utterances]
        return replace(rendered, utterances=utterances)

    return change


def test_what_is_held_out_never_trains(make_cluster: MakeCluster, four_each: Path, tmp_path: Path) -> None:
    """The update is the same to the bit with other speech in what is held out, and the pair is not."""
    local_cluster = make_cluster()
    store = Store(four_each / ANNA)
    people, index = find_own_client(local_cluster.recipe, store, user=None)
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
    server_P = local_cluster.layout.flatten(split_trained_part(local_cluster.recipe, local_cluster.start).initial)

    def prepared(own: Store) -> NodeTraining:
        return prepare_training(local_cluster.invitation, local_cluster.start, own, user=None, device=CPU)

    for step in range(4):
        update = prepared(store).update(server_P, step=step)
        assert np.any(update)
        assert np.array_equal(update, prepared(other).update(server_P, step=step))
    texts = [[text for _, text in held_out_speech(own, client_in(local_cluster, own))] for own in (store, other)]
    assert texts[0] != texts[1] == ["ee", "ee"]


def client_in(local_cluster: LocalCluster, store: Store) -> Client:
    people, index = find_own_client(local_cluster.recipe, store, user=None)
    return people.client(index)


def test_everybody_holds_out_the_same_in_a_simulation(make_cluster: MakeCluster, four_each: Path) -> None:
    local_cluster = make_cluster()
    recipe = local_cluster.recipe
    people = build_recipe_population(recipe, local_cluster.store, recipe.federated.clients.population(recipe.data))
    for client in people:
        own = Store(four_each / client.id)
        mine = {own.utterance(row).id for row in client_in(local_cluster, own).held_out.tolist()}
        assert mine == {local_cluster.store.utterance(row).id for row in client.held_out.tolist()}


# What cannot be.


def test_without_a_holdout_there_is_nothing_to_measure_on() -> None:
    with pytest.raises(InputError, match="client_wer without held-out speech"):
        recipe_of(content(client_wer=ASKED))


def test_a_simulation_of_people_who_hold_nothing_out_is_refused(tmp_path: Path, cluster_stores: Path) -> None:
    place = Place(tmp_path, cluster_stores)
    place.write_files(**WITH)
    with pytest.raises(InputError, match="none of 9 clients has enough utterances to hold some out"):
        run_recipe(place.recipe, out=tmp_path / "run", resume=False, context=place.around)


def test_models_that_write_nothing_down_are_refused(make_cluster: MakeCluster) -> None:
    local_cluster = make_cluster()
    mute = local_cluster.start
    object.__setattr__(mute, "family", type("Mute", (), {"recognition": None, "name": "mute"}))
    with pytest.raises(InputError, match="models of family=mute write no text"):
        check_can_transcribe(local_cluster.recipe, mute)
