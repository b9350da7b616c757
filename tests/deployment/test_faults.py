"""Nodes that break, are late or send something else, as processes over TLS: the round goes on, and so do they.

The server's end is what `serve` runs. Nobody is killed, or late, at a time: what they do follows from an order.
"""

from typing import TYPE_CHECKING

import pytest
import torch
from tests.deployment.lines import Line
from tests.points import Gate

from sottovoce.deployment.conversation import AWAY
from sottovoce.deployment.network import CLIPPED_AGAIN
from sottovoce.federated.cohort import CohortSum
from sottovoce.privacy.chain import read_chain

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")

if TYPE_CHECKING:
    from tests.deployment.hamlet import Hamlet, Service, Sums

EVERYBODY = tuple(range(7))
ANNA = 0
OTHERS = EVERYBODY[1:]
EVER, LATE = 600.0, 2.0  # seconds: what nothing here needs, and until nobody is waited for who will not answer
LONG = pytest.mark.long  # what a shorter one shows as well
pytestmark = pytest.mark.xdist_group("hamlet")


def reasons(found: CohortSum) -> dict[str, int]:
    assert found.diagnostics is not None
    return dict(found.diagnostics.dropped)


def killed_meanwhile(hamlet: "Hamlet", service: "Service", word: str) -> CohortSum:
    """A round in which Anna's node kills itself as `word` says, and is started again at once."""
    clients = service.clients()
    assert clients.ready(lambda: False)
    name = hamlet.place.people[ANNA]
    hamlet.tell(name, word)
    back = hamlet.begin_again_when_killed(name)
    found = service.sum(clients)
    back.result()
    return found


def check_all_are_here_again(hamlet: "Hamlet", service: "Service") -> None:
    """Whatever it was, it was that round's; and nobody has answered an attempt twice."""
    found = service.sum(service.clients())
    assert reasons(found) == {}
    assert torch.equal(found.total, hamlet.expected(EVERYBODY))
    for name in hamlet.place.people:
        answered = [
            (line["run"], line["attempt"], line["answered"])
            for line in read_chain(hamlet.own_ledger(name)).records
            if "answered" in line
        ]
        assert len(answered) == len({*answered})


@pytest.mark.parametrize("word", [pytest.param("die before TRAIN", marks=LONG), "die in upload"])
def test_killed_in_training_or_in_its_upload_it_is_zero(hamlet: "Hamlet", word: str) -> None:
    service = hamlet.services["open"]
    found = killed_meanwhile(hamlet, service, word)
    assert torch.equal(found.total, hamlet.expected(OTHERS))
    assert reasons(found) == {AWAY: 1}
    check_all_are_here_again(hamlet, service)


@pytest.mark.parametrize(
    ("word", "summed"),
    [
        pytest.param("die after TRAIN", OTHERS, marks=LONG),
        pytest.param("die before KEYS", OTHERS, marks=LONG),
        pytest.param("die after SHARES", OTHERS, marks=LONG),
        pytest.param("die before MASKED", OTHERS, marks=LONG),
        pytest.param("die in upload", OTHERS, marks=LONG),
        pytest.param("die before SURVIVORS", EVERYBODY, marks=LONG),
        ("die before UNMASK", EVERYBODY),
        pytest.param("die after UNMASK", EVERYBODY, marks=LONG),
    ],
)
def test_killed_in_a_secure_sum_it_is_in_it_or_not(hamlet: "Hamlet", word: str, summed: tuple[int, ...]) -> None:
    """Up to the masked update it is left out. After that it is summed, whether it stays for the unmasking or not."""
    service = hamlet.services["secure"]
    found = killed_meanwhile(hamlet, service, word)
    assert torch.equal(found.total, hamlet.expected(summed))
    assert sum(reasons(found).values()) == 1
    check_all_are_here_again(hamlet, service)


@LONG
def test_killed_in_the_unmasking_of_a_ring(hamlet: "Hamlet") -> None:
    found = killed_meanwhile(hamlet, hamlet.services["ring"], "die before UNMASK")
    assert torch.equal(found.total, hamlet.expected(EVERYBODY))


@LONG
def test_away_it_is_zero_and_welcome_when_it_comes_back(hamlet: "Hamlet") -> None:
    service, name = hamlet.services["open"], hamlet.place.people[ANNA]
    clients = service.clients(least=6)
    assert service.clients().ready(lambda: False)
    hamlet.stop(name)
    found = service.sum(clients)
    assert torch.equal(found.total, hamlet.expected(OTHERS))
    assert reasons(found) == {"not here when the round began": 1}
    hamlet.begin(name)
    check_all_are_here_again(hamlet, service)


