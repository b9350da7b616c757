"""A cluster whose people are processes: `sottovoce join` over TLS, for a server that the test itself is.

The server's end is what `serve` runs (`reach`, a `FlowerLink`), or a liar made of its parts, with its key for orders.
One cluster serves many tests, and several recipes at once: open sums, secure ones, and a ring of few neighbours.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tests.network import faulty_node
from tests.network.local_cluster import NAMES
from tests.network.nodes import availability_of
from tests.network.places import CPU, Place
from tests.training.forked import forked

from sottovoce.data.store import Store
from sottovoce.federated.cohort import CohortSum
from sottovoce.models.recogniser import Recogniser
from sottovoce.network import keys
from sottovoce.network.invitation import Invitation, SecureSums, pack_invitation
from sottovoce.network.messages import OrderKind
from sottovoce.network.model_transfer import write_round_model, write_start_model
from sottovoce.network.node.home import LEDGER
from sottovoce.network.node.ledger import NodeLedger
from sottovoce.network.node.training import NodeTraining, prepare_training
from sottovoce.network.roster import load_roster
from sottovoce.network.secure_sum.protocol import SumServer as SecureSum
from sottovoce.network.secure_sum.terms import Phase, SumAttempt
from sottovoce.network.secure_sum.words import Words, decode_sum, update_bytes
from sottovoce.network.server.clients import AttemptCounter, ClientsOverNetwork, Offer, Timeouts
from sottovoce.network.server.orders import Answers, OrderChannel
from sottovoce.network.transport.flower import FlowerLink
from sottovoce.privacy.plan import Plan
from sottovoce.training.start_model import build_start_model, split_trained_part

PEOPLE = NAMES[:7]
EVERYBODY = tuple(range(len(PEOPLE)))
LONG = 600.0  # seconds that nothing here ever needs
Sums = Literal["open", "secure", "ring"]
SUMS: dict[Sums, SecureSums | None] = {
    "open": None,
    "secure": SecureSums(least=4),
    "ring": SecureSums(least=4, neighbours=4),
}


class ProcessCluster:
    """Seven people at a place. What is said of a node is in `said(name)`."""

    def __init__(self, folder: Path, stores: Path, held: ExitStack) -> None:
        self.place = Place(folder, stores, list(PEOPLE))
        self.place.write_files(cohort_size=len(PEOPLE))
        self.roster = load_roster(folder / "roster.yaml")
        self.start: Recogniser = build_start_model(self.place.recipe, None, Store(stores / "tones"))
        self.layout = split_trained_part(self.place.recipe, self.start).layout
        self.model_P = self.layout.flatten(split_trained_part(self.place.recipe, self.start).initial)
        self.services = {sums: Service(self, sums) for sums in SUMS}
        self.link = FlowerLink(
            "127.0.0.1",
            0,
            certificate=str(self.keys / keys.SERVER),
            key=str(self.keys / keys.SERVER_KEY),
            nodes={user.node.hex(): user.key for user in self.roster.users},
        )
        held.callback(self.link.close)
        self._held, self._running = held, dict[str, BaseProcess]()
        self._threads = held.enter_context(ThreadPoolExecutor())
        for name in PEOPLE:
            with closing(NodeLedger(self._home(name))) as ledger:
                for service in self.services.values():
                    ledger.accept(service.invitation.digest)
            self.begin(name)

    @property
    def keys(self) -> Path:
        return self.place.folder / "keys" / "server"

    def _home(self, name: str) -> Path:
        return self.place.folder / "keys" / name / "home"

    def own_ledger(self, name: str) -> Path:
        return self._home(name) / LEDGER

    def said(self, name: str) -> list[str]:
        path = self._home(name).with_name("said")
        return path.read_text().splitlines() if path.exists() else []

    # Nodes.

    def begin(self, name: str, *, port: int | None = None) -> BaseProcess:
        """`name` starts a node, honest again."""
        own = self.place.folder / "keys" / name
        (own / "told").unlink(missing_ok=True)
        url = f"https://127.0.0.1:{port or self.link.port}"
        where = ("--data", self.place.stores / name, "--key", own, "--ca", self.keys / keys.AUTHORITY)
        arguments = [str(each) for each in ("join", url, *where, "--device", "cpu")]
        process = self._held.enter_context(forked(faulty_node.run, arguments, own / "said", own / "told"))
        self._running[name] = process
        return process

    def tell(self, name: str, word: str) -> None:
        """From its next order on `name` does this."""
        told = self.place.folder / "keys" / name / "told"
        if word:
            told.write_text(word)
        else:
            told.unlink(missing_ok=True)

    def begin_again_when_killed(self, name: str) -> Future[None]:
        """So that nobody waits until a dead node's heartbeats are missed."""

        def wait() -> None:
            self._running[name].join()
            assert self._running[name].exitcode == -9, self.said(name)
            self.begin(name)

        return self._threads.submit(wait)

    def stop(self, name: str) -> None:
        """As Ctrl-C does: it says goodbye."""
        self._running[name].terminate()
        self.ended(name)

    def ended(self, name: str) -> int | None:
        """With which code, once it has."""
        self._running[name].join()
        return self._running[name].exitcode

    def meanwhile(self, function: Any, *given: Any, **named: Any) -> Future[Any]:
        return self._threads.submit(function, *given, **named)

    # What each of them sends.

    @cached_property
    def _trainings(self) -> list[NodeTraining]:
        invitation = self.services["open"].invitation
        stores = (Store(self.place.stores / name) for name in PEOPLE)
        return [prepare_training(invitation, self.start, store, user=None, device=CPU) for store in stores]

    @cached_property
    def updates(self) -> list[Words]:
        """Everybody's in the first round."""
        return [training.update(self.model_P, step=0) for training in self._trainings]

    def expected(self, places: tuple[int, ...]) -> torch.Tensor:
        """The sum of these people's updates in the first round."""
        plan = self.services["open"].plan
        words = np.zeros_like(self.updates[0])
        for place in places:
            words = words + self.updates[place]
        return decode_sum(words, plan)


