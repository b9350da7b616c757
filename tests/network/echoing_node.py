"""A node in a process of its own, that answers as its first argument says. Used by `test_flower`.

While a file `away` lies beside its key it is not here.

python echoing_node.py MANNER SERVER KEY CA
"""

import os
import signal
import sys
import threading
from pathlib import Path

from sottovoce.errors import InputError
from sottovoce.network.keys import load_private_key
from sottovoce.network.node import worker

LARGE = b"x" * (3 << 22)  # some chunks


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def answer(manner: str, order: bytes) -> bytes | None:
    match manner:
        case "echo":
            return order[::-1]
        case "large":
            return LARGE
        case "killed-in-training":
            die()
        case "killed-in-upload":
            pushed = worker.FleetHttpClient.PushObject

            def push_one(client: object, request: object) -> object:
                pushed(client, request)
                die()
                raise AssertionError

            worker.FleetHttpClient.PushObject = push_one
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
        worker.work(
            server,
            key=load_private_key(Path(key)),
            authority=Path(ca).read_bytes(),
            answer=lambda order: answer(manner, order),
            limit=1 << 26,
            stop=stop,
            is_here=lambda: not Path(key).with_name("away").exists(),
            say=lambda line: print(line, flush=True),
        )
    except InputError as error:
        print(f"error: {error}", flush=True)
        sys.exit(2)


def _move_clock(seconds: float) -> None:
    """As if this machine's clock were `seconds` ahead, for Flower and for us."""
    from datetime import timedelta

    from flwr.supernode import node_auth_http_interceptor as signing

    right, time = signing.now, worker.time.time
    signing.now = lambda: right() + timedelta(seconds=seconds)
    worker.time.time = lambda: time() + seconds


if __name__ == "__main__":
    main()
