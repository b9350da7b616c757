"""A fleet in this process: a roster, a server's conversation over a `LocalLink`, and nodes that do as they are told.

Nodes here are as small as can be (a participant with consent, quotas and a ledger has tests of its own): what is tested
with them is the server's side, and what it makes of nodes that misbehave.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.base.signatures import PrivateKey, sign
from sottovoce.flat.layout import Layout
from sottovoce.network.keys import fingerprint
from sottovoce.network.messages import AnswerCode, Order, OrderKind, check_message_signature, parse_order
from sottovoce.network.model_transfer import read_round_model
from sottovoce.network.roster import Roster, RosterEntry
from sottovoce.network.secure_sum.protocol import SumClient
from sottovoce.network.secure_sum.terms import Phase, SumAttempt, SumTerms, Unsafe
from sottovoce.network.secure_sum.words import Words, encode_update, terms_for_plan
from sottovoce.network.server.accounts import Accounts
from sottovoce.network.server.availability import Availability, Departures, NodesNeeded
from sottovoce.network.server.clients import AttemptCounter, ClientsOverNetwork, Offer
from sottovoce.network.server.orders import OrderChannel
from sottovoce.network.transport.link import AnswerFunction, Link, LocalLink
from sottovoce.privacy.client_wer import contribution
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings
from sottovoce.training.remote_clients import DEPARTURES

RECIPE, RUN = bytes(range(32)), bytes(range(16))
LAYOUT = Layout.of({"w": torch.zeros(5, 7), "b": torch.zeros(3)})
OFFER = Offer(terms=b"terms", start_digest=bytes(32), start=b"a start model")
LIMIT = 1 << 20
NOW = datetime(2031, 5, 1, 14, 5, 10, tzinfo=UTC)
KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(9)]
SERVER_KEY = KEYS.pop()


def plan_for(people: int, **settings: object) -> Plan:
    chosen = {"clip_bound": 0.5, "noise_multiplier": 0.0, "cohort_size": people, "root_seed": 3} | settings
    private = PrivacySettings(population_size=people, privacy_unit="speaker", delta=1e-5, **chosen)  # type: ignore[arg-type]
    return Plan(private, LAYOUT, sum_bits=32)


def update_of(place: int, step: int) -> Tensor:
    """What the client at `place` has learned in `step`; far too long for most of them."""
    update_P = torch.randn(LAYOUT.flat_size, generator=torch_stream(5, "update", place, step))
    LAYOUT.clear_padding(update_P)
    return update_P


def pair_of(place: int, plan: Plan) -> Tensor:
    """How well the client at `place` is understood; some have more words than count."""
    return contribution(3 * place, 1 + 30 * place, most_words=plan.clip_bound)


@dataclass
class Node:
    """A client's end: `answer` is what a link hands orders to. `orders` are those it has heard."""

    place: int
    key: PrivateKey
    plan: Plan
    terms: SumTerms | None = None
    holds: bytes = b""
    orders: list[Order] = field(default_factory=list)
    client: SumClient | None = None
    wer_plan: Plan | None = None
    asked: OrderKind = OrderKind.TRAIN

    def answer(self, data: bytes) -> bytes | None:
        order = parse_order(data, limit=LIMIT)
        check_message_signature(data, SERVER_KEY.public_key())
        assert order.node == self.name
        self.orders.append(order)
        try:
            payload = self.payload(order)
        except Unsafe:
            return order.refused(AnswerCode.UNEXPECTED).signed(self.key)
        return order.answered(payload).signed(self.key)

    @property
    def name(self) -> bytes:
        return fingerprint(self.key.public_key())

    @property
    def heard(self) -> list[OrderKind]:
        return [order.kind for order in self.orders]

    def words(self, step: int) -> Words:
        """Of its update, or of what it has understood: whatever it was asked for last."""
        if self.asked is OrderKind.TRAIN:
            return encode_update(self.plan.clip(update_of(self.place, step)), self.plan)
        assert self.wer_plan is not None
        return encode_update(self.wer_plan.clip(pair_of(self.place, self.wer_plan)), self.wer_plan)

    def payload(self, order: Order) -> bytes:
        match order.kind:
            case OrderKind.TERMS:
                return self.holds
            case OrderKind.START:
                self.holds = OFFER.start_digest
                return b""
            case OrderKind.END:
                return b""
            case OrderKind.TRAIN | OrderKind.WER:
                self.asked = order.kind
                read_round_model(order.payload, LAYOUT)
                if self.terms is None:
                    return self.words(order.step).tobytes()
                plan = self.plan if order.kind is OrderKind.TRAIN else self.wer_plan
                assert plan is not None
                terms = terms_for_plan(self.terms, plan)
                attempt = SumAttempt(terms=terms, run=order.run, step=order.step, attempt=order.attempt)
                self.client = SumClient(
                    attempt, place=self.place, sign=lambda data: sign(self.key, data), remember=lambda _: None
                )
                return b""
        assert self.client is not None
        match Phase[order.kind.name]:
            case Phase.KEYS:
                return self.client.keys()
            case Phase.SHARES:
                return self.client.shares(order.payload)
            case Phase.MASKED:
                return self.client.masked(order.payload, self.words(order.step))
            case Phase.SURVIVORS:
                return self.client.survivors(order.payload)
            case Phase.UNMASK:
                return self.client.unmask(order.payload)


