"""Nodes that break, are late or send something else, as processes over TLS: the round goes on, and so do they.

The server's end is what `serve` runs. Nobody is killed, or late, at a time: what they do follows from an order.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.network.lines import Line
from tests.points import Gate

from sottovoce.federated.cohort import CohortSum
from sottovoce.network.server.clients import CLIPPED_AGAIN
from sottovoce.network.server.orders import AWAY
from sottovoce.privacy.chain import read_chain

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")

if TYPE_CHECKING:
    from tests.network.process_cluster import ProcessCluster, Service, Sums

EVERYBODY = tuple(range(7))
ANNA = 0
OTHERS = EVERYBODY[1:]
EVER, LATE = 600.0, 2.0  # seconds: what nothing here needs, and until nobody is waited for who will not answer
LONG = pytest.mark.long  # what a shorter one shows as well
pytestmark = pytest.mark.xdist_group("process_cluster")


def reasons(found: CohortSum) -> dict[str, int]:
    assert found.diagnostics is not None
    return dict(found.diagnostics.dropped)


def killed_meanwhile(process_cluster: "ProcessCluster", service: "Service", word: str) -> CohortSum:
    """A round in which Anna's node kills itself as `word` says, and is started again at once."""
    clients = service.clients()
    assert clients.ready(lambda: False)
    name = process_cluster.place.people[ANNA]
    process_cluster.tell(name, word)
    back = process_cluster.begin_again_when_killed(name)
    found = service.sum(clients)
    back.result()
    return found


def check_all_are_here_again(process_cluster: "ProcessCluster", service: "Service") -> None:
    """Whatever it was, it was that round's; and nobody has answered an attempt twice."""
    found = service.sum(service.clients())
    assert reasons(found) == {}
    assert torch.equal(found.total, process_cluster.expected(EVERYBODY))
    for name in process_cluster.place.people:
        answered = [
            (line["run"], line["attempt"], line["answered"])
            for line in read_chain(process_cluster.own_ledger(name)).records
            if "answered" in line
        ]
        assert len(answered) == len({*answered})


@pytest.mark.parametrize("word", [pytest.param("die before TRAIN", marks=LONG), "die in upload"])
def test_killed_in_training_or_in_its_upload_it_is_zero(process_cluster: "ProcessCluster", word: str) -> None:
    service = process_cluster.services["open"]
    found = killed_meanwhile(process_cluster, service, word)
    assert torch.equal(found.total, process_cluster.expected(OTHERS))
    assert reasons(found) == {AWAY: 1}
    check_all_are_here_again(process_cluster, service)


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
def test_killed_in_a_secure_sum_it_is_in_it_or_not(
    process_cluster: "ProcessCluster", word: str, summed: tuple[int, ...]
) -> None:
    """Up to the masked update it is left out. After that it is summed, whether it stays for the unmasking or not."""
    service = process_cluster.services["secure"]
    found = killed_meanwhile(process_cluster, service, word)
    assert torch.equal(found.total, process_cluster.expected(summed))
    assert sum(reasons(found).values()) == 1
    check_all_are_here_again(process_cluster, service)


@LONG
def test_killed_in_the_unmasking_of_a_ring(process_cluster: "ProcessCluster") -> None:
    found = killed_meanwhile(process_cluster, process_cluster.services["ring"], "die before UNMASK")
    assert torch.equal(found.total, process_cluster.expected(EVERYBODY))


@LONG
def test_away_it_is_zero_and_welcome_when_it_comes_back(process_cluster: "ProcessCluster") -> None:
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    clients = service.clients(least=6)
    assert service.clients().ready(lambda: False)
    process_cluster.stop(name)
    found = service.sum(clients)
    assert torch.equal(found.total, process_cluster.expected(OTHERS))
    assert reasons(found) == {"not here when the round began": 1}
    process_cluster.begin(name)
    check_all_are_here_again(process_cluster, service)


@LONG
def test_the_line_is_cut_in_the_middle_of_an_upload_and_nothing_is_lost(process_cluster: "ProcessCluster") -> None:
    """What the server has got already is not sent again; the line is there again at once."""
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    assert service.clients().ready(lambda: False)
    process_cluster.stop(name)
    with Line(process_cluster.link.port) as line:
        process_cluster.begin(name, port=line.port)
        clients = service.clients()
        assert clients.ready(lambda: False)
        line.cut_after(100_000)  # bytes, of an update of 247,160
        found = service.sum(clients)
        assert line.cuts == 1
        assert torch.equal(found.total, process_cluster.expected(EVERYBODY))
        assert reasons(found) == {}
        process_cluster.stop(name)
    process_cluster.begin(name)
    check_all_are_here_again(process_cluster, service)


