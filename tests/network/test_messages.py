"""Orders and answers: what was signed comes back, and any other bytes are one refusal."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.network.messages import (
    OVERHEAD,
    AnswerCode,
    Order,
    OrderAnswer,
    OrderKind,
    Refused,
    check_message_signature,
    fresh_nonce,
    open_answer,
    parse_order,
    unreadable,
)

SERVER, NODE, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
NODE_NAME, OTHER_NAME = b"n" * 32, b"o" * 32
ORDER = Order(
    kind=OrderKind.TRAIN,
    run=b"r" * 16,
    step=7,
    attempt=2,
    nonce=b"1" * 16,
    node=NODE_NAME,
    recipe=b"d" * 32,
    payload=b"the model",
)
SENT = ORDER.signed(SERVER)
ANSWER = ORDER.answered(b"the update").signed(NODE)


def read_order(data: bytes, limit: int = 100) -> Order:
    order = parse_order(data, limit=limit)
    check_message_signature(data, SERVER.public_key())
    return order


def read_answer(data: bytes, order: Order = ORDER, limit: int = 100) -> OrderAnswer:
    return open_answer(data, order=order, key=NODE.public_key(), limit=limit)


def refusal(code: AnswerCode) -> "pytest.RaisesExc[Refused]":
    return pytest.raises(Refused, match=f"^{code.name.lower()}$")


@given(
    kind=st.sampled_from(OrderKind),
    step=st.integers(0, 2**32 - 1),
    attempt=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=64),
)
def test_an_order_comes_back(kind: OrderKind, step: int, attempt: int, payload: bytes) -> None:
    order = replace(ORDER, kind=kind, step=step, attempt=attempt, payload=payload)
    assert read_order(order.signed(SERVER)) == order
    answer = order.answered(payload[::-1])
    assert read_answer(answer.signed(NODE), order) == answer


@pytest.mark.parametrize("code", [code for code in AnswerCode if code is not AnswerCode.DONE])
def test_a_refusal_is_a_code_and_nothing_else(code: AnswerCode) -> None:
    sent = ORDER.refused(code).signed(NODE)
    assert len(sent) == OVERHEAD
    assert read_answer(sent).code is code


def test_a_refusal_with_words_is_refused() -> None:
    with refusal(AnswerCode.UNREADABLE):
        read_answer(OrderAnswer(AnswerCode.UNABLE, ORDER).signed(NODE))


@given(data=st.binary(max_size=2 * OVERHEAD))
def test_any_bytes_are_one_refusal(data: bytes) -> None:
    for read in (read_order, read_answer):
        with pytest.raises(Refused):
            read(data)


@given(sent=st.sampled_from([SENT, ANSWER]), at=st.integers(0), change=st.integers(1, 255))
def test_a_changed_byte_is_noticed(sent: bytes, at: int, change: int) -> None:
    changed = bytearray(sent)
    changed[at % len(sent)] ^= change
    with pytest.raises(Refused):
        (read_order if sent is SENT else read_answer)(bytes(changed))


@given(sent=st.sampled_from([SENT, ANSWER]), length=st.integers(0, 400), behind=st.binary(max_size=8))
def test_more_or_less_than_was_sent_is_unreadable(sent: bytes, length: int, behind: bytes) -> None:
    other = sent[: length % len(sent)] + behind
    with pytest.raises(Refused):
        (read_order if sent is SENT else read_answer)(other)


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    class Unread(bytes):
        def __getitem__(self, key: object) -> bytes:  # type: ignore[override]
            raise AssertionError("read")

    with refusal(AnswerCode.UNREADABLE):
        read_answer(Unread(OVERHEAD + 101))


def test_a_length_that_lies_is_unreadable() -> None:
    header = bytearray(SENT[: OVERHEAD - 96])
    header[-8:] = (2**63).to_bytes(8)
    with refusal(AnswerCode.UNREADABLE):
        read_order(bytes(header) + SENT[OVERHEAD - 96 :])


def test_only_the_servers_orders_count() -> None:
    with refusal(AnswerCode.UNTRUSTED):
        read_order(ORDER.signed(OTHER))


def test_nobody_answers_in_anothers_name() -> None:
    with refusal(AnswerCode.UNTRUSTED):
        read_answer(ORDER.answered(b"mine").signed(OTHER))
    theirs = replace(ORDER, node=OTHER_NAME, nonce=fresh_nonce())
    with refusal(AnswerCode.UNEXPECTED):
        open_answer(ANSWER, order=theirs, key=NODE.public_key(), limit=100)


@pytest.mark.parametrize(
    "other",
    [
        replace(ORDER, nonce=fresh_nonce()),
        replace(ORDER, step=8),
        replace(ORDER, attempt=3),
        replace(ORDER, kind=OrderKind.MASKED),
        replace(ORDER, run=b"s" * 16),
        replace(ORDER, recipe=b"e" * 32),
    ],
    ids=["nonce", "step", "attempt", "kind", "run", "recipe"],
)
def test_an_answer_fits_one_order(other: Order) -> None:
    with refusal(AnswerCode.UNEXPECTED):
        read_answer(ANSWER, other)


def test_an_order_is_no_answer_and_an_answer_no_order() -> None:
    with refusal(AnswerCode.UNREADABLE):
        open_answer(ORDER.signed(NODE), order=ORDER, key=NODE.public_key(), limit=100)
    with refusal(AnswerCode.UNREADABLE):
        read_order(ORDER.answered().signed(SERVER))


def test_what_is_no_order_has_an_answer_too() -> None:
    answer = unreadable(NODE_NAME)
    assert (answer.code, answer.payload, answer.to.node) == (AnswerCode.UNREADABLE, b"", NODE_NAME)
