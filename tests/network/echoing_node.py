"""A node in a process of its own, that answers as its first argument says. Used by `test_flower`.

While a file `away` lies beside its key it is not here.

python echoing_node.py MANNER SERVER KEY CA
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from flwr.proto.message_pb2 import PushObjectRequest

from sottovoce.base.errors import InputError
from sottovoce.network.keys import load_private_key
from sottovoce.network.node import worker
from sottovoce.network.transport import fleet_client
from sottovoce.network.transport.fleet_client import FleetClient

LARGE = b"x" * (3 << 22)  # some chunks
_HEARD: list[bytes] = []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def answer(manner: str, order: bytes) -> bytes | None:
    match manner:
        case "echo":
            return order[::-1]
        case "large":
            return LARGE
        case "numbered":  # by when it came
            _HEARD.append(order)
            return b"%d: " % len(_HEARD) + order
        case "killed-in-training":
            die()
        case "killed-in-upload":
            send = FleetClient.send

            def send_one(client: FleetClient, request: Any, **named: Any) -> Any:
                response = send(client, request, **named)
                if isinstance(request, PushObjectRequest):
                    die()
                return response

            FleetClient.send = send_one  # type: ignore[method-assign]
            return LARGE
        case "silent":
            return None
    raise AssertionError(manner)


def main() -> None:
    manner, server, key, ca = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if manner.startswith("clock"):
        _, ahead = manner.split("=")
        _move_clock(float(ahead))
        manner = "echo"
    try:
        worker.Worker(
            server,
            key=load_private_key(Path(key)),
            authority=Path(ca).read_bytes(),
            answer=lambda order: answer(manner, order),
            limit=1 << 26,
            stop=stop,
            is_here=lambda: not Path(key).with_name("away").exists(),
            say=lambda line: print(line, flush=True),
        ).run()
    except InputError as error:
        print(f"error: {error}", flush=True)
        sys.exit(2)


def _move_clock(seconds: float) -> None:
    """As if this machine's clock were `seconds` ahead, for Flower and for us."""
    from datetime import timedelta

    right, time = fleet_client.now, worker.time.time
    fleet_client.now = lambda: right() + timedelta(seconds=seconds)
    worker.time.time = lambda: time() + seconds


if __name__ == "__main__":
    main()
