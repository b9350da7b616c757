"""What a secure sum costs each client and the server, without a network: the protocol's own code in one process.

    python benchmarks/secure_sum.py                               16 nodes, 5M numbers, two of them go after sharing
    python benchmarks/secure_sum.py --noise                       the same with noise by clients
    python benchmarks/secure_sum.py --clients 1000 --neighbours 158 --gone 50           a fleet: 18 minutes of one core
    python benchmarks/secure_sum.py --clients 16 32 64 128        growth, everybody with everybody
    python benchmarks/secure_sum.py --clients 100000 --neighbours 224 --one    of so many, one client's reading of keys

Processor seconds, so that other work on the machine counts little. "Round" is what a round takes where each client has
a machine: in every phase the slowest client, and the server, one after another. Sums are compared with plain ones.
Vectors are made, masked and added one by one, so that a fleet takes no more memory than a few of them.
"""

import argparse
import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from sottovoce.base.signatures import sign
from sottovoce.flat.layout import Layout
from sottovoce.network.secure_sum.protocol import SumClient, SumServer
from sottovoce.network.secure_sum.terms import Phase, SumAttempt, SumTerms, share_threshold
from sottovoce.network.secure_sum.words import Words, add_noise_share
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[16])
    parser.add_argument("--length", type=int, default=5_000_000, help="numbers in a vector")
    parser.add_argument("--bits", type=int, choices=[32, 64], default=32)
    parser.add_argument("--neighbours", type=int, default=None, help="of each client (all others)")
    parser.add_argument("--gone", type=int, default=2, help="clients that go after sharing, before they send a vector")
    parser.add_argument("--noise", action="store_true", help="clients add the noise, too")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each sum besides")
    parser.add_argument("--one", action="store_true", help="one client alone, up to its shares: of any number of them")
    arguments = parser.parse_args()
    for clients in arguments.clients:
        measured = Measured(
            clients,
            length=arguments.length,
            bits=arguments.bits,
            neighbours=arguments.neighbours,
            noise=arguments.noise,
        )
        if arguments.one:
            measured.read_keys()
            continue
        measured.run(gone=arguments.gone)
        measured.show()
        if arguments.json:
            print(json.dumps(measured.figures(gone=arguments.gone)), flush=True)


