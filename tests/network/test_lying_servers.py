"""A server that lies to nodes that are processes: it has the right keys, and gets nobody's vector.

The liar is this test, made of the server's own parts: its link, its signatures and its half of the protocol are right,
and only what it asks for is a lie. Nodes are `sottovoce join`, with TLS between. The same is tried on clients in one
process, in many more ways, by `test_secure_sum_attacks`.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from sottovoce.network.invitation import SecureSums, pack_invitation
from sottovoce.network.keys import ORDERS
from sottovoce.network.messages import AnswerCode, Order, OrderKind, fresh_nonce, open_answer
from sottovoce.network.model_transfer import write_round_model
from sottovoce.network.secure_sum.protocol import SumServer as SecureSum
from sottovoce.network.secure_sum.terms import Phase, SumAttempt, share_threshold
from sottovoce.network.secure_sum.words import decode_sum, read_update, update_bytes
from sottovoce.network.server.orders import Answers

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")

if TYPE_CHECKING:
    from tests.network.process_cluster import Lie, ProcessCluster, Sums

EVERYBODY = tuple(range(7))
ANNA, BERT = EVERYBODY[:2]
LONG = pytest.mark.long  # what a shorter one shows as well
pytestmark = pytest.mark.xdist_group("process_cluster")


def refusals(found: Answers) -> Counter[str]:
    assert not found.payloads
    return found.reasons


def told(process_cluster: "ProcessCluster", place: int, why: str) -> bool:
    """Whether the user of a node has been told, in its last line, that an order was not safe, and why."""
    said = process_cluster.said(process_cluster.place.people[place])
    return f"was not followed, as it would not be safe ({why}): nothing more leaves" in said[-1]


def lists(lie: "Lie", survived: set[int]) -> bytes:
    """The order of the survivors' phase: everybody has shared, and these have stayed."""
    cohort = lie.server._cohort
    return cohort.bitmap(EVERYBODY) + cohort.bitmap(survived)


def signatures(signed: Mapping[int, bytes]) -> bytes:
    return b"".join(struct.pack("<I", place) + one for place, one in sorted(signed.items()))


# Unmasking.


@pytest.mark.parametrize("sums", ["secure", pytest.param("ring", marks=LONG)])
def test_a_server_that_asks_twice_for_unmasking(process_cluster: "ProcessCluster", sums: "Sums") -> None:
    """The first time it gets the sum. Then nobody answers: not the same, nor another list, nor after a restart."""
    service = process_cluster.services[sums]
    lie = service.until(Phase.UNMASK)
    orders = lie.orders
    lie.go_on()
    assert lie.server.opened is not None
    assert torch.equal(decode_sum(lie.server.opened.total, service.plan), process_cluster.expected(EVERYBODY))
    assert refusals(lie.ask(Phase.UNMASK, orders)) == {"refused (unexpected)": 7}
    assert all(told(process_cluster, place, "out_of_turn") for place in EVERYBODY)
    other = dict.fromkeys(EVERYBODY, lists(lie, {*EVERYBODY} - {ANNA}))
    assert refusals(lie.ask(Phase.SURVIVORS, other)) == {"refused (unexpected)": 7}
    assert refusals(service.ask(OrderKind.TRAIN, dict.fromkeys(EVERYBODY, service.model), attempt=lie.attempt)) == {
        "refused (repeated)": 7
    }
    name = process_cluster.place.people[ANNA]
    process_cluster.stop(name)
    process_cluster.begin(name)
    assert service.clients().ready(lambda: False)  # it is back, and has heard the terms
    assert refusals(lie.ask(Phase.UNMASK, {ANNA: orders[ANNA]})) == {"refused (unexpected)": 1}
    assert refusals(service.ask(OrderKind.TRAIN, {ANNA: service.model}, attempt=lie.attempt)) == {
        "refused (repeated)": 1
    }


def test_a_server_that_names_somebody_dead_and_alive(process_cluster: "ProcessCluster") -> None:
    """Half of the people would give a share of the victim's own mask, the other half one of its key: nobody gives."""
    lie = process_cluster.services["secure"].until(Phase.SURVIVORS)
    here, gone = (lists(lie, {*EVERYBODY} - absent) for absent in (set[int](), {ANNA}))
    orders = {place: here if place % 2 == 0 else gone for place in EVERYBODY}
    found = lie.ask(Phase.SURVIVORS, orders)
    signed = found.payloads
    assert signed.keys() == {*EVERYBODY}
    for shown in (set[int](), {ANNA}):
        assert len([place for place in EVERYBODY if (orders[place] is gone) is bool(shown)]) < share_threshold(7)
    everyones = signatures({place: one for place, one in signed.items() if place != ANNA})
    assert refusals(lie.ask(Phase.UNMASK, dict.fromkeys(EVERYBODY, everyones))) == {"refused (unexpected)": 7}
    assert all(told(process_cluster, place, "disagreement") for place in EVERYBODY)


