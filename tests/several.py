"""Several processes on one machine, as torchrun would start them, but forked from a server that has loaded everything.

Nothing is timed: a process that dies closes its connections, and the others fail at their next exchange.
"""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.training.forked import FORKS


def in_processes(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of `world` processes, by rank."""
    started = start_processes(world, function, *arguments)
    return [result(process, pipe) for process, pipe in started]


def start_processes(world: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[BaseProcess, Connection]]:
    port = free_port()
    started = []
    for rank in range(world):
        here, there = FORKS.Pipe(duplex=False)
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = FORKS.Process(target=_main, args=(told, there, function, arguments))
        process.start()
        there.close()
        started.append((process, here))
    return started


def result(process: BaseProcess, pipe: Connection) -> Any:
    try:
        ended_well, value = pipe.recv()
    except EOFError:
        raise AssertionError(f"a process ended without a word: exit code {process.exitcode}") from None
    process.join(60)
    assert ended_well, value
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _main(told: dict[str, Any], pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)