class Measured:
    """One sum over a fleet, with its costs."""

    def __init__(self, clients: int, *, length: int, bits: int, neighbours: int | None, noise: bool) -> None:
        keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(clients)]
        group = clients if neighbours is None else min(neighbours + 1, clients)
        self.terms = SumTerms(
            roster=tuple(key.public_key() for key in keys),
            least=share_threshold(clients),
            length=length,
            bits=64 if bits == 64 else 32,
            neighbours=neighbours,
        )
        attempt = SumAttempt(terms=self.terms, run=bytes(16), step=0, attempt=1)
        _ = attempt.context
        self.group = group
        self.clients = [
            SumClient(attempt, place=place, sign=partial(sign, key), remember=lambda phase: None)
            for place, key in enumerate(keys)
        ]
        self.plan = _noisy_plan(clients, length=length, bits=bits) if noise else None
        self.server = SumServer(attempt)
        self.client_seconds: dict[Phase, list[float]] = defaultdict(list)
        self.server_seconds: dict[Phase, float] = defaultdict(float)
        self.noise_seconds: list[float] = []
        self.up: dict[Phase, list[int]] = defaultdict(list)
        self.down: dict[Phase, list[int]] = defaultdict(list)

    def run(self, *, gone: int) -> None:
        expected = np.zeros(self.terms.length, dtype=self.terms.dtype)
        orders = self.server.begin(range(len(self.clients)))
        started = time.perf_counter()
        while orders:
            phase = self.server.phase
            for place, order in orders.items():
                if place < gone and phase >= Phase.MASKED:
                    continue
                words = self._vector(place) if phase is Phase.MASKED else None
                with self._timed() as taken:
                    answer = _answer(self.clients[place], phase, order, words)
                self.client_seconds[phase].append(taken[0])
                self.down[phase].append(len(order))
                self.up[phase].append(len(answer))
                with self._timed() as taken:
                    assert self.server.take(place, answer)
                self.server_seconds[phase] += taken[0]
                if words is not None:
                    expected += words
            with self._timed() as taken:
                orders = self.server.advance()
            self.server_seconds[phase] += taken[0]
        self.wall = time.perf_counter() - started
        assert self.server.opened is not None
        assert np.array_equal(self.server.opened.total, expected)

    def read_keys(self) -> None:
        """What grows with all clients, and not with neighbours alone: the list of keys, for one client."""
        orders = self.server.begin(range(len(self.clients)))
        for place in orders:
            with self._timed() as taken:
                self.server.take(place, self.clients[place].keys())
            self.server_seconds[Phase.KEYS] += taken[0]
        orders = self.server.advance()
        with self._timed() as taken:
            self.clients[0].shares(orders[0])
        print(
            f"{len(self.clients):,} clients in groups of {self.group}: shares of one client {taken[0]:.3f} s, "
            f"{len(orders[0]) / 1e6:.1f} MB down; everybody's keys, made and checked, "
            f"{self.server_seconds[Phase.KEYS]:.1f} s"
        )

    def _vector(self, place: int) -> Words:
        words: Words = np.zeros(self.terms.length, dtype=self.terms.dtype)
        words += np.random.default_rng(place).integers(0, 2**20, size=self.terms.length, dtype=np.uint32)
        if self.plan is not None:
            with self._timed() as taken:
                add_noise_share(words, plan=self.plan, terms=self.terms)
            self.noise_seconds.append(taken[0])
        return words

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        taken, started = [0.0], time.process_time()
        yield taken
        taken[0] = time.process_time() - started

    def show(self) -> None:
        terms = self.terms
        print(f"{len(self.clients)} clients in groups of {self.group}, {terms.length:,} words of {terms.bits} bits")
        print(f"{'':12}{'client s':>10}{'slowest':>10}{'server s':>10}{'kB up':>12}{'kB down':>12}")
        for phase in Phase:
            seconds, kilobytes = self.client_seconds[phase], (max(self.up[phase]) / 1e3, max(self.down[phase]) / 1e3)
            print(
                f"{phase.name.lower():12}{statistics.median(seconds):>10.4f}{max(seconds):>10.4f}"
                f"{self.server_seconds[phase]:>10.3f}{kilobytes[0]:>12.1f}{kilobytes[1]:>12.1f}"
            )
        client = sum(statistics.median(seconds) for seconds in self.client_seconds.values())
        slowest, server = sum(map(max, self.client_seconds.values())), sum(self.server_seconds.values())
        up = sum(max(sizes) for sizes in self.up.values()) - terms.length * terms.bits // 8
        down = sum(max(sizes) for sizes in self.down.values())
        noise = f", its noise {statistics.median(self.noise_seconds):.3f} s" if self.noise_seconds else ""
        print(
            f"a client {client:.3f} s{noise}; server {server:.2f} s; round {slowest + server:.2f} s; besides the "
            f"vector {up / 1e3:.1f} kB up, {down / 1e3:.1f} kB down; wall, one process {self.wall:.1f} s, "
            f"{_peak_mib():,.0f} MiB at most\n",
            flush=True,
        )

    def figures(self, *, gone: int) -> dict[str, object]:
        """The same as plain data: medians over clients, by phase."""
        return {
            "clients": len(self.clients),
            "group": self.group,
            "length": self.terms.length,
            "bits": self.terms.bits,
            "gone": gone,
            "client_seconds": {
                phase.name.lower(): statistics.median(taken) for phase, taken in self.client_seconds.items()
            },
            "slowest_client_seconds": {phase.name.lower(): max(taken) for phase, taken in self.client_seconds.items()},
            "server_seconds": {phase.name.lower(): taken for phase, taken in self.server_seconds.items()},
            "bytes_up": {phase.name.lower(): max(sizes) for phase, sizes in self.up.items()},
            "bytes_down": {phase.name.lower(): max(sizes) for phase, sizes in self.down.items()},
            "wall_seconds": self.wall,
            "peak_mib": _peak_mib(),
        }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _answer(client: SumClient, phase: Phase, order: bytes, words: Words | None) -> bytes:
    match phase:
        case Phase.KEYS:
            return client.keys()
        case Phase.SHARES:
            return client.shares(order)
        case Phase.MASKED:
            assert words is not None
            return client.masked(order, words)
        case Phase.SURVIVORS:
            return client.survivors(order)
        case Phase.UNMASK:
            return client.unmask(order)


def _noisy_plan(clients: int, *, length: int, bits: int) -> Plan:
    settings = PrivacySettings(
        population_size=clients,
        privacy_unit="speaker",
        cohort_size=clients,
        clip_bound=0.01,
        noise_multiplier=1.0,
        delta=1e-6,
        mode=Mode.SECURE,
    )
    shares = NoiseShares(most=clients, least=share_threshold(clients), colluding=clients // 4)
    return Plan(settings, Layout(("w",), ((length,),)), sum_bits=bits, noise_shares=shares)


if __name__ == "__main__":
    main()
