"""Who leaves, pauses or has sent all that they accepted: the others go on, and whoever runs the server is told."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.network.nodes import KEYS, NOW, Meddle, Node, availability_of, fleet
from tests.network.places import ROUNDS, Place
from tests.network.test_clients import EVERYBODY, reasons, says, silent_in, summed

from sottovoce.network.keys import NODE_KEY, fingerprint, load_private_key
from sottovoce.network.messages import AnswerCode, OrderKind, departure, parse_order
from sottovoce.network.roster import Roster, RosterEntry
from sottovoce.network.server.availability import LEFT, Availability
from sottovoce.network.transport.link import AnswerFunction, LocalLink, SentOrders
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import verify
from sottovoce.training.federation import TOO_FEW
from sottovoce.training.remote_clients import TooFewClients
from sottovoce.training.run_folder import LEDGER


class SayingLink:
    """A `LocalLink` over which nodes may say, unasked, that they have left."""

    def __init__(self, answers: Mapping[str, AnswerFunction]) -> None:
        self._link, self.said = LocalLink(answers), dict[str, bytes]()

    def present(self) -> frozenset[str]:
        return self._link.present()

    def ask(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        return self._link.ask(orders, seconds=seconds, limit=limit)

    def send(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> SentOrders:
        return self._link.send(orders, seconds=seconds, limit=limit)

    def departures(self) -> Mapping[str, bytes]:
        found, self.said = self.said, {}
        return found

    def close(self) -> None:
        self._link.close()


def leaves(code: AnswerCode, *, at: OrderKind = OrderKind.TRAIN) -> Meddle:
    """Refuses with `code` from the first order of kind `at` on."""

    def meddle(node: Node) -> AnswerFunction:
        def answer(data: bytes) -> bytes | None:
            answered = node.answer(data)
            return node.orders[-1].refused(code).signed(node.key) if at in node.heard else answered

        return answer

    return meddle


def never() -> bool:
    return False


# Who leaves.


@pytest.mark.parametrize("secure", [False, True])
def test_one_person_who_leaves_does_not_stop_the_others(tmp_path: Path, secure: bool) -> None:
    """Five nodes, a round waits for all; after a departure for all who are still in, and no longer for all five."""
    said: list[str] = []
    found = fleet(
        tmp_path, EVERYBODY, secure=secure, wanted=5, fewest=3, meddle={1: leaves(AnswerCode.LEFT)}, say=said.append
    )
    first = summed(found, step=0)
    assert reasons(first) == {"refused (left)": 1}
    second = summed(found, step=1)
    assert torch.equal(second.total, found.expected([0, 2, 3, 4], step=1))
    assert second.denominator == found.plan.denominator
    assert found.nodes[1].heard.count(OrderKind.TERMS) == 1  # nor is it asked again
    assert said == [
        "p1: left for good; 4 of 5 nodes can still take part, and a round needs 4",
        "round 1: of those drawn, 1 refused (left)",
        "round 2: of those drawn, 1 not here when the round began",
    ]


def test_a_server_that_goes_on_waits_for_nobody_who_has_left(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, wanted=5, meddle={1: leaves(AnswerCode.LEFT)})
    summed(found)
    again = fleet(tmp_path, EVERYBODY, wanted=5)  # were it to come back with this key, it is out
    assert torch.equal(summed(again).total, again.expected([0, 2, 3, 4], step=0))
    assert again.nodes[1].heard == []
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()] == [0o600]


def unasked(
    place: int, *, key: int | None = None, node: int | None = None, code: AnswerCode = AnswerCode.LEFT
) -> bytes:
    """What the node at `place` says on leaving; in its place another key signs, or another node is named."""
    name = fingerprint(KEYS[place if node is None else node].public_key())
    return replace(departure(name), code=code).signed(KEYS[place if key is None else key])


@pytest.mark.parametrize(
    ("words", "is_believed"),
    [
        (unasked(1), True),
        (unasked(1, key=2), False),
        (unasked(2), False),
        (unasked(1, node=2), False),
        (unasked(1, code=AnswerCode.PAUSED), False),
        (b"left", False),
        (b"", False),
    ],
    ids=["its own", "another's key", "another's departure", "of another node", "a pause", "rubbish", "nothing"],
)
def test_a_departure_is_believed_where_its_node_has_signed_it(tmp_path: Path, words: bytes, is_believed: bool) -> None:
    """Whoever carries messages can put nobody out of a run."""
    links: list[SayingLink] = []

    def link_of(answers: Mapping[str, AnswerFunction]) -> SayingLink:
        links.append(SayingLink(answers))
        return links[0]

    found = fleet(tmp_path, EVERYBODY, wanted=5, link_of=link_of)
    summed(found)
    links[0].said[found.nodes[1].name.hex()] = words
    result = summed(found, step=1)
    assert reasons(result) == ({"not here when the round began": 1} if is_believed else {})


def test_an_answer_to_an_order_is_no_departure_and_a_departure_no_answer(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, wanted=5, meddle={1: lambda node: lambda data: _departure_of(node, data)})
    assert reasons(summed(found)) == {"no answer to what was asked (unexpected)": 1}


def _departure_of(node: Node, data: bytes) -> bytes | None:
    answered = node.answer(data)
    return departure(node.name).signed(node.key) if node.orders[-1].kind is OrderKind.TRAIN else answered


def test_a_departure_changes_nothing_of_what_is_charged(tmp_path: Path, cluster_stores: Path) -> None:
    """K and q stay: the same people are drawn, by the same event, and each round costs the same; half of them are in
    a round here. In a rehearsal, so that both runs draw the same."""
    ledgers = []
    for people_leave in (0, 2):
        folder = tmp_path / str(people_leave)
        folder.mkdir()
        place = Place(folder, cluster_stores)
        place.write_files(cohort_size=5)
        gone = {name: leaving(place, name, at=1) for name in place.people[:people_leave]}
        outcome = place.run_here("served", secure=False, meddle=gone)
        assert outcome.results is not None
        ledgers.append(read_chain(outcome.folder / LEDGER).records)
    told = ("kind", "step", "attempt", "event", "epsilon", "clip_bound", "cohort")
    kept = [[{name: line.get(name) for name in told} for line in lines] for lines in ledgers]
    assert kept[0] == kept[1]
    assert ledgers[0][0] == ledgers[1][0]  # the plan, with K
    ends = [[line for line in lines if line["kind"] == "commit"][-1]["result"] for lines in ledgers]
    assert ends[0] != ends[1]


def leaving(place: Place, name: str, *, at: int) -> Callable[[AnswerFunction], AnswerFunction]:
    """`name` leaves for good when it is asked to train for the time `at`."""
    key = load_private_key(place.folder / "keys" / name / NODE_KEY)

    def meddle(answer: AnswerFunction) -> AnswerFunction:
        trained = 0

        def left(data: bytes) -> bytes | None:
            nonlocal trained
            order = parse_order(data, limit=1 << 30)
            trained += order.kind is OrderKind.TRAIN
            answered = answer(data)
            return order.refused(AnswerCode.LEFT).signed(key) if trained >= at else answered

        return left

    return meddle


# Who is waited for.


def roster(people: int, *, revoked: frozenset[int] = frozenset()) -> Roster:
    return Roster(tuple(RosterEntry(f"p{n}", KEYS[n].public_key(), n in revoked) for n in range(people)))


def test_whoever_runs_the_server_is_told_who_is_missing_since_when_and_what_is_waited_for(tmp_path: Path) -> None:
    found: Availability = availability_of(roster(6, revoked=frozenset({5})), tmp_path, wanted=6, fewest=3)
    found.mark_seen([0, 1, 2])
    found.mark_out([3], LEFT)
    assert found.describe_waiting({0}, {1: AnswerCode.NOT_ACCEPTED}) == (
        "waiting until at least 4 of 4 nodes are here: 1 are; away: p2 (last seen 14:05:10), p4 (not seen yet); "
        "not ready: p1 (has not accepted the invitation); out: p3 (left for good), p5 (revoked)"
    )
    assert f"{NOW:%H:%M:%S}" == "14:05:10"


def test_of_many_who_are_missing_some_are_named(tmp_path: Path) -> None:
    users = tuple(RosterEntry(f"p{n}", KEYS[0].public_key()) for n in range(40))
    found = availability_of(Roster(users), tmp_path, wanted=20)
    line = found.describe_waiting(set(), {})
    assert line.endswith("p7 (not seen yet) and 32 more")


def test_a_pause_counts_as_away(tmp_path: Path) -> None:
    said: list[str] = []
    found = fleet(
        tmp_path,
        EVERYBODY,
        wanted=4,
        meddle={1: leaves(AnswerCode.PAUSED), 2: silent_in(OrderKind.TERMS)},
        say=said.append,
    )
    assert reasons(summed(found)) == {"refused (paused)": 1, "not here when the round began": 1}
    asked = iter([False, True])
    assert not found.clients.ready(lambda: next(asked))
    assert said[-1] == (
        "waiting until at least 4 of 5 nodes are here: 3 are; away: p2 (not seen yet); not ready: p1 (paused)"
    )


# Who has sent all that they accepted.


def test_that_nodes_have_sent_all_they_accepted_is_said_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    done = {place: leaves(AnswerCode.ABOVE_ACCEPTED) for place in (0, 1)}
    found = fleet(tmp_path, EVERYBODY, wanted=5, fewest=3, meddle=done, say=said.append)
    summed(found, step=52)
    assert said == ["round 53: of those drawn, 2 refused (above_accepted)"]
    summed(found, step=53)
    assert said[1:] == [
        "p0, p1: has sent all that was accepted; 3 of 5 nodes can still take part, and a round needs 3",
        "round 54: of those drawn, 2 not here when the round began",
    ]


def test_a_round_that_too_few_can_answer_is_not_begun(tmp_path: Path) -> None:
    done = {place: leaves(AnswerCode.ABOVE_ACCEPTED) for place in (0, 1)} | {2: leaves(AnswerCode.LEFT)}
    found = fleet(tmp_path, EVERYBODY, wanted=5, fewest=3, meddle=done)
    summed(found)
    with pytest.raises(TooFewClients) as caught:
        found.clients.ready(never)
    assert str(caught.value) == (
        "only 2 of 5 nodes can still take part, and a round needs 3 (p0 (has sent all that was accepted), "
        "p1 (has sent all that was accepted), p2 (left for good)): no further round is made or charged; a new run, "
        "with more people or a smaller --least, asks everybody anew"
    )


def test_nobody_is_taken_out_for_what_may_pass(tmp_path: Path) -> None:
    """A limit for today, a pause, a disk that is full: they are away, and waited for."""
    passing = {
        0: leaves(AnswerCode.OVER_QUOTA),
        1: leaves(AnswerCode.PAUSED),
        2: leaves(AnswerCode.UNABLE),
        3: says(b"", code=AnswerCode.LEFT),
    }
    found = fleet(tmp_path, EVERYBODY, wanted=5, fewest=3, meddle=passing)
    summed(found)
    asked = iter([True])
    assert not found.clients.ready(lambda: next(asked))


def test_a_run_that_too_few_can_answer_ends_in_order_and_charges_nothing_more(
    tmp_path: Path, cluster_stores: Path
) -> None:
    place = Place(tmp_path, cluster_stores)
    place.write_files(cohort_size=9, privacy={"mode": "secure"})

    gone = {name: leaving(place, name, at=2) for name in place.people[:7]}
    said: list[str] = []
    outcome = place.run_here("served", secure=True, spare=1, meddle=gone, say=said.append)
    assert outcome.results is not None
    ended = outcome.results["ended"]
    assert (ended["reason"], ended["step"]) == (TOO_FEW, 2)
    assert ended["words"].startswith("only 2 of 9 nodes can still take part, and a round needs 3 (")
    assert verify(outcome.folder / LEDGER).attempts == 2 < ROUNDS
    assert not (outcome.folder / "secrets").exists()
    assert json.loads((outcome.folder / "results.json").read_text())["ended"] == ended
    assert [line for line in said if line.startswith("round 2: ")] == [
        "round 2: of those drawn, 7 refused (left), 2 their sum could not be opened (too_few)"
    ]
