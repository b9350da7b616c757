"""Rounds that overlap over a network: orders stay open while later models are sent, and nodes answer older ones first.

Nobody is slow by a clock: a node holds an answer back until its next order, or a test asks one link by hand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.network.local_cluster import content, recipe_of
from tests.network.nodes import Node, fleet
from tests.network.places import Place, check_same
from tests.network.test_clients import EVERYBODY, MODEL_P, reasons

from sottovoce.base.errors import InputError
from sottovoce.network.client_recipe import check_network_recipe, clients_part
from sottovoce.network.messages import OrderKind, parse_order
from sottovoce.network.node.home import LEDGER as NODE_LEDGER
from sottovoce.network.server.clients import Timeouts
from sottovoce.network.server.setup import check_overlap
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import verify
from sottovoce.training.checkpoint import RECENT, load_latest_checkpoint
from sottovoce.training.run_folder import LEDGER

STALENESS, ROUNDS = 2, 6
EVERY = np.arange(EVERYBODY)
STANDING_STILL = {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1e-9}}


# One round's orders beside another's.


def test_a_round_is_summed_from_what_its_own_orders_were_answered_with(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, wanted=EVERYBODY)
    assert found.clients.ready(lambda: False)
    for step, places in ((0, [0, 1, 2]), (1, [1, 2, 3]), (2, [0, 4])):
        found.clients.begin(MODEL_P, np.array(places), plan=found.plan, step=step)
    for step, places in ((0, [0, 1, 2]), (1, [1, 2, 3]), (2, [0, 4])):
        result = found.clients.sum(MODEL_P, np.array(places), plan=found.plan, step=step)
        assert torch.equal(result.total, found.expected(places, step=step))
        assert reasons(result) == {}
    attempts = [order.attempt for order in found.nodes[1].orders if order.kind is OrderKind.TRAIN]
    assert attempts == [1, 2]


def test_who_trains_for_an_open_round_is_asked_for_nothing_else_until_that_is_summed(tmp_path: Path) -> None:
    """Somebody who has refused one round would be asked for the terms again, behind what they train for another."""

    def refuses_step_0(node: Node) -> AnswerFunction:
        def answer(data: bytes) -> bytes | None:
            order = parse_order(data, limit=1 << 20)
            if order.kind is OrderKind.TRAIN and order.step == 0:
                return b"nothing that could be read"
            return node.answer(data)

        return answer

    found = fleet(tmp_path, EVERYBODY, wanted=4, meddle={1: refuses_step_0})
    assert found.clients.ready(lambda: False)
    for step in (0, 1):
        found.clients.begin(MODEL_P, EVERY, plan=found.plan, step=step)
    first = found.clients.sum(MODEL_P, EVERY, plan=found.plan, step=0)
    assert sum(reasons(first).values()) == 1
    heard = len(found.nodes[1].orders)
    assert found.clients.ready(lambda: False)
    assert len(found.nodes[1].orders) == heard
    second = found.clients.sum(MODEL_P, EVERY, plan=found.plan, step=1)
    assert torch.equal(second.total, found.expected([*range(EVERYBODY)], step=1))


def test_rounds_that_overlap_have_open_sums(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, secure=True, wanted=EVERYBODY)
    assert found.clients.ready(lambda: False)
    with pytest.raises(AssertionError, match="its phases need free nodes"):
        found.clients.begin(MODEL_P, EVERY, plan=found.plan, step=0)


# Whole runs.


def place_of(tmp_path: Path, stores: Path, **federation: Any) -> Place:
    place = Place(tmp_path, stores)
    place.write_files(**{"steps": ROUNDS, "staleness": STALENESS, "cohort_size": 6} | federation)
    return place


def test_a_served_run_is_the_simulation_s_and_charges_before_it_asks(tmp_path: Path, cluster_stores: Path) -> None:
    place = place_of(tmp_path, cluster_stores)
    served = place.run_here("served", secure=False).folder
    check_same(served, place.simulate("simulated"))
    records = [one for one in read_chain(served / LEDGER).records if one["kind"] in ("intent", "commit")]
    charged = committed = 0
    for record in records:
        if record["kind"] == "intent":
            charged += 1
        else:
            committed = record["step"] + 1
        assert charged <= min(committed + STALENESS + 1, ROUNDS)
    assert (charged, committed) == (ROUNDS, ROUNDS)
    intents = [one["parameters"] for one in records if one["kind"] == "intent"]
    assert len({*intents[: STALENESS + 1]}) == 1  # before the first release there is one model
    assert len({*intents}) == ROUNDS - STALENESS
    # As `sottovoce run` has it, where rounds follow one another: the same models, and the same sum of events.
    assert verify(served / LEDGER).attempts == ROUNDS


def test_over_a_network_and_in_a_loop_here_rounds_are_the_same(tmp_path: Path, cluster_stores: Path) -> None:
    """A simulation charges each step when it comes to it; who is drawn, from which model and the noise are the same."""
    from sottovoce.training.run import run_recipe

    place = place_of(tmp_path, cluster_stores)
    served = place.run_here("served", secure=False).folder
    # The grid of sums over a network moves each of them by less than a cell: far less than any step.
    run_recipe(place.recipe, out=tmp_path / "run", resume=False, context=place.around)
    models = [load_latest_checkpoint(folder / "checkpoints")[0] for folder in (served, tmp_path / "run")]
    assert models[0] is not None
    assert models[1] is not None
    for name, tensor in models[0].recogniser.parameters.items():
        assert torch.allclose(tensor, models[1].recogniser.parameters[name], rtol=0, atol=1e-4)
    cohorts = [
        [one["cohort"] for one in read_chain(folder / LEDGER).records if one["kind"] == "intent"]
        for folder in (served, tmp_path / "run")
    ]
    assert cohorts[0] == cohorts[1]
    assert verify(served / LEDGER).spent == verify(tmp_path / "run" / LEDGER).spent


def held_back(until: int) -> Callable[[AnswerFunction], AnswerFunction]:
    """Never answers orders to train before step `until`."""

    def meddle(answer: AnswerFunction) -> AnswerFunction:
        def answered(data: bytes) -> bytes | None:
            order = parse_order(data, limit=1 << 30)
            found = answer(data)
            return None if order.kind is OrderKind.TRAIN and order.step < until else found

        return answered

    return meddle


def test_nodes_take_part_as_often_as_they_were_asked_and_older_orders_come_first(
    tmp_path: Path, cluster_stores: Path
) -> None:
    place = place_of(tmp_path, cluster_stores)
    place.run_here("served", secure=False, meddle={place.people[0]: held_back(2)}, wait_for=1)
    for name in place.people:
        answered = [
            (one["step"], one["attempt"])
            for one in read_chain(place.folder / "keys" / name / "home" / NODE_LEDGER).records
            if one.get("answered") == "train"
        ]
        assert answered == sorted(answered)
        assert len({step for step, _ in answered}) == len(answered)


class StoppedHereError(BaseException):
    pass


@pytest.mark.parametrize("mode", ["seeded", "secure"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_server_that_dies_loses_the_rounds_that_have_begun_and_pays_for_them(
    mode: str, at: int, tmp_path: Path, cluster_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal makes them again with the same bits and charges them once, a release charges them again."""
    from sottovoce.privacy.plan import Plan

    privacy = {"mode": mode} if mode == "secure" else {}
    place = place_of(tmp_path, cluster_stores, privacy=privacy)
    whole = place.run_here("whole", secure=False, spare=5 if mode == "secure" else None).folder
    for name in place.people:  # in the other run they are other nodes
        (tmp_path / "keys" / name / "home").rename(tmp_path / "keys" / name / "home of the first")
    add, seen = Plan.add_noise, []

    def die(self: Plan, total: Any, charge: Any, **more: Any) -> Any:
        seen.append(charge.step)
        if charge.step == at and seen.count(at) == 1:
            raise StoppedHereError
        return add(self, total, charge, **more)

    monkeypatch.setattr(Plan, "add_noise", die)
    with pytest.raises(StoppedHereError):
        place.run_here("broken", secure=False, spare=5 if mode == "secure" else None)
    found, _ = load_latest_checkpoint(tmp_path / "broken/checkpoints")
    assert (found is None) == (at == 0)
    if found is not None:
        assert len(found.optimiser[RECENT]) == min(at, STALENESS)
    broken = place.run_here("broken", secure=False, resume=True, spare=5 if mode == "secure" else None).folder
    report = verify(broken / LEDGER)
    lost = min(at + STALENESS, ROUNDS - 1) - at + 1
    assert report.steps == ROUNDS
    if mode == "secure":
        assert report.attempts == ROUNDS + lost
        cohorts = [one["cohort"] for one in read_chain(broken / LEDGER).records if one["kind"] == "intent"]
        assert len({*cohorts}) == len(cohorts)
        return
    check_same(broken, whole)
    assert report.attempts == ROUNDS


