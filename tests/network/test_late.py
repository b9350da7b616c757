"""A round ends at its deadline: who is late counts as zero, what comes later is lost, and nobody waits for them.

Nobody is late by a clock: a node is silent, holds its answer back, or is held at a named point until the test says so.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import content
from tests.network.nodes import Node, fleet, plan_for
from tests.network.places import ROUNDS, Place, check_same
from tests.network.test_clients import EVERYBODY, reasons, summed

from sottovoce.base.errors import InputError
from sottovoce.config import Recipe
from sottovoce.federated.lateness import in_time
from sottovoce.flat.layout import Layout
from sottovoce.network.invitation import Invitation
from sottovoce.network.limits import max_times_asked
from sottovoce.network.messages import OrderKind, parse_order
from sottovoce.network.node.consent import describe_invitation
from sottovoce.network.node.home import LEDGER as NODE_LEDGER
from sottovoce.network.node.time_limit import TimeLimit
from sottovoce.network.secure_sum.words import update_bytes
from sottovoce.network.server.orders import AWAY
from sottovoce.network.server.schedule import Schedule
from sottovoce.network.server.setup import default_least
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.planner import plan_run
from sottovoce.privacy.settings import PrivacySettings
from sottovoce.training.run_folder import DIAGNOSTICS, LEDGER


def late_in(*steps: int) -> Callable[[Node], AnswerFunction]:
    """Trains in these rounds when they are over: its answer comes with the next order of any kind."""

    def meddle(node: Node) -> AnswerFunction:
        held: list[bytes | None] = []

        def answer(data: bytes) -> bytes | None:
            answered = node.answer(data)
            order = node.orders[-1]
            if order.kind is OrderKind.TRAIN and order.step in steps:
                held.append(answered)
                return None
            return held.pop() if held else answered

        return answer

    return meddle


@pytest.mark.parametrize("secure", [False, True])
def test_who_is_late_is_zero_and_their_answer_is_in_no_later_sum(tmp_path: Path, secure: bool) -> None:
    """It comes in place of the answer to the next round, and fits no order: it is dropped there, too."""
    found = fleet(tmp_path, EVERYBODY, secure=secure, wanted=4, meddle={1: late_in(0)})
    first = summed(found, step=0)
    assert torch.equal(first.total, found.expected([0, 2, 3, 4], step=0))
    assert reasons(first) == {AWAY: 1}
    assert first.denominator == found.plan.denominator
    second = summed(found, step=1)
    assert torch.equal(second.total, found.expected([0, 2, 3, 4], step=1))
    assert reasons(second) == {"no answer to what was asked (unexpected)": 1}
    third = summed(found, step=2)
    assert torch.equal(third.total, found.expected([0, 1, 2, 3, 4], step=2))
    assert reasons(third) == {}


def test_a_round_does_not_ask_who_was_late_for_anything_before_it_begins(tmp_path: Path) -> None:
    """Whoever trains still would answer when they are done, and everybody would wait for that."""
    found = fleet(tmp_path, EVERYBODY, wanted=4, meddle={1: late_in(0)})
    summed(found, step=0)
    assert found.clients.ready(lambda: False)
    assert found.nodes[1].heard == [OrderKind.TERMS, OrderKind.START, OrderKind.TRAIN]
    summed(found, step=1)
    assert found.nodes[1].heard[3:] == [OrderKind.TRAIN]


def test_where_no_round_begins_without_them_they_are_asked_whether_they_are_free(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, wanted=5, meddle={1: silent_while_training})
    summed(found, step=0)
    assert found.clients.ready(lambda: False)
    assert found.nodes[1].heard[3] is OrderKind.TERMS


def silent_while_training(node: Node) -> AnswerFunction:
    def answer(data: bytes) -> bytes | None:
        answered = node.answer(data)
        return None if node.orders[-1].kind is OrderKind.TRAIN else answered

    return answer


def test_who_was_late_is_not_counted_as_here_until_they_answer(tmp_path: Path) -> None:
    """A release with secure sums begins no round on their account."""
    found = fleet(tmp_path, EVERYBODY, wanted=4, meddle={1: late_in(0)})
    summed(found, step=0)
    assert found.clients._here() == {0, 2, 3, 4}
    summed(found, step=2)  # its late answer comes now, and is refused
    assert found.clients._here() == {0, 1, 2, 3, 4}


# When rounds begin.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rounds_begin_at_times_that_are_known_before_the_first() -> None:
    """However long they take: by one that takes too long the next is late, and no other."""
    clock = Clock()
    schedule = Schedule(60.0, now=clock)
    begun = []
    for seconds in (5.0, 59.0, 61.0, 1.0, 130.0, 2.0):
        clock.now += schedule.left()
        begun.append(clock.now - 100.0)
        schedule.begin()
        clock.now += seconds
    assert begun == [0.0, 60.0, 120.0, 181.0, 240.0, 370.0]
    assert schedule.left() == pytest.approx(48.0)


def test_without_an_interval_a_round_begins_when_the_last_is_over() -> None:
    schedule = Schedule(None)
    schedule.begin()
    assert schedule.left() == 0


def test_a_round_at_a_fixed_time_does_not_wait_for_who_has_just_come(tmp_path: Path) -> None:
    """They are asked for the terms when it is over; before it, no longer than until it begins."""
    found = fleet(tmp_path, EVERYBODY, wanted=4)
    clock, asked, ask = Clock(), list[tuple[OrderKind, float]](), found.clients._channel.link.ask

    def watched(orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        kinds = {parse_order(order, limit=1 << 32).kind for order in orders.values()}
        asked.extend((kind, seconds) for kind in kinds)
        return ask(orders, seconds=seconds, limit=limit)

    found.clients._channel.link.ask = watched  # type: ignore[method-assign]
    found.clients._schedule = Schedule(60.0, now=clock)
    assert found.clients.ready(lambda: False)
    found.clients._prepared -= {1}  # as if it had come back just now
    asked.clear()
    clock.now += 60.0
    assert found.clients.ready(lambda: False)
    assert asked == []
    clock.now += 50.0
    assert not found.clients.ready(lambda: True)
    assert asked == [(OrderKind.TERMS, 10.0)]
    assert 1 in found.clients._prepared


def test_the_server_waits_for_the_time_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    found = fleet(tmp_path, 2)
    clock = Clock()
    found.clients._schedule = Schedule(60.0, now=clock)
    assert found.clients.ready(lambda: False)
    assert not found.clients.ready(lambda: True)  # the time has not come

    def passes() -> bool:
        clock.now += 30.0
        return False

    assert found.clients.ready(passes)
    assert clock.now == 160.0


# More are drawn than are expected.

DRAWN, ANSWERS, PEOPLE = 4, 3, 9


def over_selecting(**privacy: Any) -> dict[str, Any]:
    return content(cohort_size=DRAWN, expected_answers=ANSWERS, privacy=privacy)


def test_everybody_is_told_how_many_are_drawn_and_accepts_the_epsilon_of_that(make_cluster: MakeCluster) -> None:
    found = make_cluster(over_selecting(mode="secure")).invitation
    said = " ".join(describe_invitation(found))
    assert "you are asked with probability 0.444 (4 of 9 people)" in said
    assert "3 answers are expected in time, and who is later counts as zero." in said
    drawn = plan_run(PEOPLE, cohort_size=DRAWN, central_steps=12, delta=1e-3, noise_multiplier=8.0)
    assert found.epsilon_without_spare == drawn.epsilon
    assert found.limits is not None
    assert found.limits.updates == max_times_asked(12, sampling_rate=DRAWN / PEOPLE)
    plain = make_cluster(content(cohort_size=DRAWN, privacy={"mode": "secure"})).invitation
    assert found.digest != plain.digest
    assert Invitation.read(found.content).digest == found.digest
    assert "expected in time" not in " ".join(describe_invitation(plain))


@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_a_node_trains_in_every_round_that_it_is_asked_in(make_cluster: MakeCluster, mode: str) -> None:
    """The coins of a simulation are not for nodes: whether they are late is seen when they are."""
    clusters = [make_cluster(content(cohort_size=9, privacy={"mode": mode}, **more)) for more in ({}, EXPECTED)]
    for cluster in clusters:
        cluster.welcome(cluster.people[0])
    for step in range(6):
        sent = [cluster.ask(cluster.people[0], cluster.train(cluster.people[0], step=step)) for cluster in clusters]
        assert sent[0].payload == sent[1].payload
        assert any(sent[0].payload)


EXPECTED: dict[str, Any] = {"expected_answers": 1}


def test_who_trains_too_long_sends_zeros_in_time_and_until_they_are_done(make_cluster: MakeCluster) -> None:
    """Training is held until the test says so: no limit of time is too short, or too long, for that."""
    cluster = make_cluster(content(training_seconds=1e-9))
    name = cluster.people[0]
    node = cluster.welcome(name)
    assert node._service is not None
    assert node._service.training is not None
    begun, go, honest = threading.Semaphore(0), threading.Event(), node._service.training.engine.train
    held = _Held(honest, begun, go)
    object.__setattr__(node._service.training, "engine", held)
    for step in range(2):  # the second is not begun while the first one lasts
        answer = cluster.ask(name, cluster.train(name, step=step))
        assert answer.code == 0
        assert not any(answer.payload)
    begun.acquire()
    go.set()
    running = node._service.limit._running
    assert running is not None
    running.join()
    assert held.calls == 1
    assert cluster.said == ["not done within 1e-09 s: what is sent is zeros"] * 2
    lines = [line for line in read_chain(cluster.place / name / "home" / NODE_LEDGER).records if "answered" in line]
    assert [line.get("idle") for line in lines] == [True, True]
    assert [line["bytes"] for line in lines] == [update_bytes(cluster.plan)] * 2


class _Held:
    """An engine whose training waits."""

    def __init__(self, train: Any, begun: threading.Semaphore, go: threading.Event) -> None:
        self._train, self._begun, self._go, self.calls, self.waited = train, begun, go, 0, 0.0

    def train(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        self._begun.release()
        self._go.wait()
        return self._train(*given, **named)


def test_within_the_limit_everything_is_as_without(make_cluster: MakeCluster) -> None:
    sent = []
    for more in ({}, {"training_seconds": 1e6}):
        cluster = make_cluster(content(**more))
        cluster.welcome(cluster.people[0])
        sent.append(cluster.ask(cluster.people[0], cluster.train(cluster.people[0])).payload)
        said = " ".join(describe_invitation(cluster.invitation))
        assert ("what takes longer than 1e+06 s is given up, and zeros are sent" in said) == bool(more)
    assert sent[0] == sent[1]
    assert any(sent[0])


def test_what_fails_within_the_limit_fails_as_without() -> None:
    with pytest.raises(ZeroDivisionError):
        TimeLimit(1e6).result(lambda: 1 // 0)


def test_the_least_of_a_sum_follows_from_those_who_are_expected() -> None:
    private = PrivacySettings(
        population_size=1000,
        privacy_unit="speaker",
        cohort_size=200,
        expected_answers=100,
        clip_bound=1.0,
        noise_multiplier=1.0,
        delta=1e-9,
        mode="secure",  # type: ignore[arg-type]
    )
    plan = Plan(private, Layout(("w",), ((4,),)), sum_bits=32)
    assert default_least(plan) <= 50
    assert plan.fewest_available(default_least(plan)) <= 750


def test_a_sum_of_whoever_was_in_time_is_divided_by_those_expected(tmp_path: Path) -> None:
    plan = plan_for(EVERYBODY, expected_answers=4)
    found = fleet(tmp_path, EVERYBODY, plan=plan, wanted=4, meddle={1: late_in(0)})
    for step, places in ((0, [0, 2, 3, 4]), (2, [0, 2, 3, 4]), (3, [0, 1, 2, 3, 4])):
        result = summed(found, step=step)
        assert torch.equal(result.total, found.expected(places, step=step))
        assert result.denominator == 4  # whoever was there


@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
def test_a_run_with_late_nodes_is_the_simulation_s(tmp_path: Path, cluster_stores: Path, secure: bool) -> None:
    """The nodes that are late here are those that a simulation leaves out: models, ledgers and results are the same."""
    place = Place(tmp_path, cluster_stores)
    place.write_files(cohort_size=6, expected_answers=4)
    plan = plan_of(place.recipe)
    late = {
        name: [step for step in range(ROUNDS) if not in_time(np.array([number]), plan=plan, step=step)[0]]
        for number, name in enumerate(place.people)
    }
    assert any(late.values())

    def silent_in(steps: list[int]) -> Callable[[AnswerFunction], AnswerFunction]:
        def silent(answer: AnswerFunction) -> AnswerFunction:
            def answered(data: bytes) -> bytes | None:
                order = parse_order(data, limit=1 << 30)
                return None if order.kind is OrderKind.TRAIN and order.step in steps else answer(data)

            return answered

        return silent

    meddle = {name: silent_in(steps) for name, steps in late.items()}
    served = place.run_here("served", secure=secure, meddle=meddle).folder
    check_same(served, place.simulate("simulated"))
    records = [json.loads(line) for line in (served / DIAGNOSTICS).read_text().splitlines()]
    assert any(record["dropped"].get(AWAY) for record in records)
    report = verify(served / LEDGER)
    assert report.header["plan"]["expected_answers"] == 4
    planned = plan_run(PEOPLE, cohort_size=6, central_steps=ROUNDS, delta=1e-3, noise_multiplier=8.0)
    assert epsilon(report.spent, 1e-3) == planned.epsilon


def plan_of(recipe: Recipe) -> Plan:
    """As the server and a simulation have it, for who is late."""
    from sottovoce.base.seeds import derive

    settings = recipe.federated
    private = settings.privacy.settings(
        population_size=PEOPLE,
        cohort_size=settings.cohort_size,
        central_steps=settings.steps,
        privacy_unit="speaker",
        no_unit_reason=None,
        users_also_in_seed=0,
        root_seed=derive(recipe.seed, "privacy"),
        expected_answers=settings.expected_answers,
    )
    return Plan(private, Layout(("w",), ((4,),)))


def test_a_release_in_one_process_has_nobody_late(tmp_path: Path, cluster_stores: Path) -> None:
    from sottovoce.training.run import run_recipe

    place = Place(tmp_path, cluster_stores)
    place.write_files(cohort_size=6, expected_answers=4, privacy={"mode": "secure"})
    with pytest.raises(InputError, match=r"expected_answers=4 with .* in this process no client is late"):
        run_recipe(place.recipe, out=tmp_path / "run", resume=False, context=place.around)
