"""The server's side of an exchange: orders that it signs, and answers that count only where they fit.

Somebody who is away, who refuses, or whose answer was lost, forged, repeated or too large, is counted with the reason
and has no other effect: they are zero in a round.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sottovoce.base.signatures import PrivateKey
from sottovoce.network.messages import (
    OVERHEAD,
    AnswerCode,
    Order,
    OrderKind,
    Refused,
    fresh_nonce,
    is_departure,
    open_answer,
)
from sottovoce.network.roster import Roster
from sottovoce.network.transport.link import Link, SentOrders

AWAY = "away, too late, or with too large an answer"


@dataclass(frozen=True)
class Answers:
    """What was answered, by place in the roster, and why others have not; `codes` are those of who has refused."""

    payloads: dict[int, bytes]
    missing: dict[int, str]
    codes: dict[int, AnswerCode] = field(default_factory=dict)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(self.missing.values())


@dataclass(frozen=True, eq=False, kw_only=True)
class OrderChannel:
    """Orders to the nodes of `roster` over `link`, in one `run`, by the terms of one `recipe` (16 and 32 bytes).

    `key` signs orders. `before_ask` is called before each.
    """

    link: Link
    roster: Roster
    key: PrivateKey
    run: bytes
    recipe: bytes
    before_ask: Callable[[], None] = lambda: None

    def present(self) -> frozenset[int]:
        """The places of those who can be asked now."""
        names = self.link.present()
        return frozenset(
            place for place, user in enumerate(self.roster.users) if not user.revoked and user.node.hex() in names
        )

    def departed(self) -> frozenset[int]:
        """The places of those who have left for good since the last call, by messages signed with their keys."""
        received = self.link.departures()
        return frozenset(
            place
            for place, user in enumerate(self.roster.users)
            if (message := received.get(user.node.hex())) is not None
            and is_departure(message, node=user.node, key=user.key)
        )

    def ask(
        self, kind: OrderKind, payloads: Mapping[int, bytes], *, step: int, attempt: int, seconds: float, limit: int
    ) -> Answers:
        """Order `kind` of everybody in `payloads`, by place; answers have at most `limit` bytes of payload."""
        return self.send(kind, payloads, step=step, attempt=attempt, seconds=seconds, limit=limit).answers()

    def send(
        self, kind: OrderKind, payloads: Mapping[int, bytes], *, step: int, attempt: int, seconds: float, limit: int
    ) -> "OpenOrders":
        """The same, without waiting: what was asked, of which `answers` can be taken once."""
        self.before_ask()
        users = self.roster.users
        orders = {
            place: Order(
                kind=kind,
                run=self.run,
                step=step,
                attempt=attempt,
                nonce=fresh_nonce(),
                node=users[place].node,
                recipe=self.recipe,
                payload=payload,
            )
            for place, payload in payloads.items()
            if not users[place].revoked
        }
        signed = {order.node.hex(): order.signed(self.key) for order in orders.values()}
        return OpenOrders(
            orders=orders,
            revoked=frozenset(payloads.keys() - orders.keys()),
            roster=self.roster,
            limit=limit,
            sent=self.link.send(signed, seconds=seconds, limit=OVERHEAD + limit),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class OpenOrders:
    """Orders that are open, by place in the roster; of who is `revoked` nothing was asked."""

    orders: Mapping[int, Order]
    revoked: frozenset[int]
    roster: Roster
    limit: int
    sent: SentOrders

    def answers(self) -> Answers:
        """Wait for them, until the time that they were given is over."""
        replies, users = self.sent.answers(), self.roster.users
        found = Answers({}, dict.fromkeys(sorted(self.revoked), "revoked"))
        for place, order in self.orders.items():
            reply = replies.get(order.node.hex())
            if reply is None:
                found.missing[place] = AWAY
                continue
            try:
                answer = open_answer(reply, order=order, key=users[place].key, limit=self.limit)
            except Refused as refused:
                found.missing[place] = f"no answer to what was asked ({refused})"
                continue
            if answer.code is AnswerCode.DONE:
                found.payloads[place] = answer.payload
            else:
                found.missing[place] = f"refused ({answer.code.name.lower()})"
                found.codes[place] = answer.code
        return found
