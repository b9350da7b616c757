"""A node in a process of its own, `sottovoce join` as people run it, that misbehaves when a test tells it to.

What it is told is a word in a file, read when an order comes; without it the node is honest. A node that is to die
kills itself at a named moment, never at a time.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from tests.points import Point, Watch, die, hold
from tests.training.forked import run_command

from sottovoce.network.messages import OVERHEAD, AnswerCode, Order, OrderAnswer, OrderKind, parse_order
from sottovoce.network.node import participant

HUGE = 1 << 23  # bytes: two chunks
_HEADER = OVERHEAD - 96


def run(arguments: list[str], said: Path, told: Path) -> None:
    """`sottovoce` with `arguments`; what it says is added to the file `said`, what it is told lies in `told`."""
    _listen_to(told)
    _run(arguments, os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), None)


def faulty_command(arguments: list[str], said: Connection, told: Path) -> None:
    """As `run`, but what it says goes into the pipe `said`."""
    _listen_to(told)
    _run(arguments, said.fileno(), None)


def command(arguments: list[str], said: Connection, point: Point | None) -> None:
    """`sottovoce` with `arguments`, honest, until it is killed at `point`; what it says goes into the pipe `said`."""
    _run(arguments, said.fileno(), point)


def _run(arguments: list[str], output: int, point: Point | None) -> None:
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(output), "w", buffering=1) for _ in range(2))
    os._exit(run_command(arguments, Watch(point)))


def _listen_to(told: Path) -> None:
    from flwr.proto.message_pb2 import PushObjectRequest

    from sottovoce.network.transport.fleet_client import FleetClient

    honest, send = participant.Participant.answer, FleetClient.send
    first: list[bytes] = []  # the answer to the first order to train

    def answer(self: participant.Participant, data: bytes) -> bytes:
        order, word = parse_order(data, limit=1 << 30), told.read_text() if told.exists() else ""
        if word == f"die before {order.kind.name}":
            die()
        if word.startswith("slow ") and order.kind is OrderKind.TRAIN:
            hold(word.removeprefix("slow "))
        answered = honest(self, data)
        if word == f"die after {order.kind.name}":
            die()
        if order.kind in (OrderKind.TRAIN, OrderKind.MASKED) and word in _LIES:
            return _LIES[word](order, answered, self._key)
        if order.kind is OrderKind.TRAIN:
            first.append(answered)
            return first[0] if word == "replay" else answered
        return answered

    def send_one(client: FleetClient, request: Any, **named: Any) -> Any:
        response = send(client, request, **named)
        if isinstance(request, PushObjectRequest) and told.exists() and told.read_text() == "die in upload":
            die()
        return response

    participant.Participant.answer = answer  # type: ignore[method-assign]
    FleetClient.send = send_one  # type: ignore[method-assign]


def _update(answered: bytes) -> bytes:
    return answered[_HEADER:-96]


def _saying(change: Callable[[bytes], bytes]) -> Callable[[Order, bytes, Any], bytes]:
    """Signs another update than it has learned; what has none is left as it is."""

    def lie(order: Order, answered: bytes, key: Any) -> bytes:
        update = _update(answered)
        return order.answered(change(update)).signed(key) if update else answered

    return lie


def _filled(value: float) -> Callable[[bytes], bytes]:
    """As many bytes of a float32: what somebody sends who thinks that floats travel."""
    return lambda update: np.full(len(update) // 4, value, dtype="<f4").tobytes()


def _in_anothers_name(order: Order, answered: bytes, key: Any) -> bytes:
    return OrderAnswer(AnswerCode.DONE, replace(order, node=bytes(32), payload=_update(answered))).signed(key)


_LIES: dict[str, Callable[[Order, bytes, Any], bytes]] = {
    "NaN": _saying(_filled(float("nan"))),
    "infinite": _saying(_filled(float("inf"))),
    "too large": _saying(lambda update: np.full(len(update) // 4, 2**31 - 1, dtype="<i4").tobytes()),
    "wrong shape": _saying(lambda update: update[:-4]),
    "huge": _saying(lambda update: bytes(len(update) + HUGE)),
    "in another's name": _in_anothers_name,
    "with a stranger's key": lambda order, answered, key: order.answered(_update(answered)).signed(
        ec.generate_private_key(ec.SECP384R1())
    ),
    "rubbish": lambda order, answered, key: bytes(700),
}