@LONG
def test_a_server_that_shows_a_client_two_lists(process_cluster: "ProcessCluster") -> None:
    lie = process_cluster.services["secure"].until(Phase.SURVIVORS)
    assert lie.ask(Phase.SURVIVORS, dict.fromkeys(EVERYBODY, lists(lie, {*EVERYBODY}))).payloads.keys() == {*EVERYBODY}
    again = dict.fromkeys(EVERYBODY, lists(lie, {*EVERYBODY} - {ANNA}))
    assert refusals(lie.ask(Phase.SURVIVORS, again)) == {"refused (unexpected)": 7}
    assert all(told(process_cluster, place, "out_of_turn") for place in EVERYBODY)


@pytest.mark.parametrize(
    ("sums", "phase"),
    [
        pytest.param(sums, phase, marks=() if (sums, phase) == ("secure", Phase.UNMASK) else LONG)
        for sums in ("secure", "ring")
        for phase in Phase
        if phase is not Phase.KEYS
    ],
)
def test_a_server_that_lowers_the_threshold(process_cluster: "ProcessCluster", sums: "Sums", phase: Phase) -> None:
    """Fewer people than were accepted, or than two thirds of a group, are no sum to anybody, whatever is on a list."""
    service = process_cluster.services[sums]
    lie = service.until(phase)
    match phase:
        case Phase.SHARES:  # a sum of three, where four were accepted
            few = {place: lie.server._cohort.adverts[place] for place in EVERYBODY[:3]}
            orders = dict.fromkeys(few, b"".join(struct.pack("<I", place) + advert for place, advert in few.items()))
        case Phase.MASKED:
            orders = {place: order[: 2 * (4 + 88)] for place, order in lie.orders.items()}  # two people's shares
        case Phase.SURVIVORS:
            orders = dict.fromkeys(EVERYBODY[:3], lists(lie, {*EVERYBODY[:3]}))
        case _:
            orders = {place: order[: 2 * (4 + 96)] for place, order in lie.orders.items()}  # two signatures
    assert refusals(lie.ask(phase, orders)) == {"refused (unexpected)": len(orders)}
    assert all(told(process_cluster, place, "too_few") for place in orders)
    # Nor is the honest order followed afterwards.
    assert refusals(lie.ask(phase, {place: lie.orders[place] for place in orders})) == {
        "refused (unexpected)": len(orders)
    }


@LONG
def test_a_server_that_believes_in_other_terms(process_cluster: "ProcessCluster") -> None:
    """It cannot say a number at all. Other terms are another digest: whoever is asked for that goes home, if nobody is
    there to say yes. And keys that were sent under the accepted terms verify under no other."""
    service = process_cluster.services["secure"]
    fewer = replace(service.invitation, secure=SecureSums(least=3))
    conversation = replace(service.conversation, recipe=fewer.digest)
    letter = pack_invitation(fewer, (process_cluster.keys / ORDERS).read_bytes())
    assert service.clients().ready(lambda: False)
    found = conversation.ask(OrderKind.TERMS, {ANNA: letter}, step=0, attempt=0, seconds=600, limit=32)
    assert not found.payloads  # it refuses, and is gone before that is read, or after
    name = process_cluster.place.people[ANNA]
    assert process_cluster.ended(name) == 2
    assert (
        process_cluster.said(name)[-1]
        == f"error: nobody here can be asked: --accept {fewer.digest.hex()} says yes to this"
    )
    process_cluster.begin(name)
    attempt = service.trained()
    wanted = SecureSum(SumAttempt(terms=fewer.sum_terms, run=service.attempts.run, step=0, attempt=attempt))
    orders = wanted.begin(EVERYBODY)
    adverts = service.ask(OrderKind.KEYS, orders, attempt=attempt).payloads
    assert adverts.keys() == {*EVERYBODY}
    assert not any(wanted.take(place, advert) for place, advert in adverts.items())