class Service:
    """One recipe with one kind of sums: a server that asks, honest by `sum`, a liar by whatever else is here."""

    def __init__(self, process_cluster: ProcessCluster, sums: Sums) -> None:
        self._hamlet = process_cluster
        self._start = write_start_model(process_cluster.start, process_cluster.place.recipe.model)
        self.invitation = Invitation.of(
            process_cluster.place.recipe,
            [user.key for user in process_cluster.roster.users],
            start=self._start,
            layout=process_cluster.layout,
            sum_bits=32,
            secure=SUMS[sums],
        )
        self.plan: Plan = self.invitation.plan(process_cluster.layout)
        self.attempts = AttemptCounter(process_cluster.place.folder / f"{sums}.json")

    @cached_property
    def conversation(self) -> OrderChannel:
        return OrderChannel(
            link=self._hamlet.link,
            roster=self._hamlet.roster,
            key=keys.load_private_key(self._hamlet.keys / keys.ORDERS_KEY),
            run=self.attempts.run,
            recipe=self.invitation.digest,
        )

    @property
    def letter(self) -> bytes:
        return pack_invitation(self.invitation, (self._hamlet.keys / keys.ORDERS).read_bytes())

    def clients(self, *, seconds: float = LONG, least: int = len(PEOPLE)) -> ClientsOverNetwork:
        """The honest server's, which waits for `least` people."""
        return ClientsOverNetwork(
            self.conversation,
            Offer(terms=self.letter, start_digest=self.invitation.start, start=self._start),
            attempts=self.attempts,
            availability=availability_of(
                self._hamlet.roster, self._hamlet.place.folder / self.attempts.run.hex(), wanted=least
            ),
            secure=None if self.invitation.secure is None else self.invitation.sum_terms,
            timeouts=Timeouts(training=seconds, other=LONG),
        )

    def sum(self, clients: ClientsOverNetwork, places: tuple[int, ...] = EVERYBODY) -> CohortSum:
        """A first round, once more."""
        assert clients.ready(lambda: False)
        return clients.sum(self._hamlet.model_P, np.array(places, dtype=np.int64), plan=self.plan, step=0)

    # A liar's.

    def ask(self, kind: OrderKind, payloads: Mapping[int, bytes], *, attempt: int, step: int = 0) -> Answers:
        limit = update_bytes(self.plan)
        return self.conversation.ask(kind, payloads, step=step, attempt=attempt, seconds=LONG, limit=limit)

    def trained(self, places: tuple[int, ...] = EVERYBODY) -> int:
        """The number of a new attempt, in which these people have trained."""
        assert self.clients().ready(lambda: False)
        attempt = self.attempts.begin()
        found = self.ask(OrderKind.TRAIN, dict.fromkeys(places, self.model), attempt=attempt)
        assert not found.missing, found.missing
        return attempt

    @property
    def model(self) -> bytes:
        return write_round_model(self._hamlet.model_P, self._hamlet.layout)

    def until(self, phase: Phase) -> "Lie":
        """A new attempt, and all of it that comes before `phase`, as an honest server does it."""
        attempt = self.trained()
        server = SecureSum(SumAttempt(terms=self.invitation.sum_terms, run=self.attempts.run, step=0, attempt=attempt))
        lie = Lie(self, attempt, server, server.begin(EVERYBODY))
        while server.phase is not phase:
            lie.go_on()
        return lie


@dataclass
class Lie:
    """An attempt that was honest so far. `orders` are those of the next phase, as they should be."""

    service: Service
    attempt: int
    server: SecureSum
    orders: dict[int, bytes]

    def ask(self, phase: Phase, orders: Mapping[int, bytes]) -> Answers:
        return self.service.ask(OrderKind[phase.name], orders, attempt=self.attempt)

    def go_on(self) -> None:
        """One phase, honestly."""
        found = self.ask(self.server.phase, self.orders)
        assert not found.missing, found.missing
        for place, payload in found.payloads.items():
            assert self.server.take(place, payload)
        self.orders = self.server.advance()


@contextmanager
def process_cluster_at(folder: Path, stores: Path) -> Iterator[ProcessCluster]:
    with ExitStack() as held:
        yield ProcessCluster(folder, stores, held)
