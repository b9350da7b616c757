"""What a node says that it has sent in a round is what has left it, in all messages of a secure sum."""

import re
from typing import Any

import pytest
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import LocalCluster

from sottovoce.network.invitation import SecureSums
from sottovoce.network.messages import OVERHEAD, AnswerCode, OrderKind, parse_order
from sottovoce.network.node.home import pause_node
from sottovoce.network.node.participant import Participant
from sottovoce.network.node.traffic import RoundTraffic, format_size
from sottovoce.network.secure_sum.terms import Phase

FOUR = 4


class Told:
    """What one node tells its user, and how many bytes its answers really had since it was asked to train."""

    def __init__(self, local_cluster: LocalCluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.sent: list[int] = []
        node, sent = local_cluster.joined[name], RoundTraffic()
        honest = Participant.answer

        def answer(participant: Participant, data: bytes) -> bytes:
            answered = honest(participant, data)
            if participant is node:
                if parse_order(data, limit=1 << 30).kind in (OrderKind.TRAIN, OrderKind.WER):
                    self.sent.clear()
                self.sent.append(len(answered))
            return answered

        monkeypatch.setattr(Participant, "answer", answer)
        self.is_taken = True
        monkeypatch.setattr(
            node,
            "_on_answer",
            lambda order, found: self.lines.extend(sent.lines(order, found, is_taken=self.is_taken)),
        )


def trained(local_cluster: LocalCluster, step: int = 2) -> dict[str, int]:
    local_cluster.attempt += 1
    when = {"step": step, "attempt": local_cluster.attempt}
    for name in local_cluster.people[:FOUR]:
        assert local_cluster.ask(name, local_cluster.train(name, **when)).code is AnswerCode.DONE
    local_cluster.attempt = when["attempt"]
    return when


@pytest.fixture
def secure(make_cluster: MakeCluster) -> LocalCluster:
    local_cluster = make_cluster(secure=SecureSums(least=3))
    for name in local_cluster.people[:FOUR]:
        local_cluster.welcome(name)
    return local_cluster


def test_all_messages_of_a_secure_sum_are_counted(secure: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(secure, secure.people[0], monkeypatch)
    when = trained(secure)
    secure.opened(list(range(FOUR)), **when)
    update = 8 * secure.layout.dimension
    assert len(told.sent) == 1 + len(Phase)
    assert told.sent[0] == OVERHEAD  # all that was counted before: no update is in the first of them
    assert sum(told.sent) > update
    assert told.lines == [
        "round 3: asked to train; the answer goes into a secure sum",
        f"round 3: sent {format_size(sum(told.sent))} in 6 messages of the secure sum",
    ]


@pytest.mark.parametrize("phase", [Phase.KEYS, Phase.MASKED, Phase.UNMASK])
def test_a_sum_that_was_not_finished_is_said_with_the_next_order(
    secure: LocalCluster, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    """The server stopped asking this node at some phase: it has sent what it has sent."""
    told = Told(secure, secure.people[0], monkeypatch)
    when = trained(secure)
    secure.gone[secure.people[0]] = phase
    secure.opened(list(range(FOUR)), **when)
    so_far = sum(told.sent)
    assert len(told.lines) == 1
    trained(secure)
    said = f"round 3: sent {format_size(so_far)} in {phase.value} messages of the secure sum, which was not finished"
    assert told.lines[1] == f"{said} with this node"
    assert told.lines[2].startswith("round 3: asked to train")


def test_an_open_update_and_a_refusal_are_said_at_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster = make_cluster()
    anna = local_cluster.people[0]
    local_cluster.welcome(anna)
    told = Told(local_cluster, anna, monkeypatch)
    local_cluster.ask(anna, local_cluster.train(anna))
    assert told.lines == [f"round 1: asked to train, sent {format_size(told.sent[0])}"]
    assert told.sent[0] > 8 * local_cluster.layout.dimension
    pause_node(local_cluster.place / anna / "home")
    local_cluster.ask(anna, local_cluster.train(anna))
    assert told.lines[1:] == ["round 1: asked to train, refused (paused)"]


def test_what_the_server_did_not_take_is_not_said_to_be_sent(
    make_cluster: MakeCluster, secure: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for local_cluster in (make_cluster(), secure):
        anna = local_cluster.people[0]
        if local_cluster is not secure:
            local_cluster.welcome(anna)
        told = Told(local_cluster, anna, monkeypatch)
        told.is_taken = False
        local_cluster.ask(anna, local_cluster.train(anna))
        assert told.lines == [
            "round 1: asked to train; the server did not take the answer: it had stopped waiting, or cannot be reached"
        ]


def test_a_message_of_a_secure_sum_that_was_not_taken_is_not_counted(
    secure: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(secure, secure.people[0], monkeypatch)
    when = trained(secure)
    told.is_taken = False
    secure.opened(list(range(FOUR)), **when)
    told.is_taken = True
    trained(secure)
    assert told.lines[1].startswith(f"round 3: sent {format_size(told.sent[0])} in 1 messages of the secure sum, which")


@pytest.mark.parametrize(("count", "said"), [(999, "999 bytes"), (999_499, "999 kB"), (999_500, "1 MB")])
def test_amounts_are_three_digits(count: int, said: str) -> None:
    assert format_size(count) == said


@pytest.mark.parametrize("exponent", range(12))
def test_amounts_have_a_unit(exponent: int) -> None:
    found: Any = re.fullmatch(r"[\d.,]+ (bytes|kB|MB|GB)", format_size(10**exponent))
    assert found is not None
