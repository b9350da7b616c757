"""A fleet of clients of a secure sum in this process, for tests: who may drop out, or lie, at any phase."""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from sottovoce.base.signatures import PrivateKey, sign
from sottovoce.network.secure_sum.protocol import OpenedSum, SumClient, SumServer
from sottovoce.network.secure_sum.terms import Phase, Reason, SumAttempt, SumTerms, Unsafe
from sottovoce.network.secure_sum.words import Words

LENGTH = 5


@lru_cache
def node_keys(count: int) -> tuple[PrivateKey, ...]:
    return tuple(ec.generate_private_key(ec.SECP384R1()) for _ in range(count))


@lru_cache
def terms_of(
    count: int, *, least: int = 3, bits: int = 32, neighbours: int | None = None, length: int = LENGTH
) -> SumTerms:
    roster = tuple(key.public_key() for key in node_keys(count))
    return SumTerms(roster=roster, least=least, length=length, bits=bits, neighbours=neighbours)  # type: ignore[arg-type]


def attempt_of(terms: SumTerms, *, step: int = 7, attempt: int = 1) -> SumAttempt:
    return SumAttempt(terms=terms, run=bytes(16), step=step, attempt=attempt)


def client_of(attempt: SumAttempt, place: int, *, remember: Callable[[Phase], None] = lambda phase: None) -> SumClient:
    key = node_keys(len(attempt.terms.roster))[place]
    return SumClient(attempt, place=place, sign=partial(sign, key), remember=remember)


def vector(attempt: SumAttempt, place: int) -> Words:
    generator = np.random.default_rng(place)
    highest = 2**attempt.terms.bits - 1
    return generator.integers(0, highest, size=attempt.terms.length, dtype=attempt.terms.dtype, endpoint=True)


def vectors_sum(attempt: SumAttempt, places: Collection[int]) -> Words:
    total = np.zeros(attempt.terms.length, dtype=attempt.terms.dtype)
    for place in places:
        total += vector(attempt, place)
    return total


def say(client: SumClient, phase: Phase, order: bytes, words: Words) -> bytes:
    match phase:
        case Phase.KEYS:
            return client.keys()
        case Phase.SHARES:
            return client.shares(order)
        case Phase.MASKED:
            return client.masked(order, words)
        case Phase.SURVIVORS:
            return client.survivors(order)
        case Phase.UNMASK:
            return client.unmask(order)


Meddling = Callable[[int, bytes], bytes]


class Fleet:
    """Everybody in the roster; `gone` says from which phase on somebody does not answer any more.

    `orders` and `answers` (by phase) change what travels; `refusals` are what clients said no to. `words` are what is
    summed, by place, unless `vector` is.
    """

    def __init__(
        self,
        attempt: SumAttempt,
        *,
        gone: Mapping[int, Phase] | None = None,
        orders: Mapping[Phase, Meddling] | None = None,
        answers: Mapping[Phase, Meddling] | None = None,
        words: Mapping[int, Words] | None = None,
    ) -> None:
        self.attempt = attempt
        self.words = words or {place: vector(attempt, place) for place in range(len(attempt.terms.roster))}
        self.clients = {place: client_of(attempt, place) for place in range(len(attempt.terms.roster))}
        self.server = SumServer(attempt)
        self.gone, self.orders, self.answers = gone or {}, orders or {}, answers or {}
        self.refusals: dict[int, Reason] = {}
        self.waiting: dict[int, bytes] = self.server.begin(self.clients)

    def until(self, phase: Phase) -> dict[int, bytes]:
        """Everything before `phase`; its orders."""
        while self.waiting and self.server.phase is not phase:
            self.turn()
        return self.waiting

    def turn(self) -> None:
        """One phase."""
        phase = self.server.phase
        for place, order in self.waiting.items():
            if self.gone.get(place, Phase.UNMASK + 1) <= phase or place in self.refusals:
                continue
            order = self.orders[phase](place, order) if phase in self.orders else order
            try:
                answer = say(self.clients[place], phase, order, self.words[place])
            except Unsafe as unsafe:
                self.refusals[place] = unsafe.why
                continue
            self.server.take(place, self.answers[phase](place, answer) if phase in self.answers else answer)
        self.waiting = self.server.advance()

    def opened(self) -> OpenedSum:
        while self.waiting:
            self.turn()
        assert self.server.opened is not None
        return self.server.opened