def test_a_ring_whose_halves_are_shown_different_survivors(process_cluster: "ProcessCluster") -> None:
    """Of nobody does the server get enough shares of both secrets, nor of one half all that hides its sum."""
    lie = process_cluster.services["ring"].until(Phase.SURVIVORS)
    cohort = lie.server._cohort
    ring = cohort._ring[0]
    sides = [{*ring[:4]}, {*ring[4:]}]
    side_of = {place: side for side in sides for place in side}
    assert {len(cohort.group(place)) for place in EVERYBODY} == {5}
    found = lie.ask(Phase.SURVIVORS, {place: lists(lie, side_of[place]) for place in EVERYBODY})
    signed = found.payloads
    orders = {
        place: signatures({one: signed[one] for one in cohort.group(place) if one in signed and one in side_of[place]})
        for place in signed
    }
    answers = lie.ask(Phase.UNMASK, orders).payloads if orders else {}
    for place in EVERYBODY:
        holders = [one for one in cohort.group(place) if one in answers]
        here = sum(place in side_of[one] for one in holders)
        assert min(here, len(holders) - here) < share_threshold(5)
        assert here < share_threshold(5)  # four neighbours would have to be on one side, and answer
    # Whoever did not sign, or not answer, has told its user why.
    quiet = {*EVERYBODY} - answers.keys()
    assert quiet
    assert all(told(process_cluster, place, "too_few") for place in quiet)


# Everything else that a server can ask for.


def test_orders_that_are_repeated_changed_or_not_the_server_s(process_cluster: "ProcessCluster") -> None:
    service = process_cluster.services["open"]
    attempt = service.trained()
    ours, model = service.conversation, {ANNA: service.model}
    assert refusals(service.ask(OrderKind.TRAIN, model, attempt=attempt)) == {"refused (repeated)": 1}
    assert refusals(service.ask(OrderKind.TRAIN, model, attempt=attempt - 1)) == {"refused (repeated)": 1}
    later = service.attempts.begin()
    assert refusals(service.ask(OrderKind.TRAIN, model, attempt=later, step=3)) == {"refused (not_accepted)": 1}
    assert refusals(service.ask(OrderKind.TRAIN, {ANNA: service.model[4:]}, attempt=later)) == {
        "refused (unreadable)": 1
    }
    assert refusals(service.ask(OrderKind.START, {ANNA: b"another start"}, attempt=later)) == {
        "refused (unreadable)": 1
    }
    assert refusals(service.ask(OrderKind.UNMASK, {ANNA: b""}, attempt=later)) == {"refused (unexpected)": 1}
    liars = {
        "refused (unexpected)": replace(ours, recipe=bytes(32)),
        "refused (untrusted)": replace(ours, key=ec.generate_private_key(ec.SECP384R1())),
        "refused (not_accepted)": replace(ours, run=bytes(16)),
    }
    for code, liar in liars.items():
        found = liar.ask(OrderKind.TRAIN, model, step=0, attempt=later, seconds=600, limit=update_bytes(service.plan))
        assert refusals(found) == {code: 1}
    said = process_cluster.said(process_cluster.place.people[ANNA])
    assert said[-1] == "round 1: asked to train, refused (not_accepted)"


def test_a_message_that_is_sent_again_as_it_was(process_cluster: "ProcessCluster") -> None:
    """The very bytes, to their node and to another one."""
    service, names = process_cluster.services["open"], [user.node for user in process_cluster.roster.users]
    service.trained()
    order = Order(
        kind=OrderKind.TRAIN,
        run=service.attempts.run,
        step=0,
        attempt=service.attempts.begin(),
        nonce=fresh_nonce(),
        node=names[ANNA],
        recipe=service.invitation.digest,
        payload=service.model,
    )
    sent, codes = order.signed(service.conversation.key), []
    for place in (ANNA, ANNA, BERT):
        replies = process_cluster.link.ask({names[place].hex(): sent}, seconds=600, limit=1 << 20)
        asked = replace(order, node=names[place])
        key = process_cluster.roster.users[place].key
        codes.append(open_answer(replies[names[place].hex()], order=asked, key=key, limit=1 << 20).code)
    assert codes == [AnswerCode.DONE, AnswerCode.REPEATED, AnswerCode.MISDIRECTED]


@pytest.mark.parametrize("value", [float("nan"), *(pytest.param(each, marks=LONG) for each in (float("inf"), 1e30))])
def test_a_model_that_is_no_model_gets_zeros_or_a_clipped_update(
    process_cluster: "ProcessCluster", value: float
) -> None:
    service = process_cluster.services["open"]
    service.trained()
    broken = write_round_model(torch.full_like(process_cluster.model_P, value), process_cluster.layout)
    found = service.ask(OrderKind.TRAIN, {ANNA: broken}, attempt=service.attempts.begin())
    update = decode_sum(read_update(found.payloads[ANNA], service.plan), service.plan)
    assert torch.linalg.vector_norm(update) <= service.plan.clip_bound


@LONG
def test_afterwards_everybody_takes_part_as_ever(process_cluster: "ProcessCluster") -> None:
    """A lie ends an attempt, and nothing else."""
    for service in process_cluster.services.values():
        found = service.sum(service.clients())
        assert found.diagnostics is not None
        assert not found.diagnostics.dropped
        assert torch.equal(found.total, process_cluster.expected(EVERYBODY))