def test_a_budget_ends_a_run_after_all_that_it_has_paid_for(tmp_path: Path, cluster_stores: Path) -> None:
    """No round begins that is above it; those that have begun are released."""
    place = place_of(tmp_path, cluster_stores)
    place.run_here("free", secure=False)
    spent = [one["epsilon"] for one in read_chain(tmp_path / "free" / LEDGER).records if one["kind"] == "intent"]
    for name in place.people:
        (tmp_path / "keys" / name / "home").rename(tmp_path / "keys" / name / "home of the first")
    place.change_privacy(epsilon_budget=(spent[3] + spent[4]) / 2)
    ended = place.run_here("bounded", secure=False)
    assert ended.results is not None
    assert ended.results["ended"]["reason"] == "budget"
    assert ended.results["ended"]["step"] == 4
    report = verify(tmp_path / "bounded" / LEDGER)
    assert (report.attempts, report.committed_step) == (4, 3)


def test_patience_ends_a_run_without_the_rounds_that_have_begun(tmp_path: Path, cluster_stores: Path) -> None:
    """They were charged, and nobody is waited for: their orders are withdrawn."""
    place = place_of(tmp_path, cluster_stores, patience=1, evaluate_every=1, server=STANDING_STILL)
    ended = place.run_here("served", secure=False)
    assert ended.results is not None
    assert (ended.results["ended"]["reason"], ended.results["ended"]["step"]) == ("patience", 2)
    report = verify(tmp_path / "served" / LEDGER)
    assert (report.attempts, report.committed_step) == (2 + STALENESS, 1)
    for name in place.people:
        assert read_chain(place.folder / "keys" / name / "home" / NODE_LEDGER).records[-1]["rounds"] == 2