@LONG
def test_the_line_is_cut_in_the_middle_of_an_upload_and_nothing_is_lost(hamlet: "Hamlet") -> None:
    """What the server has got already is not sent again; the line is there again at once."""
    service, name = hamlet.services["open"], hamlet.place.people[ANNA]
    assert service.clients().ready(lambda: False)
    hamlet.stop(name)
    with Line(hamlet.link.port) as line:
        hamlet.begin(name, port=line.port)
        clients = service.clients()
        assert clients.ready(lambda: False)
        line.cut_after(100_000)  # bytes, of an update of 247,160
        found = service.sum(clients)
        assert line.cuts == 1
        assert torch.equal(found.total, hamlet.expected(EVERYBODY))
        assert reasons(found) == {}
        hamlet.stop(name)
    hamlet.begin(name)
    check_all_are_here_again(hamlet, service)


def test_slow_and_in_time_it_is_waited_for(hamlet: "Hamlet") -> None:
    service, name = hamlet.services["open"], hamlet.place.people[ANNA]
    clients = service.clients()
    assert clients.ready(lambda: False)
    with Gate() as gate:
        hamlet.tell(name, f"slow {gate.address}")
        summing = hamlet.meanwhile(service.sum, clients)
        held = gate.reached()
        assert not summing.done()
        hamlet.tell(name, "")
        held.go()
        assert torch.equal(summing.result().total, hamlet.expected(EVERYBODY))


def test_slow_and_too_late_it_is_zero_and_its_answer_is_lost(hamlet: "Hamlet") -> None:
    """Only Anna is drawn, so that nobody else can be too late: she answers after the round is over."""
    service, name = hamlet.services["open"], hamlet.place.people[ANNA]
    clients = service.clients(seconds=LATE)
    assert clients.ready(lambda: False)
    with Gate() as gate:
        hamlet.tell(name, f"slow {gate.address}")
        summing = hamlet.meanwhile(service.sum, clients, (ANNA,))
        held = gate.reached()
        found = summing.result()
        hamlet.tell(name, "")
        held.go()
    assert not found.total.any()
    assert reasons(found) == {AWAY: 1}
    check_all_are_here_again(hamlet, service)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        pytest.param("wrong shape", "an update of another length", marks=LONG),
        pytest.param("huge", AWAY, marks=LONG),
        ("replay", "no answer to what was asked (unexpected)"),
        ("in another's name", "no answer to what was asked (unexpected)"),
        pytest.param("with a stranger's key", "no answer to what was asked (untrusted)", marks=LONG),
        pytest.param("rubbish", "no answer to what was asked (unreadable)", marks=LONG),
    ],
)
def test_who_sends_something_else_is_zero(hamlet: "Hamlet", word: str, why: str) -> None:
    service, name = hamlet.services["open"], hamlet.place.people[ANNA]
    clients = service.clients(seconds=LATE if word == "huge" else EVER)
    if word == "replay":
        service.sum(service.clients(), (ANNA,))  # what is sent again
    assert clients.ready(lambda: False)
    hamlet.tell(name, word)
    found = service.sum(clients, (ANNA,) if word == "huge" else EVERYBODY)
    hamlet.tell(name, "")
    assert torch.equal(found.total, hamlet.expected(() if word == "huge" else OTHERS))
    assert reasons(found) == {why: 1}
    check_all_are_here_again(hamlet, service)


@pytest.mark.parametrize("word", ["NaN", pytest.param("infinite", marks=LONG), pytest.param("too large", marks=LONG)])
def test_what_is_no_update_is_bounded_like_one(hamlet: "Hamlet", word: str) -> None:
    """Words hold no NaN and no infinity: the bytes of one are some large number, which is clipped."""
    service, name = hamlet.services["open"], hamlet.place.people[ANNA]
    clients = service.clients()
    assert clients.ready(lambda: False)
    hamlet.tell(name, word)
    found = service.sum(clients)
    hamlet.tell(name, "")
    added = torch.linalg.vector_norm(found.total - hamlet.expected(OTHERS))
    assert 0.99 * service.plan.clip_bound < added <= service.plan.clip_bound
    assert reasons(found) == {CLIPPED_AGAIN: 1}


@LONG
@pytest.mark.parametrize("sums", ["secure", "ring"])
def test_a_masked_update_of_another_length_is_left_out(hamlet: "Hamlet", sums: "Sums") -> None:
    service, name = hamlet.services[sums], hamlet.place.people[ANNA]
    clients = service.clients()
    assert clients.ready(lambda: False)
    hamlet.tell(name, "wrong shape")
    found = service.sum(clients)
    hamlet.tell(name, "")
    assert torch.equal(found.total, hamlet.expected(OTHERS))
    check_all_are_here_again(hamlet, service)
