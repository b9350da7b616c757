"""What a node says that it has sent in a round is what has left it, in all messages of a secure sum."""

import re
from typing import Any

import pytest
from tests.deployment.conftest import Settle
from tests.deployment.village import Village

from sottovoce.deployment.invitation import SecureSums
from sottovoce.deployment.messages import OVERHEAD, Code, Kind, peek_order
from sottovoce.deployment.own_home import pause
from sottovoce.deployment.own_sent import SentInRounds, amount
from sottovoce.deployment.participant import Participant
from sottovoce.deployment.sum_terms import Phase

FOUR = 4


class Told:
    """What one node tells its user, and how many bytes its answers really had since it was asked to train."""

    def __init__(self, village: Village, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.sent: list[int] = []
        node, sent = village.joined[name], SentInRounds()
        honest = Participant.answer

        def answer(participant: Participant, data: bytes) -> bytes:
            answered = honest(participant, data)
            if participant is node:
                self._note(sent, data, answered)
            return answered

        monkeypatch.setattr(Participant, "answer", answer)

    def _note(self, sent: SentInRounds, data: bytes, answered: bytes) -> None:
        order = peek_order(data, limit=1 << 30)
        if order.kind in (Kind.TRAIN, Kind.WER):
            self.sent.clear()
        self.sent.append(len(answered))
        self.lines += sent.lines(order, answered)


def trained(village: Village, step: int = 2) -> dict[str, int]:
    village.attempt += 1
    when = {"step": step, "attempt": village.attempt}
    for name in village.people[:FOUR]:
        assert village.ask(name, village.train(name, **when)).code is Code.DONE
    village.attempt = when["attempt"]
    return when


@pytest.fixture
def secure(settle: Settle) -> Village:
    village = settle(secure=SecureSums(least=3))
    for name in village.people[:FOUR]:
        village.welcome(name)
    return village


def test_all_messages_of_a_secure_sum_are_counted(secure: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(secure, secure.people[0], monkeypatch)
    when = trained(secure)
    secure.opened(list(range(FOUR)), **when)
    update = 8 * secure.layout.dimension
    assert len(told.sent) == 1 + len(Phase)
    assert told.sent[0] == OVERHEAD  # all that was counted before: no update is in the first of them
    assert sum(told.sent) > update
    assert told.lines == [
        "round 3: asked to train; the answer goes into a secure sum",
        f"round 3: sent {amount(sum(told.sent))} in 6 messages of the secure sum",
    ]


@pytest.mark.parametrize("phase", [Phase.KEYS, Phase.MASKED, Phase.UNMASK])
def test_a_sum_that_was_not_finished_is_said_with_the_next_order(
    secure: Village, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    """The server stopped asking this node at some phase: it has sent what it has sent."""
    told = Told(secure, secure.people[0], monkeypatch)
    when = trained(secure)
    secure.gone[secure.people[0]] = phase
    secure.opened(list(range(FOUR)), **when)
    so_far = sum(told.sent)
    assert len(told.lines) == 1
    trained(secure)
    said = f"round 3: sent {amount(so_far)} in {phase.value} messages of the secure sum, which was not finished"
    assert told.lines[1] == f"{said} with this node"
    assert told.lines[2].startswith("round 3: asked to train")


def test_an_open_update_and_a_refusal_are_said_at_once(settle: Settle, monkeypatch: pytest.MonkeyPatch) -> None:
    village = settle()
    anna = village.people[0]
    village.welcome(anna)
    told = Told(village, anna, monkeypatch)
    village.ask(anna, village.train(anna))
    assert told.lines == [f"round 1: asked to train, sent {amount(told.sent[0])}"]
    assert told.sent[0] > 8 * village.layout.dimension
    pause(village.place / anna / "home")
    village.ask(anna, village.train(anna))
    assert told.lines[1:] == ["round 1: asked to train, refused (paused)"]


@pytest.mark.parametrize(("count", "said"), [(999, "999 bytes"), (999_499, "999 kB"), (999_500, "1 MB")])
def test_amounts_are_three_digits(count: int, said: str) -> None:
    assert amount(count) == said


@pytest.mark.parametrize("exponent", range(12))
def test_amounts_have_a_unit(exponent: int) -> None:
    found: Any = re.fullmatch(r"[\d.,]+ (bytes|kB|MB|GB)", amount(10**exponent))
    assert found is not None
