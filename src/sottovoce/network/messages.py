"""Messages between a server and its nodes: orders down, answers up, signed, and of one fixed layout.

    tag 4 · kind 1 · code 1 · zero 2 · run 16 · step 4 · attempt 4 · nonce 16 · node 32 · recipe 32 · length 8
    · payload · signature 96

All numbers are big-endian. The signature is ECDSA P-384 with SHA-384 over everything before it, r and s of 48 bytes
each, so that every length is known before anything is read. Orders and answers have tags of their own: neither can be
taken for the other.

An answer repeats what it answers: kind, run, step, attempt and the order's nonce, which no other order has. So one
answer fits one order to one node: a replay, or an answer in somebody else's name, fits none. Why somebody refuses is
one of the `AnswerCode`s. There is no field for text, because the text of an exception may quote speech.
"""

import os
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

from sottovoce.base.errors import check_invariant
from sottovoce.base.signatures import SIGNATURE_BYTES, PrivateKey, PublicKey, sign, verified

_HEADER = struct.Struct(">4sBBxx16sII16s32s32sQ")
_ORDER, _ANSWER = b"SVo1", b"SVa1"

OVERHEAD = _HEADER.size + SIGNATURE_BYTES  # bytes of a message besides its payload


class OrderKind(IntEnum):
    """What is asked for. The order in which they come is a round's."""

    TERMS = 1  # here is the recipe: do you take part?
    START = 2  # the model that training starts from, with its tokens
    TRAIN = 3  # here is the round's model: train; the answer is the update, or nothing where it will be masked
    KEYS = 4  # the five phases of a secure sum
    SHARES = 5
    MASKED = 6
    SURVIVORS = 7
    UNMASK = 8
    END = 9  # the run is over after `step` rounds: there will be no more orders
    WER = (
        10  # here is a model: evaluate it on held-out speech; the answer is a pair of numbers, or nothing, as of TRAIN
    )


class AnswerCode(IntEnum):
    """What became of an order. Nothing but `DONE` has a payload."""

    DONE = 0
    UNREADABLE = 1  # no order of this layout, or larger than allowed
    UNTRUSTED = 2  # not signed by whom it should be
    MISDIRECTED = 3  # for another node
    NOT_ACCEPTED = 4  # the node's user has not accepted this recipe, or not for this run, or no such round
    REPEATED = 5  # this attempt was answered before
    UNEXPECTED = 6  # not in this phase, not before what should come first
    PAUSED = 7
    OVER_QUOTA = 8  # nothing more is sent today
    LEFT = 9  # for good
    UNABLE = 10  # the node cannot do this, whoever asks: another release of the code, a full disk
    ABOVE_ACCEPTED = 11  # more updates, measurements or attempts than the node's user has accepted for this run
    OUT_OF_TURN = 12  # in the turn of another group, or too soon after the node's last one


class Refused(Exception):
    """A message that is not taken, and why, in one code."""

    def __init__(self, code: AnswerCode) -> None:
        super().__init__(code.name.lower())
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a server asks of one node. `node` names its key, `recipe` is the digest of what its user accepted."""

    kind: OrderKind
    run: bytes
    step: int
    attempt: int
    nonce: bytes
    node: bytes
    recipe: bytes
    payload: bytes = b""

    def signed(self, key: PrivateKey) -> bytes:
        return _sign_message(_ORDER, self, AnswerCode.DONE, key)

    def answered(self, payload: bytes = b"") -> "OrderAnswer":
        return OrderAnswer(AnswerCode.DONE, replace(self, payload=payload))

    def refused(self, code: AnswerCode) -> "OrderAnswer":
        check_invariant(code is not AnswerCode.DONE, "a refusal that says done")
        return OrderAnswer(code, replace(self, payload=b""))


@dataclass(frozen=True)
class OrderAnswer:
    """What a node answers to an order: `to` is the order, with the answer's payload in place of its own."""

    code: AnswerCode
    to: Order

    @property
    def payload(self) -> bytes:
        return self.to.payload

    def signed(self, key: PrivateKey) -> bytes:
        return _sign_message(_ANSWER, self.to, self.code, key)


