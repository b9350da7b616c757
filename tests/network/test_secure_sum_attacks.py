"""What a server that lies, or a client that does, gets out of a secure sum: one code, and nobody's vector."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.fleet import Fleet, attempt_of, client_of, node_keys, say, terms_of, vector, vectors_sum

from sottovoce.base.signatures import sign
from sottovoce.network.secure_sum import protocol, shamir
from sottovoce.network.secure_sum.protocol import SumClient, SumServer
from sottovoce.network.secure_sum.terms import Cohort, NoSum, Phase, Reason, Unsafe, share_threshold
from sottovoce.privacy.randomness import SecureRandom

N = 7  # of whom five open a sum


def fleet_of(*, least: int = 3, **meddling: object) -> Fleet:
    return Fleet(attempt_of(terms_of(N, least=least)), **meddling)  # type: ignore[arg-type]


def lists(fleet: Fleet, *, shared: set[int], survived: set[int]) -> bytes:
    """The order of the survivors' phase, as a server likes it to be."""
    cohort = fleet.server._cohort
    return cohort.bitmap(shared) + cohort.bitmap(survived)


def refused(answer: Callable[..., object], *said: object) -> Reason:
    with pytest.raises(Unsafe) as caught:
        answer(*said)
    return caught.value.why


EVERYBODY = set(range(N))


def test_a_victim_shown_as_gone_to_some_and_as_here_to_others() -> None:
    """The attack that opened SecAgg+: half of the fleet would give the victim's b, the other half its mask key."""
    fleet = fleet_of(least=5)
    fleet.until(Phase.SURVIVORS)
    gone, here = (lists(fleet, shared=EVERYBODY, survived=EVERYBODY - absent) for absent in ({0}, set[int]()))
    signatures = {
        place: fleet.clients[place].survivors(here if place % 2 == 0 or place == 0 else gone) for place in EVERYBODY
    }
    order = b"".join(struct.pack("<I", place) + one for place, one in sorted(signatures.items()) if place)
    assert {refused(fleet.clients[place].unmask, order) for place in EVERYBODY} == {Reason.DISAGREEMENT}


def test_two_lists_for_one_client() -> None:
    fleet = fleet_of(least=5)
    fleet.until(Phase.SURVIVORS)
    fleet.clients[1].survivors(lists(fleet, shared=EVERYBODY, survived=EVERYBODY))
    again = lists(fleet, shared=EVERYBODY, survived=EVERYBODY - {0})
    assert refused(fleet.clients[1].survivors, again) is Reason.OUT_OF_TURN


def test_a_list_may_not_name_somebody_who_shared_nothing_or_leave_out_who_did() -> None:
    for shared, survived in ((EVERYBODY - {0}, EVERYBODY), (EVERYBODY - {0}, EVERYBODY - {0})):
        fleet = fleet_of()
        fleet.until(Phase.SURVIVORS)
        order = lists(fleet, shared=shared, survived=survived)
        assert refused(fleet.clients[1].survivors, order) is Reason.DISAGREEMENT


def test_who_shared_nothing_is_no_survivor_to_make_up_the_number() -> None:
    fleet = fleet_of(gone={0: Phase.SHARES})
    fleet.until(Phase.SURVIVORS)
    order = lists(fleet, shared=EVERYBODY - {0}, survived=EVERYBODY)
    assert refused(fleet.clients[1].survivors, order) is Reason.DISAGREEMENT


def test_whoever_is_asked_is_not_gone() -> None:
    fleet = fleet_of()
    fleet.until(Phase.SURVIVORS)
    order = lists(fleet, shared=EVERYBODY, survived=EVERYBODY - {1})
    assert refused(fleet.clients[1].survivors, order) is Reason.DISAGREEMENT


@pytest.mark.parametrize("phase", Phase)
def test_nothing_is_answered_twice(phase: Phase) -> None:
    fleet = fleet_of()
    orders = fleet.until(phase)
    words = vector(fleet.attempt, 1)
    say(fleet.clients[1], phase, orders[1], words)
    assert refused(say, fleet.clients[1], phase, orders[1], words) is Reason.OUT_OF_TURN
    for other in Phase:  # and whoever was asked twice has nothing left to tell
        assert refused(say, fleet.clients[1], other, orders[1], words) is Reason.OUT_OF_TURN


@pytest.mark.parametrize(("now", "asked"), [(a, b) for a in Phase for b in Phase if a is not b])
def test_no_phase_can_be_skipped_or_gone_back_to(now: Phase, asked: Phase) -> None:
    fleet = fleet_of()
    orders = fleet.until(now)
    assert refused(say, fleet.clients[1], asked, orders[1], vector(fleet.attempt, 1)) is Reason.OUT_OF_TURN