def test_slow_and_in_time_it_is_waited_for(process_cluster: "ProcessCluster") -> None:
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    clients = service.clients()
    assert clients.ready(lambda: False)
    with Gate() as gate:
        process_cluster.tell(name, f"slow {gate.address}")
        summing = process_cluster.meanwhile(service.sum, clients)
        held = gate.reached()
        assert not summing.done()
        process_cluster.tell(name, "")
        held.go()
        assert torch.equal(summing.result().total, process_cluster.expected(EVERYBODY))


def test_slow_and_too_late_it_is_zero_and_its_answer_is_lost(process_cluster: "ProcessCluster") -> None:
    """Only Anna is drawn, so that nobody else can be too late: she answers after the round is over."""
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    clients = service.clients(seconds=LATE)
    assert clients.ready(lambda: False)
    with Gate() as gate:
        process_cluster.tell(name, f"slow {gate.address}")
        summing = process_cluster.meanwhile(service.sum, clients, (ANNA,))
        held = gate.reached()
        found = summing.result()
        process_cluster.tell(name, "")
        held.go()
    assert not found.total.any()
    assert reasons(found) == {AWAY: 1}
    check_all_are_here_again(process_cluster, service)


def test_while_one_trains_still_the_next_round_begins_and_ends(process_cluster: "ProcessCluster") -> None:
    """Anna is held in her training all the while. What she sends then is lost; her own ledger says that she sent."""
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    clients = service.clients(seconds=LATE, least=len(OTHERS))
    assert service.clients().ready(lambda: False)
    assert clients.ready(lambda: False)
    with Gate() as gate:
        process_cluster.tell(name, f"slow {gate.address}")
        summing = process_cluster.meanwhile(service.sum, clients, (ANNA,))
        held = gate.reached()
        assert not summing.result().total.any()
        late = service.attempts.last
        clients._timeouts = replace(clients._timeouts, training=EVER)
        found = service.sum(clients, OTHERS)  # without a word to Anna: she would answer it when she is done
        assert torch.equal(found.total, process_cluster.expected(OTHERS))
        assert service.attempts.last == late + 1
        process_cluster.tell(name, "")
        held.go()
    check_all_are_here_again(process_cluster, service)
    sent = [line for line in read_chain(process_cluster.own_ledger(name)).records if "answered" in line]
    assert any((line["run"], line["attempt"]) == (service.attempts.run.hex(), late) for line in sent)


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
def test_who_sends_something_else_is_zero(process_cluster: "ProcessCluster", word: str, why: str) -> None:
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    clients = service.clients(seconds=LATE if word == "huge" else EVER)
    if word == "replay":
        service.sum(service.clients(), (ANNA,))  # what is sent again
    assert clients.ready(lambda: False)
    process_cluster.tell(name, word)
    found = service.sum(clients, (ANNA,) if word == "huge" else EVERYBODY)
    process_cluster.tell(name, "")
    assert torch.equal(found.total, process_cluster.expected(() if word == "huge" else OTHERS))
    assert reasons(found) == {why: 1}
    check_all_are_here_again(process_cluster, service)


@pytest.mark.parametrize("word", ["NaN", pytest.param("infinite", marks=LONG), pytest.param("too large", marks=LONG)])
def test_what_is_no_update_is_bounded_like_one(process_cluster: "ProcessCluster", word: str) -> None:
    """Words hold no NaN and no infinity: the bytes of one are some large number, which is clipped."""
    service, name = process_cluster.services["open"], process_cluster.place.people[ANNA]
    clients = service.clients()
    assert clients.ready(lambda: False)
    process_cluster.tell(name, word)
    found = service.sum(clients)
    process_cluster.tell(name, "")
    added = torch.linalg.vector_norm(found.total - process_cluster.expected(OTHERS))
    assert 0.99 * service.plan.clip_bound < added <= service.plan.clip_bound
    assert reasons(found) == {CLIPPED_AGAIN: 1}


@LONG
@pytest.mark.parametrize("sums", ["secure", "ring"])
def test_a_masked_update_of_another_length_is_left_out(process_cluster: "ProcessCluster", sums: "Sums") -> None:
    service, name = process_cluster.services[sums], process_cluster.place.people[ANNA]
    clients = service.clients()
    assert clients.ready(lambda: False)
    process_cluster.tell(name, "wrong shape")
    found = service.sum(clients)
    process_cluster.tell(name, "")
    assert torch.equal(found.total, process_cluster.expected(OTHERS))
    check_all_are_here_again(process_cluster, service)
