"""Rounds with light nodes: real processes, link and protocol, and the true sizes, with fixed vectors for training."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from networks.light_node import vector
from networks.served import Processes, peak_mib, processor_seconds
from sottovoce.flat.layout import Layout
from sottovoce.network import keys
from sottovoce.network.roster import Roster, format_roster_entry, load_roster
from sottovoce.network.secure_sum.terms import SumTerms, share_threshold
from sottovoce.network.secure_sum.words import encode_update
from sottovoce.network.server.availability import Availability, Departures, NodesNeeded
from sottovoce.network.server.clients import AttemptCounter, ClientsOverNetwork, Offer, Timeouts
from sottovoce.network.server.orders import OrderChannel
from sottovoce.network.transport.flower import FlowerLink
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings
from sottovoce.training.remote_clients import DEPARTURES

LIGHT_NODE = Path(__file__).with_name("light_node.py")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """So many nodes and vectors of so many numbers, in words of 32 bits; `secure`: sums that the server cannot open."""

    folder: Path
    nodes: int
    length: int
    secure: bool
    start: bytes = b"a start model"

    def measure(self, rounds: int) -> dict[str, Any]:
        """What each round takes, after one that warms up; every sum is compared with the plain one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        roster = self._roster()
        with closing(Processes(self.folder)) as processes, self._clients(roster) as (clients, link):
            nodes = [self._join(processes, place, port=link.port) for place in range(self.nodes)]
            begun = time.perf_counter()
            assert clients.ready(lambda: False)
            ready = time.perf_counter() - begun
            plan = self._plan()
            server_P = torch.randn(plan.layout.flat_size)
            wall, server, taken = list[float](), list[float](), list[list[float]]()
            for step in range(rounds + 1):
                before = [processor_seconds(node.pid) for node in nodes]
                begun, own = time.perf_counter(), time.process_time()
                summed = clients.sum(server_P, np.arange(self.nodes), plan=plan, step=step)
                wall.append(time.perf_counter() - begun)
                server.append(time.process_time() - own)
                taken.append([processor_seconds(n.pid) - b for n, b in zip(nodes, before, strict=True)])
                assert summed.diagnostics is not None
                assert not summed.diagnostics.dropped, summed.diagnostics.dropped
                expected = sum(vector(place, step, self.length) for place in range(self.nodes))
                assert np.array_equal(encode_update(summed.total, plan), expected)
            peaks = [peak_mib(node.pid) for node in nodes]
            told = [_ended(node) for node in nodes]
        return {
            "nodes": self.nodes,
            "length": self.length,
            "secure": self.secure,
            "ready_seconds": ready,
            "round_seconds": wall[1:],
            "server_processor_seconds": server[1:],
            "node_processor_seconds": taken[1:],
            "node_answers_processor_seconds": {
                kind: [one.get(kind, 0.0) / (rounds + 1) for one in told] for kind in sorted({*chain(*told)})
            },
            "node_peak_mib": peaks,
        }

    def _roster(self) -> Roster:
        now, folder = datetime.now(UTC), self.folder / "keys"
        if not folder.exists():
            keys.make_authority(folder / "authority", now=now)
            keys.make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=now)
            for place in range(self.nodes):
                keys.make_node(folder / f"silo-{place}")
            lines = [
                format_roster_entry(f"silo-{place}", keys.load_public_key(folder / f"silo-{place}" / keys.NODE))
                for place in range(self.nodes)
            ]
            (self.folder / "roster.yaml").write_text("\n".join(["users:", *lines, ""]))
        return load_roster(self.folder / "roster.yaml")

    def _plan(self) -> Plan:
        # The bound is such that nobody's vector is clipped again by the server: it would not be the plain sum then.
        settings = PrivacySettings(
            population_size=self.nodes,
            privacy_unit="speaker",
            cohort_size=self.nodes,
            clip_bound=1.0,
            noise_multiplier=0.0,
            delta=1e-6,
            root_seed=1,
        )
        return Plan(settings, Layout(("w",), ((self.length,),)), sum_bits=32)

    @contextmanager
    def _clients(self, roster: Roster) -> Iterator[tuple[ClientsOverNetwork, FlowerLink]]:
        folder = self.folder / "keys" / "server"
        link = FlowerLink(
            "127.0.0.1",
            0,
            certificate=str(folder / keys.SERVER),
            key=str(folder / keys.SERVER_KEY),
            nodes={user.node.hex(): user.key for user in roster.users},
        )
        (self.folder / "attempts.json").unlink(missing_ok=True)
        attempts = AttemptCounter(self.folder / "attempts.json")
        conversation = OrderChannel(
            link=link,
            roster=roster,
            key=keys.load_private_key(folder / keys.ORDERS_KEY),
            run=attempts.run,
            recipe=bytes(32),
        )
        offer = Offer(terms=b"terms", start_digest=hashlib.sha256(self.start).digest(), start=self.start)
        terms = None
        if self.secure:
            own = tuple(user.key for user in roster.users)
            terms = SumTerms(roster=own, least=share_threshold(self.nodes), length=self.length, bits=32)
        clients = ClientsOverNetwork(
            conversation,
            offer,
            attempts=attempts,
            availability=Availability(
                roster,
                needed=NodesNeeded(wanted=self.nodes),
                departures=Departures(self.folder / DEPARTURES),
                now=datetime.now,
                say=lambda _: None,
            ),
            secure=terms,
            timeouts=Timeouts(other=600.0),
        )
        with closing(clients):
            yield clients, link

    def _join(self, processes: Processes, place: int, *, port: int) -> subprocess.Popen[str]:
        settings = {
            "roster": "roster.yaml",
            "place": place,
            "least": share_threshold(self.nodes) if self.secure else None,
            "length": self.length,
            "server": f"keys/server/{keys.ORDERS}",
        }
        own = (f"keys/silo-{place}/{keys.NODE_KEY}", f"keys/server/{keys.AUTHORITY}", json.dumps(settings))
        return processes.start(str(LIGHT_NODE), f"127.0.0.1:{port}", *own)


def _ended(node: subprocess.Popen[str]) -> dict[str, float]:
    """What a node's answers have cost, by kind of order: it says so when it is told to end."""
    node.send_signal(signal.SIGTERM)
    said, _ = node.communicate(timeout=60)
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found