@dataclass(frozen=True)
class Fleet:
    nodes: list[Node]
    clients: ClientsOverNetwork
    plan: Plan

    def expected(self, places: list[int], *, step: int) -> Tensor:
        """The sum of these clients, as a simulation has it."""
        total = self.plan.new_total()
        for place in places:
            self.plan.accumulate(total, update_of(place, step))
        return total


def availability_of(
    roster: Roster, folder: Path, *, wanted: int = 0, fewest: int = 0, say: Callable[[str], None] = lambda _: None
) -> Availability:
    needed, departures = NodesNeeded(wanted=wanted, fewest=fewest), Departures(folder / "secrets" / DEPARTURES)
    return Availability(roster, needed=needed, departures=departures, now=lambda: NOW, say=say)


Meddle = Callable[[Node], AnswerFunction]


def fleet(
    folder: Path,
    people: int,
    *,
    secure: bool = False,
    meddle: Mapping[int, Meddle] | None = None,
    revoked: frozenset[int] = frozenset(),
    wanted: int = 0,
    fewest: int = 0,
    link_of: Callable[[Mapping[str, AnswerFunction]], Link] = LocalLink,
    say: Callable[[str], None] = lambda _: None,
    plan: Plan | None = None,
    accounts: bool = False,
    wer_plan: Plan | None = None,
) -> Fleet:
    """`people` nodes; `meddle` puts something else in the place of some answers.

    Rounds wait for `wanted` of those still in, never for fewer than `fewest`.
    """
    plan = plan or plan_for(people)
    keys = KEYS[:people]
    roster = Roster(tuple(RosterEntry(f"p{n}", key.public_key(), n in revoked) for n, key in enumerate(keys)))
    terms = None
    if secure:
        terms = SumTerms(roster=tuple(key.public_key() for key in keys), least=3, length=LAYOUT.dimension, bits=32)
    nodes = [Node(place, key, plan, terms, wer_plan=wer_plan) for place, key in enumerate(keys)]
    answers = {node.name.hex(): (meddle or {}).get(node.place, lambda node: node.answer)(node) for node in nodes}
    conversation = OrderChannel(link=link_of(answers), roster=roster, key=SERVER_KEY, run=RUN, recipe=RECIPE)
    names = [user.name for user in roster.users]
    clients = ClientsOverNetwork(
        conversation,
        OFFER,
        attempts=AttemptCounter(folder / "attempts.json"),
        availability=availability_of(roster, folder, wanted=wanted, fewest=fewest, say=say),
        secure=terms,
        say=say,
        accounts=Accounts(folder, names) if accounts else None,
    )
    return Fleet(nodes, clients, plan)
