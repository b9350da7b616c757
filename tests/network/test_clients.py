"""Clients over a network, seen from the server: their sum, and what becomes of those who are away or misbehave."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from tests.network.nodes import KEYS, LAYOUT, RUN, Fleet, Meddle, Node, fleet, pair_of, plan_for, update_of

from sottovoce.federated.cohort import CohortSum
from sottovoce.network.messages import AnswerCode, OrderKind, parse_order
from sottovoce.network.secure_sum.words import encode_update
from sottovoce.network.server.clients import CLIPPED_AGAIN, AttemptCounter, _add_up
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.client_wer import ClientWer
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode

EVERYBODY = 5
MODEL_P = LAYOUT.zeros()


def summed(found: Fleet, *, step: int = 0, cohort: list[int] | None = None) -> CohortSum:
    assert found.clients.ready(lambda: False)
    chosen = range(len(found.nodes)) if cohort is None else cohort
    return found.clients.sum(MODEL_P, np.array([*chosen], dtype=np.int64), plan=found.plan, step=step)


def reasons(found: CohortSum) -> dict[str, int]:
    assert found.diagnostics is not None
    return dict(found.diagnostics.dropped)


@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_is_the_simulation_s_to_the_bit(tmp_path: Path, secure: bool) -> None:
    found = fleet(tmp_path, EVERYBODY, secure=secure)
    for step in range(2):
        result = summed(found, step=step)
        assert torch.equal(result.total, found.expected([*range(EVERYBODY)], step=step))
        assert result.denominator == found.plan.denominator
        assert reasons(result) == {}


def test_terms_and_start_model_are_sent_once_and_before_any_round(tmp_path: Path) -> None:
    found = fleet(tmp_path, 2)
    summed(found, step=0)
    summed(found, step=1)
    assert found.nodes[0].heard == [OrderKind.TERMS, OrderKind.START, OrderKind.TRAIN, OrderKind.TRAIN]


def test_who_has_the_start_model_is_not_sent_it_again(tmp_path: Path) -> None:
    found = fleet(tmp_path, 1)
    found.nodes[0].holds = bytes(32)
    summed(found)
    assert found.nodes[0].heard == [OrderKind.TERMS, OrderKind.TRAIN]


def test_only_who_was_drawn_is_asked(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY)
    result = summed(found, cohort=[1, 3])
    assert torch.equal(result.total, found.expected([1, 3], step=0))
    assert [OrderKind.TRAIN in node.heard for node in found.nodes] == [False, True, False, True, False]


@pytest.mark.parametrize("secure", [False, True])
def test_an_empty_cohort_sums_to_zero_and_nobody_is_asked(tmp_path: Path, secure: bool) -> None:
    found = fleet(tmp_path, EVERYBODY, secure=secure)
    result = summed(found, cohort=[])
    assert not result.total.any()
    assert all(OrderKind.TRAIN not in node.heard for node in found.nodes)


def test_a_release_says_nothing_of_who_was_there(tmp_path: Path) -> None:
    release = plan_for(EVERYBODY, noise_multiplier=1.0, root_seed=None, mode=Mode.SECURE)
    found = fleet(tmp_path, EVERYBODY, meddle={0: silent_in(OrderKind.TRAIN)}, plan=release)
    assert summed(found).diagnostics is None


# Those who are away, and those who misbehave.


def silent_in(kind: OrderKind) -> Meddle:
    """Killed when it is asked for `kind`: no answer to that, nor to anything later."""

    def meddle(node: Node) -> AnswerFunction:
        def answer(data: bytes) -> bytes | None:
            answered = node.answer(data)
            return None if kind in node.heard else answered

        return answer

    return meddle


def says(payload: bytes, *, code: AnswerCode = AnswerCode.DONE, to: OrderKind = OrderKind.TRAIN) -> Meddle:
    """Answers TRAIN (or what else is `to`) with `payload`, or refuses it."""

    def meddle(node: Node) -> AnswerFunction:
        def answer(data: bytes) -> bytes | None:
            answered = node.answer(data)
            order = node.orders[-1]
            if order.kind is not to:
                return answered
            return (order.answered(payload) if code is AnswerCode.DONE else order.refused(code)).signed(node.key)

        return answer

    return meddle


def in_the_name_of_another(node: Node) -> AnswerFunction:
    """Signs with its own key what is an answer of node 1."""

    def answer(data: bytes) -> bytes | None:
        answered = node.answer(data)
        order = node.orders[-1]
        if order.kind is not OrderKind.TRAIN:
            return answered
        other = replace(order, node=bytes(32))
        return other.answered(node.words(order.step).tobytes()).signed(node.key)

    return answer


def with_a_strangers_key(node: Node) -> AnswerFunction:
    def answer(data: bytes) -> bytes | None:
        answered = node.answer(data)
        order = node.orders[-1]
        if order.kind is not OrderKind.TRAIN:
            return answered
        return order.answered(node.words(order.step).tobytes()).signed(ec.generate_private_key(ec.SECP384R1()))

    return answer


def replays(node: Node) -> AnswerFunction:
    """Answers every TRAIN with its first answer."""
    first: list[bytes | None] = []

    def answer(data: bytes) -> bytes | None:
        answered = node.answer(data)
        if node.orders[-1].kind is not OrderKind.TRAIN:
            return answered
        first.append(answered)
        return first[0]

    return answer


WORDS = np.zeros(LAYOUT.dimension, dtype="<i4")
TOO_SHORT, TOO_LONG = WORDS[1:].tobytes(), WORDS.tobytes() + b"\0"


@pytest.mark.parametrize(
    ("meddle", "why"),
    [
        (silent_in(OrderKind.TRAIN), "away, too late, or with too large an answer"),
        (says(TOO_SHORT), "an update of another length"),
        (says(TOO_LONG), "away, too late, or with too large an answer"),
        (says(b""), "an update of another length"),
        (says(b"", code=AnswerCode.PAUSED), "refused (paused)"),
        (says(b"", code=AnswerCode.OVER_QUOTA), "refused (over_quota)"),
        (in_the_name_of_another, "no answer to what was asked (unexpected)"),
        (with_a_strangers_key, "no answer to what was asked (untrusted)"),
        (lambda node: lambda data: data if OrderKind.TRAIN is node_kind(data, node) else node.answer(data), None),
    ],
    ids=[
        "killed in training",
        "wrong shape",
        "huge reply",
        "no update",
        "paused",
        "over its quota",
        "in another's name",
        "a stranger's key",
        "an order sent back",
    ],
)
def test_who_misbehaves_counts_as_zero(tmp_path: Path, meddle: Meddle, why: str | None) -> None:
    found = fleet(tmp_path, EVERYBODY, meddle={0: meddle})
    result = summed(found)
    assert torch.equal(result.total, found.expected([1, 2, 3, 4], step=0))
    assert reasons(result) == {why or "no answer to what was asked (unreadable)": 1}
    assert result.denominator == found.plan.denominator  # S, whoever was there


def node_kind(data: bytes, node: Node) -> OrderKind:
    return parse_order(data, limit=1 << 20).kind


def test_a_replayed_answer_counts_once(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, meddle={0: replays})
    assert torch.equal(summed(found, step=0).total, found.expected([0, 1, 2, 3, 4], step=0))
    later = summed(found, step=1)
    assert torch.equal(later.total, found.expected([1, 2, 3, 4], step=1))
    assert reasons(later) == {"no answer to what was asked (unexpected)": 1}


@pytest.mark.parametrize("step", [0, 1])
def test_what_a_round_trains_has_its_own_shares_of_the_bound(step: int) -> None:
    """A round that holds a tensor has the whole bound for the other: nothing honest is clipped again."""
    plan = plan_for(1, share="uniform")
    plan = replace(plan, layout=replace(plan.layout, held=(("b",), ("w",))))
    sent_P = plan.clip(update_of(0, step), step=step)
    assert float(sent_P.norm()) == pytest.approx(plan.clip_bound, rel=1e-5)
    total, odd = _add_up({0: encode_update(sent_P, plan).tobytes()}, plan, step=step)
    assert odd == {}
    assert float((total - sent_P).abs().max()) <= plan.grid


def test_an_update_above_its_bound_is_clipped_again(tmp_path: Path) -> None:
    """Words hold no NaN and no infinity; the largest that they hold is bounded like any other update."""
    largest = np.full(LAYOUT.dimension, 2**31 - 1, dtype="<i4").tobytes()
    found = fleet(tmp_path, EVERYBODY, meddle={0: says(largest)})
    result = summed(found)
    added = result.total - found.expected([1, 2, 3, 4], step=0)
    assert 0.99 * found.plan.clip_bound < torch.linalg.vector_norm(added) <= found.plan.clip_bound
    assert reasons(result) == {CLIPPED_AGAIN: 1}


@pytest.mark.parametrize("kind", [OrderKind.TRAIN, OrderKind.KEYS, OrderKind.SHARES, OrderKind.MASKED])
def test_who_goes_before_the_sum_is_left_out_of_it(tmp_path: Path, kind: OrderKind) -> None:
    found = fleet(tmp_path, EVERYBODY, secure=True, meddle={2: silent_in(kind)})
    result = summed(found)
    assert torch.equal(result.total, found.expected([0, 1, 3, 4], step=0))
    assert sum(reasons(result).values()) == 1


@pytest.mark.parametrize("kind", [OrderKind.SURVIVORS, OrderKind.UNMASK])
def test_who_goes_after_its_masked_update_is_still_in_the_sum(tmp_path: Path, kind: OrderKind) -> None:
    found = fleet(tmp_path, EVERYBODY, secure=True, meddle={2: silent_in(kind)})
    assert torch.equal(summed(found).total, found.expected([0, 1, 2, 3, 4], step=0))


def test_too_few_for_a_secure_sum_are_zero(tmp_path: Path) -> None:
    gone = {place: silent_in(OrderKind.MASKED) for place in (0, 1, 2)}
    found = fleet(tmp_path, EVERYBODY, secure=True, meddle=gone)
    result = summed(found)
    assert not result.total.any()
    assert "their sum could not be opened (too_few)" in reasons(result)


def test_who_is_revoked_is_never_asked(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, revoked=frozenset({1}))
    result = summed(found)
    assert torch.equal(result.total, found.expected([0, 2, 3, 4], step=0))
    assert found.nodes[1].heard == []


def test_who_refuses_the_terms_is_not_asked_to_train(tmp_path: Path) -> None:
    def refuses(node: Node) -> AnswerFunction:
        def answer(data: bytes) -> bytes | None:
            node.answer(data)
            return node.orders[-1].refused(AnswerCode.NOT_ACCEPTED).signed(node.key)

        return answer

    found = fleet(tmp_path, EVERYBODY, meddle={4: refuses})
    result = summed(found)
    assert torch.equal(result.total, found.expected([0, 1, 2, 3], step=0))
    assert found.nodes[4].heard == [OrderKind.TERMS]
    summed(found, step=1)
    assert found.nodes[4].heard == [OrderKind.TERMS]  # nor asked about them again at once


def test_a_round_waits_until_enough_are_here_and_stops_where_it_is_told_to(tmp_path: Path) -> None:
    found = fleet(tmp_path, 3, wanted=3, meddle={2: silent_in(OrderKind.TERMS)})
    asked = iter([False, False, True])
    assert not found.clients.ready(lambda: next(asked))


def test_whoever_is_here_hears_that_the_run_is_over(tmp_path: Path) -> None:
    found = fleet(tmp_path, EVERYBODY, revoked=frozenset({1}), meddle={2: silent_in(OrderKind.TRAIN)})
    summed(found)
    found.clients.end(7)
    for place in (0, 2, 3, 4):
        last = found.nodes[place].orders[-1]
        assert (last.kind, last.run, last.step, last.payload) == (OrderKind.END, RUN, 7, b"")
    assert found.nodes[1].heard == []


# Attempts.


def test_attempts_have_new_numbers_whatever_becomes_of_the_server(tmp_path: Path) -> None:
    first = AttemptCounter(tmp_path / "attempts.json")
    assert [first.begin(), first.begin()] == [1, 2]
    again = AttemptCounter(tmp_path / "attempts.json")  # as after a kill
    assert again.run == first.run
    assert again.begin() == 3


def test_every_order_of_a_round_names_its_run_step_and_attempt(tmp_path: Path) -> None:
    found = fleet(tmp_path, 1)
    summed(found, step=7)
    summed(found, step=7)
    trains = [order for order in found.nodes[0].orders if order.kind is OrderKind.TRAIN]
    assert [(order.run, order.step, order.attempt) for order in trains] == [(RUN, 7, 1), (RUN, 7, 2)]
    assert trains[0].nonce != trains[1].nonce
    assert KEYS[0] is found.nodes[0].key


# How well people are understood.


ASKED = ClientWer(words=50, noise_multiplier=4.0, every=2)


def pairs(found: Fleet, plan: Plan, *, step: int = 2) -> CohortSum:
    assert found.clients.ready(lambda: False)
    everybody = np.arange(len(found.nodes), dtype=np.int64)
    return found.clients.wer(MODEL_P, everybody, layout=LAYOUT, plan=plan, step=step)


def expected_pairs(places: list[int], plan: Plan) -> torch.Tensor:
    total = plan.new_total()
    for place in places:
        plan.accumulate(total, pair_of(place, plan))
    return total


@pytest.mark.parametrize("secure", [False, True])
def test_pairs_add_up_to_the_bit_between_rounds(tmp_path: Path, secure: bool) -> None:
    plan = ASKED.plan(plan_for(EVERYBODY))
    found = fleet(tmp_path, EVERYBODY, secure=secure, wer_plan=plan)
    summed(found, step=0)
    result = pairs(found, plan)
    assert torch.equal(result.total, expected_pairs([*range(EVERYBODY)], plan))
    assert torch.equal(summed(found, step=2).total, found.expected([*range(EVERYBODY)], step=2))
    asked = [order for order in found.nodes[0].orders if order.kind in (OrderKind.TRAIN, OrderKind.WER)]
    assert [(order.kind, order.step, order.attempt) for order in asked] == [
        (OrderKind.TRAIN, 0, 1),
        (OrderKind.WER, 2, 2),
        (OrderKind.TRAIN, 2, 3),
    ]


@pytest.mark.parametrize("lie", [2**62, -(2**62), 2**40])
def test_a_pair_above_its_bound_is_clipped_again(tmp_path: Path, lie: int) -> None:
    plan = ASKED.plan(plan_for(EVERYBODY))
    payload = np.array([lie, 1], dtype="<i8").tobytes()
    found = fleet(tmp_path, EVERYBODY, meddle={0: says(payload, to=OrderKind.WER)}, wer_plan=plan)
    result = pairs(found, plan)
    added = result.total - expected_pairs([1, 2, 3, 4], plan)
    assert torch.linalg.vector_norm(added) <= plan.clip_bound


@pytest.mark.parametrize("secure", [False, True])
def test_who_goes_when_asked_for_a_pair_counts_as_zero(tmp_path: Path, secure: bool) -> None:
    plan = ASKED.plan(plan_for(EVERYBODY))
    found = fleet(tmp_path, EVERYBODY, secure=secure, meddle={2: silent_in(OrderKind.WER)}, wer_plan=plan)
    assert torch.equal(pairs(found, plan).total, expected_pairs([0, 1, 3, 4], plan))