def fresh_nonce() -> bytes:
    return os.urandom(16)


# In answers that are to no order.
_NO_ORDER = Order(
    kind=OrderKind.TERMS, run=bytes(16), step=0, attempt=0, nonce=bytes(16), node=bytes(32), recipe=bytes(32)
)


def unreadable(node: bytes) -> OrderAnswer:
    """The answer of `node` to what is no order."""
    return replace(_NO_ORDER, node=node).refused(AnswerCode.UNREADABLE)


def departure(node: bytes) -> OrderAnswer:
    """What `node` sends, unasked, when its user has left for good: it fits no order."""
    return replace(_NO_ORDER, node=node).refused(AnswerCode.LEFT)


def is_departure(data: bytes, *, node: bytes, key: PublicKey) -> bool:
    """Whether `data` is the `departure` of `node`, whose public `key` this is."""
    try:
        found, code = _parse(data, tag=_ANSWER, limit=0)
        check_message_signature(data, key)
    except Refused:
        return False
    return code is AnswerCode.LEFT and found == replace(_NO_ORDER, node=node)


def parse_order(data: bytes, *, limit: int) -> Order:
    """An order whose signature nobody has checked yet; Refused where it is none, or its payload is above `limit`."""
    order, code = _parse(data, tag=_ORDER, limit=limit)
    if code is not AnswerCode.DONE:
        raise Refused(AnswerCode.UNREADABLE)
    return order


def open_answer(data: bytes, *, order: Order, key: PublicKey, limit: int) -> OrderAnswer:
    """What the node of `order`, whose public `key` this is, answers to it; Refused where it is anything else.

    The answer to another order, of another node or of earlier, is `UNEXPECTED`. What the node refuses is no error here.
    """
    found, code = _parse(data, tag=_ANSWER, limit=limit)
    check_message_signature(data, key)
    if replace(found, payload=b"") != replace(order, payload=b""):
        raise Refused(AnswerCode.UNEXPECTED)
    if code is not AnswerCode.DONE and found.payload:
        raise Refused(AnswerCode.UNREADABLE)
    return OrderAnswer(code, found)


def check_message_signature(data: bytes, key: PublicKey) -> None:
    """Refused unless the holder of `key` has signed the message in `data`."""
    if not verified(key, data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]):
        raise Refused(AnswerCode.UNTRUSTED)


def _sign_message(tag: bytes, order: Order, code: AnswerCode, key: PrivateKey) -> bytes:
    for name, size in (("run", 16), ("nonce", 16), ("node", 32), ("recipe", 32)):
        check_invariant(len(getattr(order, name)) == size, f"{name} of a message: expected {size} bytes")
    header = _HEADER.pack(
        tag,
        order.kind,
        code,
        order.run,
        order.step,
        order.attempt,
        order.nonce,
        order.node,
        order.recipe,
        len(order.payload),
    )
    content = header + order.payload
    return content + sign(key, content)


def _parse(data: bytes, *, tag: bytes, limit: int) -> tuple[Order, AnswerCode]:
    """The fields of a message, unchecked as to whose they are. Its size is looked at before anything else."""
    if not OVERHEAD <= len(data) <= OVERHEAD + limit:
        raise Refused(AnswerCode.UNREADABLE)
    found, kind, code, run, step, attempt, nonce, node, recipe, length = _HEADER.unpack_from(data)
    fits = found == tag and data[6:8] == bytes(2) and len(data) == OVERHEAD + length
    if not fits or kind not in _KINDS or code not in _CODES:
        raise Refused(AnswerCode.UNREADABLE)
    order = Order(
        kind=OrderKind(kind),
        run=run,
        step=step,
        attempt=attempt,
        nonce=nonce,
        node=node,
        recipe=recipe,
        payload=data[_HEADER.size : -SIGNATURE_BYTES],
    )
    return order, AnswerCode(code)


_KINDS, _CODES = frozenset(OrderKind), frozenset(AnswerCode)
