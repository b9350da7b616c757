"""Runs of recipes in processes that may be killed.

They are forked from a server that has loaded everything already, so that a run starts in milliseconds and not in
seconds. A process may be told to kill itself (SIGKILL, as kill -9) at the n-th function call that our own code makes, C
functions included: moments between a write and its fsync, or inside a round, come up like any other, and a seed
repeats them.
"""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

_OURS = f"{os.sep}sottovoce{os.sep}"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["sottovoce.cli.run", "sottovoce.training.smoking", "sottovoce.reporting.summary", "tests.training.accounted"]
)


@dataclass
class Ended:
    """How a process ended; `calls` counts its function calls, for those who would kill the next one at one of them."""

    code: int | None
    out: str = ""
    err: str = ""
    calls: int = 0


@dataclass
class Running:
    """A process and the pipe through which it says how it ended."""

    process: BaseProcess
    pipe: Connection

    def end(self) -> Ended:
        """Wait for it; one that was killed says nothing."""
        said: tuple[str, str, int] = ("", "", 0)
        with contextlib.suppress(EOFError):
            said = self.pipe.recv()
        self.process.join(120)
        return Ended(self.process.exitcode, *said)


def start(arguments: Sequence[object], *, kill_at: int | None = None, counts: bool = False) -> Running:
    """`sottovoce` with `arguments`, in a process of its own."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_main, args=([str(a) for a in arguments], there, kill_at, counts))
    process.start()
    there.close()
    return Running(process, here)


def run(arguments: Sequence[object], *, kill_at: int | None = None, counts: bool = False) -> Ended:
    return start(arguments, kill_at=kill_at, counts=counts).end()


def _main(arguments: list[str], pipe: Connection, kill_at: int | None, counts: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code, called = run_command(arguments, kill_at=kill_at, counts=counts)
    pipe.send((out.getvalue(), err.getvalue(), called))
    pipe.close()
    os._exit(code)


def run_command(arguments: list[str], *, kill_at: int | None, counts: bool) -> tuple[Any, int]:
    """`sottovoce` with `arguments` in this process: its exit code, and the number of its function calls."""
    from sottovoce.cli import main

    sys.argv = ["sottovoce", *arguments]
    called = 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal called
        if event in ("call", "c_call") and _OURS in frame.f_code.co_filename:
            called += 1
            if called == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    code: Any = 0
    try:
        with _profiled(count if counts or kill_at is not None else None):
            main()
    except SystemExit as ended:
        code = ended.code or 0
    return code, called


@contextlib.contextmanager
def _profiled(count: Callable[[FrameType, str, Any], None] | None) -> Any:
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
