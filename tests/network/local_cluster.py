"""A federation in one process: nine people with a store and a key each, and a server that asks them one by one."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tests.tones import pack_tones, speaker

from sottovoce.base.seeds import name_key
from sottovoce.base.signatures import PrivateKey
from sottovoce.config import Recipe, validate_recipe
from sottovoce.data.store import Store
from sottovoce.federated.cohort import CohortSum
from sottovoce.models.recogniser import Recogniser
from sottovoce.network import keys
from sottovoce.network.invitation import Invitation, SecureSums, pack_invitation
from sottovoce.network.messages import Order, OrderAnswer, OrderKind, fresh_nonce, open_answer
from sottovoce.network.model_transfer import write_round_model, write_start_model
from sottovoce.network.node.ledger import Quota
from sottovoce.network.node.participant import Participant
from sottovoce.network.secure_sum.protocol import SumServer
from sottovoce.network.secure_sum.terms import Phase, SumAttempt
from sottovoce.network.secure_sum.words import Words, decode_sum, read_update, terms_for_plan, update_bytes
from sottovoce.network.turns import write_turn
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.training.start_model import build_start_model, split_trained_part

NUMBERS = [number for number in range(15) if speaker(number).split == "train"]
NAMES = sorted((speaker(number).name for number in NUMBERS), key=name_key)
NOW = datetime(2031, 5, 1, 12, tzinfo=UTC)
RUN = b"r" * 16

Content = dict[str, Any]


def content(**federation: Any) -> Content:
    """A recipe for tones; with noise, as accounting for little noise takes seconds."""
    privacy = {"clip_bound": 0.05, "noise_multiplier": 8.0, "delta": 1e-3} | federation.pop("privacy", {})
    return {
        "about": "tones, over a network",
        "seed": 5,
        "data": {"store": "tones"},
        "model": {"size": "tiny", "layers": 2, "width": 32, "dropout": 0.1, "layer_drop": 0.2},
        "federation": {
            "steps": 12,
            "cohort_size": 4,
            "local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 2},
            "server": {"optimiser": {"name": "lamb"}, "schedule": {"name": "constant", "lr": 0.01}},
            "privacy": privacy,
        }
        | federation,
    }


def recipe_of(given: Content | None = None) -> Recipe:
    return validate_recipe(given or content(), where="of a test")


@dataclass
class LocalCluster:
    """`stores` holds everybody's own under their name, and all together as `tones`."""

    place: Path
    stores: Path
    recipe: Recipe
    sum_bits: Any = 64
    people: list[str] = field(default_factory=lambda: list(NAMES))
    joined: dict[str, Participant] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    gone: dict[str, Phase] = field(default_factory=dict)
    attempt: int = 0
    secure: SecureSums | None = None

    def __post_init__(self) -> None:
        keys.make_authority(self.place / "authority", now=NOW)
        keys.make_server(self.place / "server", authority=self.place / "authority", hosts=["localhost"], now=NOW)
        for name in self.people:
            keys.make_node(self.place / name / "key")
        self.start: Recogniser = build_start_model(self.recipe, None, self.store)
        self.start_bytes = write_start_model(self.start, self.recipe.model)
        part = split_trained_part(self.recipe, self.start)
        self.layout, self.frozen = part.layout, part.frozen
        self.invitation = self.invite()
        self.plan: Plan = self.invitation.plan(self.layout)

    @property
    def store(self) -> Store:
        return Store(self.stores / "tones")

    @property
    def orders_key(self) -> PrivateKey:
        return keys.load_private_key(self.place / "server" / keys.ORDERS_KEY)

    def key(self, name: str) -> PrivateKey:
        return keys.load_private_key(self.place / name / "key" / keys.NODE_KEY)

    def invite(self, recipe: Recipe | None = None, **changes: Any) -> Invitation:
        public = [self.key(name).public_key() for name in self.people]
        given = {"start": self.start_bytes, "layout": self.layout, "frozen": self.frozen}
        given |= {"sum_bits": self.sum_bits, "secure": self.secure}
        return Invitation.of(recipe or self.recipe, public, **(given | changes))

    def join(self, name: str, **given: Any) -> Participant:
        """`name` starts a node, or starts it again."""
        if name in self.joined:
            self.joined[name].close()
        options: dict[str, Any] = {
            "key": self.key(name),
            "authority": keys.load_certificate(self.place / "authority" / keys.AUTHORITY),
            "store": Store(self.stores / name),
            "now": lambda: NOW,
            "say": self.said.append,
            "user": name if name.startswith("silo-") else None,
            "quota": Quota(),
        }
        self.joined[name] = Participant(self.place / name / "home", **(options | given))
        return self.joined[name]

    # A server's side.

    def order(self, name: str, kind: OrderKind, payload: bytes = b"", **changes: Any) -> Order:
        order = Order(
            kind=kind,
            run=RUN,
            step=0,
            attempt=0,
            nonce=fresh_nonce(),
            node=keys.fingerprint(self.key(name).public_key()),
            recipe=self.invitation.digest,
            payload=payload,
        )
        return replace(order, **changes)

    def ask(self, name: str, order: Order, *, key: PrivateKey | None = None) -> OrderAnswer:
        sent = self.joined[name].answer(order.signed(key or self.orders_key))
        return open_answer(sent, order=order, key=self.key(name).public_key(), limit=update_bytes(self.plan))

    def terms(self, name: str, **changes: Any) -> Order:
        certificate = (self.place / "server" / keys.ORDERS).read_bytes()
        return self.order(name, OrderKind.TERMS, pack_invitation(self.invitation, certificate), **changes)

    def train(self, name: str, model_P: torch.Tensor | None = None, **changes: Any) -> Order:
        """An order to train, in a new attempt unless another is named."""
        if model_P is None:
            model_P = self.layout.flatten(split_trained_part(self.recipe, self.start).initial)
        self.attempt += 1
        order = self.order(name, OrderKind.TRAIN, write_round_model(model_P, self.layout), attempt=self.attempt)
        return replace(order, **changes)

    def welcome(self, name: str, **given: Any) -> Participant:
        """`name` joins, accepts, and has the start model."""
        participant = self.join(name, **given)
        participant.accept(self.invitation.digest)
        assert self.ask(name, self.terms(name)).code == 0
        assert self.ask(name, self.order(name, OrderKind.START, self.start_bytes)).code == 0
        return participant

    # As the clients of a run.

    def sum(
        self,
        server_P: torch.Tensor,
        cohort: Indices,
        *,
        plan: Plan,
        step: int,
        positions: Indices | None = None,
        row: int | None = None,
    ) -> CohortSum:
        self.attempt += 1
        payload, when = write_round_model(server_P, self.layout), {"step": step, "attempt": self.attempt}
        payload = payload if row is None else write_turn(row, payload)
        words = read_update(bytes(update_bytes(plan)), plan).copy()
        for place in cohort.tolist():
            name = self.people[place]
            answer = self.ask(name, self.order(name, OrderKind.TRAIN, payload, **when))
            assert answer.code == 0, answer.code
            if self.invitation.secure is None:
                words += read_update(answer.payload, plan)
        if self.invitation.secure is not None:
            words = self.opened(cohort.tolist(), row=row, **when)
        return CohortSum(decode_sum(words, plan), plan.denominator)

    def opened(self, places: list[int], *, plan: Plan | None = None, row: int | None = None, **when: int) -> Words:
        """The secure sum of people who have trained; who refuses, or is `gone` from a phase on, drops out.

        `plan` is what the sum is under, where it is not of updates.
        """
        terms = terms_for_plan(self.invitation.sum_terms, plan or self.plan)
        server = SumServer(SumAttempt(terms=terms, run=RUN, row=row, **when))
        orders = server.begin(places)
        while orders:
            for place, payload in orders.items():
                name = self.people[place]
                if self.gone.get(name, Phase.UNMASK + 1) <= server.phase:
                    continue
                answer = self.ask(name, self.order(name, OrderKind[server.phase.name], payload, **when))
                if answer.code == 0:
                    server.take(place, answer.payload)
            orders = server.advance()
        assert server.opened is not None
        return server.opened.total

    def close(self) -> None:
        for participant in self.joined.values():
            participant.close()


def pack_cluster(folder: Path, *, utterances: int = 3) -> None:
    """A store for each person, and one of all; nobody has anything to hold out unless they have said four things."""
    pack_tones(folder / "tones", letters=(2, 3), utterances=utterances)
    for number in NUMBERS:
        own = range(number, number + 1)
        pack_tones(folder / speaker(number).name, people=own, letters=(2, 3), utterances=utterances)