# What is refused.


@pytest.mark.parametrize(
    ("federation", "message"),
    [
        ({"privacy": {"mechanism": {"kind": "banded", "bands": 3, "cycle": 3}}, "cohort_size": 3}, "privacy.mechanism"),
        ({"client_wer": {"every": 3, "words": 8, "noise_multiplier": 8.0}, "clients": {"holdout": 0.5}}, "client_wer"),
    ],
)
def test_what_was_not_thought_through_is_refused_in_one_line(federation: dict[str, Any], message: str) -> None:
    recipe = recipe_of(content(staleness=2, **federation))
    with pytest.raises(InputError) as refused:
        check_network_recipe(recipe, population_size=9)
    assert str(refused.value).startswith(f"federation.staleness=2 with {message}")
    assert "\n" not in str(refused.value)


def test_secure_sums_are_refused_and_intervals_that_are_too_short() -> None:
    check_overlap(None, is_secure=True, timeouts=Timeouts(training=10.0, rounds=11.0))
    check_overlap(2, is_secure=False, timeouts=Timeouts(training=29.0, rounds=10.0))
    with pytest.raises(InputError, match="staleness=2 with secure sums"):
        check_overlap(2, is_secure=True, timeouts=Timeouts())
    with pytest.raises(InputError, match="which is 30 s: expected more than the --seconds 30"):
        check_overlap(2, is_secure=False, timeouts=Timeouts(training=30.0, rounds=10.0))
    with pytest.raises(InputError, match="--round-seconds 10: expected more than the --seconds 10 of training"):
        check_overlap(None, is_secure=False, timeouts=Timeouts(training=10.0, rounds=10.0))


def test_nodes_are_asked_for_nothing_that_staleness_changes() -> None:
    """It is the server's affair: what a node is sent is a model, and what it does with it is the same."""
    assert clients_part(recipe_of(content(staleness=2))) == clients_part(recipe_of(content()))
