"""A node without a recogniser: its "training" gives a fixed vector, and all else is as in `sottovoce join`.

    python light_node.py SERVER KEY CA SETTINGS

Link, TLS, keys, signatures and the protocol of secure sums are the package's own; orders are checked and answers
signed. torch is not imported, so that many fit on one machine. SETTINGS is JSON: {"roster": file, "place": n, "least":
n or null, "length": n, "server": file with the certificate of orders}. When told to end (SIGTERM) it prints what its
answers have cost, by kind of order, as JSON.
"""

import json
import signal
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from sottovoce.base.signatures import sign
from sottovoce.network.keys import load_certificate, load_private_key
from sottovoce.network.messages import Order, OrderKind, check_message_signature, parse_order
from sottovoce.network.node import worker
from sottovoce.network.roster import load_roster
from sottovoce.network.secure_sum.protocol import SumClient
from sottovoce.network.secure_sum.terms import SumAttempt, SumTerms
from sottovoce.network.secure_sum.words import Words

LARGEST = 1 << 31


def vector(place: int, step: int, length: int) -> Words:
    """What `place` has learned in `step`: small numbers of both signs, as words."""
    cells = np.random.default_rng([place, step]).integers(-1000, 1000, size=length, dtype=np.int32)
    words: Words = cells.view(np.uint32)
    return words


@final
class LightNode:
    """Answers orders as a participant does."""

    def __init__(self, key: Path, settings: dict[str, Any]) -> None:
        self._key = load_private_key(key)
        self._server = load_certificate(Path(settings["server"])).public_key()
        self._place, self._length = settings["place"], settings["length"]
        self._terms = None
        if settings["least"] is not None:
            roster = tuple(user.key for user in load_roster(Path(settings["roster"])).users)
            self._terms = SumTerms(roster=roster, least=settings["least"], length=self._length, bits=32)
        self._client: SumClient | None = None
        self._words: Words = np.zeros(0, dtype=np.uint32)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def answer(self, data: bytes) -> bytes:
        begun, words = time.thread_time(), 0.0
        order = parse_order(data, limit=LARGEST)
        check_message_signature(data, self._server)  # type: ignore[arg-type]
        if order.kind is OrderKind.TRAIN:
            drawing = time.thread_time()
            self._words = vector(self._place, order.step, self._length)
            words = time.thread_time() - drawing  # training is not what is measured
        signed = order.answered(self._payload(order)).signed(self._key)
        self.seconds[order.kind.name.lower()] += time.thread_time() - begun - words
        self.seconds["training"] += words
        return signed

    def _payload(self, order: Order) -> bytes:
        match order.kind:
            case OrderKind.TERMS | OrderKind.START:
                return b""
            case OrderKind.TRAIN:
                if self._terms is None:
                    return self._words.tobytes()
                attempt = SumAttempt(terms=self._terms, run=order.run, step=order.step, attempt=order.attempt)
                self._client = SumClient(
                    attempt, place=self._place, sign=partial(sign, self._key), remember=lambda phase: None
                )
                return b""
        client = self._client
        assert client is not None
        match order.kind:
            case OrderKind.KEYS:
                return client.keys()
            case OrderKind.SHARES:
                return client.shares(order.payload)
            case OrderKind.MASKED:
                return client.masked(order.payload, self._words)
            case OrderKind.SURVIVORS:
                return client.survivors(order.payload)
            case _:
                return client.unmask(order.payload)


def main() -> None:
    server, key, ca, settings = sys.argv[1:]
    node, stop = LightNode(Path(key), json.loads(settings)), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    authority = Path(ca).read_bytes()
    worker.Worker(
        server, key=node._key, authority=authority, answer=node.answer, limit=LARGEST, stop=stop, say=lambda _: None
    ).run()
    print(json.dumps(node.seconds), flush=True)


if __name__ == "__main__":
    main()
