"""Ranks on one machine, as torchrun would start them, but forked from a server that has loaded everything.

Nothing is timed: a process that dies closes its connections, and the others fail at their next exchange.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.training.forked import FORKS, Running, forked

PORTS = range(21_000, 23_000)  # systems hand out higher ones


def in_processes(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of `world` processes, by rank."""
    with processes(world, function, *arguments) as started:
        return [result(running) for running in started]


@contextlib.contextmanager
def processes(world: int, function: Callable[..., Any], *arguments: Any) -> Iterator[list[Running]]:
    """The processes themselves, by rank; they end with the block."""
    started: list[Running] = []
    with contextlib.ExitStack() as ends:
        port = ends.enter_context(own_port())
        for rank in range(world):
            here, there = FORKS.Pipe(duplex=False)
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = ends.enter_context(forked(_main, told, there, function, arguments))
            there.close()
            started.append(Running(process, ends.enter_context(here)))
        yield started


def result(running: Running) -> Any:
    try:
        ended_well, value = running.pipe.recv()
    except EOFError:
        running.process.join()
        raise AssertionError(f"a process ended without a word: exit code {running.process.exitcode}") from None
    running.process.join()
    assert ended_well, value
    return value


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port that is nobody else's within the block.

    One that the system hands out may be handed out again before anybody listens there, to another test or to a
    connection; then processes of two tests meet. So it is below all of these, and other tests are kept off by a lock.
    """
    for port in PORTS:
        with contextlib.ExitStack() as held:
            lock = held.enter_context((Path(tempfile.gettempdir()) / f"sottovoce-tests-port-{port}").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield port
            return
    raise AssertionError(f"no port is free from {PORTS[0]} to {PORTS[-1]}")


def _main(told: dict[str, Any], pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)