@pytest.mark.parametrize("phase", [Phase.MASKED, Phase.UNMASK])
def test_a_client_that_was_started_again_remembers_that_it_has_answered(phase: Phase) -> None:
    attempt = attempt_of(terms_of(N))
    sent: set[Phase] = set()

    def remember(one: Phase) -> None:
        if one in sent:
            raise Unsafe(Reason.OUT_OF_TURN)
        sent.add(one)

    def answer() -> bytes:
        fleet = Fleet(attempt)
        fleet.clients[0] = client_of(attempt, 0, remember=remember)
        orders = fleet.until(phase)
        return say(fleet.clients[0], phase, orders[0], vector(attempt, 0))

    assert answer()
    sent &= {phase}  # what is tested is this phase by itself
    assert refused(answer) is Reason.OUT_OF_TURN


def test_a_lowered_threshold_is_no_threshold() -> None:
    """Whatever a server believes: fewer than two thirds of the group, or than was accepted, get no answer."""
    for phase in (Phase.SHARES, Phase.MASKED, Phase.SURVIVORS, Phase.UNMASK):
        fleet = fleet_of(least=N)
        orders = fleet.until(phase)
        match phase:
            case Phase.SHARES:
                order = b"".join(struct.pack("<I", p) + a for p, a in list(fleet.server._cohort.adverts.items())[:-1])
            case Phase.MASKED:
                order = orders[0][: 3 * len(orders[0]) // 6]
            case Phase.SURVIVORS:
                order = lists(fleet, shared=EVERYBODY, survived=EVERYBODY - {5})
            case _:
                order = orders[0][: 4 * len(orders[0]) // share_threshold(N)]
        assert refused(say, fleet.clients[0], phase, order, vector(fleet.attempt, 0)) is Reason.TOO_FEW


def test_a_server_with_other_terms_has_no_signature_that_counts() -> None:
    """It cannot say `least` at all: terms are in what is signed, so the keys of its clients are no keys to it."""
    accepted, wanted = attempt_of(terms_of(N, least=5)), attempt_of(terms_of(N, least=3))
    server = SumServer(wanted)
    server.begin(range(N))
    assert not any(server.take(place, client_of(accepted, place).keys()) for place in range(N))


def test_too_few_survivors_in_the_group_are_refused_by_the_client() -> None:
    fleet = fleet_of(least=3)
    fleet.until(Phase.SURVIVORS)
    order = lists(fleet, shared=EVERYBODY, survived={0, 1, 2, 3})
    assert refused(fleet.clients[0].survivors, order) is Reason.TOO_FEW


def listing_with(fleet: Fleet, place: int, advert: bytes) -> bytes:
    adverts = fleet.server._cohort.adverts | {place: advert}
    return b"".join(struct.pack("<I", one) + adverts[one] for one in sorted(adverts))


def test_forged_keys() -> None:
    """Keys of the server's own in the victim's neighbour's name: it would read what is sealed for them."""
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    forger = SumClient(fleet.attempt, place=3, sign=lambda data: bytes(96), remember=lambda phase: None)
    order = listing_with(fleet, 3, forger.keys())
    assert refused(fleet.clients[0].shares, order) is Reason.FORGED


def test_keys_of_one_in_anothers_name() -> None:
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    order = listing_with(fleet, 3, client_of(fleet.attempt, 4).keys())
    assert refused(fleet.clients[0].shares, order) is Reason.FORGED


@pytest.mark.parametrize("other", [{"step": 8}, {"attempt": 2}])
def test_keys_of_another_attempt(other: dict[str, int]) -> None:
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    order = listing_with(fleet, 3, client_of(attempt_of(fleet.attempt.terms, **other), 3).keys())
    assert refused(fleet.clients[0].shares, order) is Reason.FORGED


def test_older_keys_of_the_same_attempt_under_my_own_name() -> None:
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    order = listing_with(fleet, 0, client_of(fleet.attempt, 0).keys())
    assert refused(fleet.clients[0].shares, order) is Reason.DISAGREEMENT


def test_the_same_keys_under_two_names() -> None:
    """Also where a colluder signs another's keys as its own."""
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    stolen = fleet.server._cohort.adverts[4][:64]
    signature = sign(node_keys(N)[3], fleet.attempt.advert(3, stolen[:32], stolen[32:]))
    order = listing_with(fleet, 3, stolen + signature)
    assert fleet.attempt.has_signed_keys(3, stolen + signature)
    assert refused(fleet.clients[0].shares, order) is Reason.FORGED


@pytest.mark.parametrize("order_of", [[1, 0, 2, 3, 4, 5, 6], [0, 1, 1, 2, 3, 4, 5, 6]])
def test_a_list_in_another_order_or_with_somebody_twice(order_of: list[int]) -> None:
    fleet = fleet_of()
    adverts = fleet.until(Phase.SHARES) and fleet.server._cohort.adverts
    order = b"".join(struct.pack("<I", place) + adverts[place] for place in order_of)
    assert refused(fleet.clients[0].shares, order) is Reason.UNREADABLE


def test_a_key_with_which_everybodys_masks_are_known() -> None:
    """A point of small order: the server leaves its sender out, and a client would refuse it."""
    attempt = attempt_of(terms_of(N))
    server = SumServer(attempt)
    server.begin(range(N))
    key = node_keys(N)[3]
    zero, honest = bytes(32), client_of(attempt, 3).keys()[32:64]
    advert = zero + honest + sign(key, attempt.advert(3, zero, honest))
    assert attempt.has_signed_keys(3, advert)
    assert not server.take(3, advert)
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    advert = honest + zero + sign(key, attempt.advert(3, honest, zero))
    assert refused(fleet.clients[0].shares, listing_with(fleet, 3, advert)) is Reason.FORGED


def test_two_lists_of_keys_are_two_sums() -> None:
    """Who is shown another list seals for another session: nothing of theirs opens in this one."""
    attempt = attempt_of(terms_of(N))
    fleet = Fleet(attempt)
    fleet.until(Phase.SHARES)
    shorter = b"".join(struct.pack("<I", p) + a for p, a in list(fleet.server._cohort.adverts.items())[:-1])
    fleet.orders = {Phase.SHARES: lambda place, order: shorter if place == 2 else order}
    # Six others answer to the longer list; the one with the shorter list has one share too few, and is left out.
    opened = fleet.opened()
    assert opened.survivors == (0, 1, 3, 4, 5, 6)
    assert np.array_equal(opened.total, vectors_sum(attempt, opened.survivors))


def test_sealed_shares_that_were_changed_swapped_or_sent_on() -> None:
    for changed in (
        lambda order: order[:-1] + bytes([order[-1] ^ 1]),
        lambda order: order[:4] + order[96:184] + order[92:96] + order[4:92] + order[184:],  # two senders swapped
    ):
        fleet = fleet_of()
        orders = fleet.until(Phase.MASKED)
        order = changed(orders[0])
        assert refused(fleet.clients[0].masked, order, vector(fleet.attempt, 0)) is Reason.FORGED
    fleet = fleet_of()
    orders = fleet.until(Phase.MASKED)  # what was sealed for somebody else
    misled = orders[1].replace(struct.pack("<I", 0), struct.pack("<I", 1), 1)
    assert refused(fleet.clients[0].masked, misled, vector(fleet.attempt, 0)) is Reason.FORGED


def test_a_clients_own_sealed_share_sent_back_to_it_as_a_neighbours() -> None:
    """Both directions of a pair have keys of their own: one key would seal two messages, and could not tell them."""
    fleet = fleet_of()
    orders = fleet.until(Phase.MASKED)
    from_0_to_1 = orders[1][4:92]
    reflected = orders[0][:4] + from_0_to_1 + orders[0][92:]
    assert struct.unpack("<I", orders[0][:4]) == (1,)
    assert refused(fleet.clients[0].masked, reflected, vector(fleet.attempt, 0)) is Reason.FORGED


def test_a_share_sealed_under_another_list_of_as_many_opens_nothing() -> None:
    """Somebody who was started again has sent keys twice: the server shows one list to some, the other to others."""
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    other_list = listing_with(fleet, 6, client_of(fleet.attempt, 6).keys())
    fleet.orders = {Phase.SHARES: lambda place, order: other_list if place == 2 else order}
    orders = fleet.until(Phase.MASKED)
    assert len(orders) == N
    assert refused(fleet.clients[0].masked, orders[0], vector(fleet.attempt, 0)) is Reason.FORGED


@pytest.mark.parametrize("gone", [{}, {0: Phase.MASKED}])
def test_wrong_shares_open_nothing_and_are_noticed(gone: dict[int, Phase]) -> None:
    """One of the holders lies, about the b of somebody who stayed or the mask key of somebody who went."""

    def lie(place: int, answer: bytes) -> bytes:
        return bytes([answer[0] ^ 1]) + answer[1:] if place == 1 else answer

    with pytest.raises(NoSum, match="wrong_shares"):
        fleet_of(gone=gone, answers={Phase.UNMASK: lie}).opened()


@pytest.mark.parametrize("phase", [Phase.SHARES, Phase.MASKED, Phase.SURVIVORS, Phase.UNMASK])
@pytest.mark.parametrize("damage", [lambda order: order[:-1], lambda order: order + b"\0", lambda order: order * 2])
def test_what_has_another_layout_is_unreadable(phase: Phase, damage: Callable[[bytes], bytes]) -> None:
    fleet = fleet_of()
    order = damage(fleet.until(phase)[0])
    why = refused(say, fleet.clients[0], phase, order, vector(fleet.attempt, 0))
    assert why in (Reason.UNREADABLE, Reason.DISAGREEMENT)


def test_a_bit_for_nobody_is_unreadable() -> None:
    fleet = fleet_of()
    order = bytearray(fleet.until(Phase.SURVIVORS)[0])  # seven people in eight bits, twice
    order[-1] |= 1
    assert refused(fleet.clients[0].survivors, bytes(order)) is Reason.UNREADABLE


def test_a_stranger_is_on_no_list() -> None:
    fleet = fleet_of()
    fleet.until(Phase.SHARES)
    order = listing_with(fleet, N, client_of(fleet.attempt, 4).keys())
    assert refused(fleet.clients[0].shares, order) is Reason.UNREADABLE


def test_server_and_all_but_enough_clients_can_still_believe_in_any_secret() -> None:
    """One share fewer than the threshold: every secret goes with them, through exactly one polynomial a piece."""
    secret, points = bytes(range(32)), [3, 5, 8, 11, 20, 21]
    shares = shamir.split_secret(secret, threshold=5, points=points, random=SecureRandom())
    known = shares[:4]
    for other in (bytes(32), b"\xff" * 32, secret[::-1]):
        # The share at a fifth point that would make `other` the secret.
        imagined = _share_that_gives(other, known, points[:4], at=points[4])
        assert shamir.combine_shares(np.vstack([known, imagined]), points=points[:5], secret_bytes=32) == other
    assert shamir.combine_shares(shares[1:], points=points[1:], secret_bytes=32) == secret


def _share_that_gives(secret: bytes, known: shamir.Shares, points: list[int], *, at: int) -> shamir.Shares:
    weights = shamir._weights_at_zero((*points, at))
    pieces = [int.from_bytes(secret) >> 30 * i & (2**30 - 1) for i in range(shamir.field_elements(len(secret)))]
    return np.array(
        [
            (piece - sum(w * int(s) for w, s in zip(weights, known[:, i], strict=False)))
            * pow(weights[-1], -1, shamir.PRIME)
            % shamir.PRIME
            for i, piece in enumerate(pieces)
        ],
        dtype=np.uint32,
    )


def test_what_a_server_is_given_never_holds_enough_of_both_secrets_of_anybody() -> None:
    """All that reaches the server in a whole sum: of each person enough shares of one secret, and none of the other."""
    answers: dict[int, bytes] = {}
    fleet = fleet_of(gone={2: Phase.MASKED}, answers={Phase.UNMASK: lambda p, a: answers.setdefault(p, a)})
    secrets = {place: client._secrets for place, client in fleet.clients.items()}
    fleet.opened()
    for place, held in secrets.items():
        assert held is not None
        both = {"mask": held.mask.private_bytes_raw(), "own": held.own}
        rows = {
            one: np.frombuffer(answer, "<u4").reshape(-1, protocol._PIECES)[place] for one, answer in answers.items()
        }
        holders = sorted(rows)[: share_threshold(N)]
        opened = shamir.combine_shares(
            np.stack([rows[one] for one in holders]), points=[one + 1 for one in holders], secret_bytes=32
        )
        assert opened == both["mask" if place == 2 else "own"]


def test_a_vector_is_hidden_from_the_server_and_colluders_by_one_pair_they_do_not_know() -> None:
    """With b of a survivor and every pair but one, what is left of its vector is the mask of that pair."""
    fleet = fleet_of()
    orders = fleet.until(Phase.MASKED)
    victim, friend = 0, 1
    secrets = {place: client._secrets for place, client in fleet.clients.items()}
    cohort = fleet.server._cohort
    seen = np.frombuffer(
        fleet.clients[victim].masked(orders[victim], vector(fleet.attempt, victim)), dtype="<u4"
    ).copy()
    protocol.add_mask(seen, protocol._self_mask(cohort, victim, secrets[victim].own), sign=-1)
    for colluder in EVERYBODY - {victim, friend}:
        pair = protocol._pair_mask(cohort, secrets[colluder].mask, colluder, victim)
        protocol.add_mask(seen, pair, sign=protocol._direction(colluder, victim))
    assert not np.array_equal(seen, vector(fleet.attempt, victim))
    last = protocol._pair_mask(cohort, secrets[friend].mask, friend, victim)
    protocol.add_mask(seen, last, sign=protocol._direction(friend, victim))
    assert np.array_equal(seen, vector(fleet.attempt, victim))


def test_a_client_that_is_done_or_has_refused_holds_no_secret() -> None:
    fleet = fleet_of()
    fleet.opened()
    refuser = client_of(fleet.attempt, 0)
    refuser.keys()
    refused(refuser.shares, b"")
    for client in (*fleet.clients.values(), refuser):
        assert client._secrets is None
        assert not client._held


def test_the_order_of_the_ring_follows_from_every_key() -> None:
    """A server cannot choose somebody's neighbours: they follow from all keys, its colluders' and everybody else's."""
    attempt = attempt_of(terms_of(20, neighbours=4))
    adverts = {place: client_of(attempt, place).keys() for place in range(20)}
    others = adverts | {19: client_of(attempt, 19).keys()}
    one, other = Cohort(attempt, adverts), Cohort(attempt, others)
    assert any(one.group(place) != other.group(place) for place in range(20))


def test_two_lists_on_two_sides_of_a_ring_open_nobody_twice_and_no_side() -> None:
    """A server that shows one half of the ring that the other half has gone, and the other way round."""
    count, half = 40, 6
    attempt = attempt_of(terms_of(count, neighbours=2 * half))
    fleet = Fleet(attempt)
    fleet.until(Phase.SURVIVORS)
    cohort, everybody = fleet.server._cohort, set(range(count))
    ring = cohort._ring[0]
    sides = [set(ring[: count // 2]), set(ring[count // 2 :])]
    side_of = {place: side for side in sides for place in side}
    signed = {
        place: fleet.clients[place].survivors(lists(fleet, shared=everybody, survived=side_of[place]))
        for place in ring
        if len(side_of[place] & {*cohort.group(place)}) >= share_threshold(2 * half + 1)
    }
    answering = set()
    for place in signed:
        fitting = [one for one in cohort.group(place) if one in signed and side_of[one] is side_of[place]]
        order = b"".join(struct.pack("<I", one) + signed[one] for one in fitting)
        if len(fitting) < share_threshold(2 * half + 1):
            assert refused(fleet.clients[place].unmask, order) is Reason.TOO_FEW
        else:
            fleet.clients[place].unmask(order)
            answering.add(place)
    assert 0 < len(answering) < len(signed) < count  # deep inside a side nothing is seen of the other

    def opened(place: int, *, here: bool) -> bool:
        holders = {one for one in cohort.group(place) if one in answering and (place in side_of[one]) is here}
        return len(holders) >= share_threshold(2 * half + 1)

    vectors, keys = ({place for place in ring if opened(place, here=here)} for here in (True, False))
    assert vectors
    assert not vectors & keys
    closed = everybody - vectors - keys
    for side in sides:  # some mask of somebody who is open on this side is nobody's to take off
        assert any(closed & {*cohort.group(place)} for place in vectors & side)


@settings(max_examples=150)
@given(data=st.data(), phase=st.sampled_from([phase for phase in Phase if phase is not Phase.KEYS]))
def test_whatever_a_client_is_sent_it_answers_or_refuses(data: st.DataObject, phase: Phase) -> None:
    fleet = fleet_of()
    good = fleet.until(phase)[0]
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    order = data.draw(
        st.binary(max_size=200) | st.binary(max_size=8).map(lambda part: good[:start] + part + good[end:])
    )
    try:
        say(fleet.clients[0], phase, order, vector(fleet.attempt, 0))
    except Unsafe:
        return
    assert order == good or phase is Phase.MASKED  # where fewer shares than were sent, but enough, are a loss alone


@settings(max_examples=100)
@given(data=st.data(), phase=st.sampled_from(list(Phase)))
def test_whatever_a_server_is_sent_counts_or_does_not(data: st.DataObject, phase: Phase) -> None:
    """A random vector counts as one: that is poisoning, which masks cannot see."""

    def spoil(place: int, answer: bytes) -> bytes:
        return (
            data.draw(st.binary(min_size=len(answer), max_size=len(answer)) | st.binary(max_size=99))
            if place == 1
            else answer
        )

    fleet = fleet_of(answers={phase: spoil})
    try:
        fleet.opened()
    except NoSum as none:
        if none.why is not Reason.WRONG_SHARES and none.why is not Reason.TOO_FEW:
            raise
