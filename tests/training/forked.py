"""Runs of recipes in processes that may be killed or held at a named point (`tests.points`).

They are forked from a server that has loaded everything already, so that a run starts in milliseconds and not in
seconds. Among the points are all function calls that our own code makes, C functions included: moments between a write
and its fsync, or inside a round, come up like any other.
"""

import contextlib
import io
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.commands import end_group
from tests.points import Gate, Point, Watch, die, hold

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "sottovoce.cli.run",
        "sottovoce.training.run",
        "sottovoce.training.suites",
        "sottovoce.report.summary",
        "sottovoce.models.transformer",
        "tests.training.accounted",
        "torch.utils.tensorboard",
        # What runs load when they come to account for their privacy.
        "dp_accounting.pld",
        "scipy.optimize",
        "sottovoce.network.node.participant",
        # Where flwr is installed: what cannot be imported is left out.
        "sottovoce.network.transport.flower",
        "sottovoce.network.node.worker",
    ]
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

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> Ended:
        """Wait for it; one that was killed says nothing."""
        said: tuple[str, str, int] = ("", "", 0)
        with contextlib.suppress(EOFError):
            said = self.pipe.recv()
        self.process.join()
        return Ended(self.process.exitcode, *said)


@contextlib.contextmanager
def forked(target: Any, *arguments: Any) -> Iterator[BaseProcess]:
    """`target(*arguments)` in a process that leads a group of its own, all of which is killed behind the block."""
    process = FORKS.Process(target=_leading, args=(target, arguments))
    process.start()
    try:
        yield process
    finally:
        assert process.pid is not None
        end_group(process.pid)
        process.kill()  # it may not have come so far as to lead a group
        process.join()
        process.close()


def _leading(target: Any, arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    target(*arguments)


@contextlib.contextmanager
def start(
    arguments: Sequence[object],
    *,
    kill_at: Point | None = None,
    hold_at: tuple[Point, Gate] | None = None,
    counts: bool = False,
) -> Iterator[Running]:
    """`sottovoce` with `arguments`, in a process of its own, which ends with the block."""
    held = None if hold_at is None else (hold_at[0], hold_at[1].address)
    here, there = FORKS.Pipe(duplex=False)
    with here, forked(_main, [str(a) for a in arguments], there, kill_at, held, counts) as process:
        there.close()
        yield Running(process, here)


def run(arguments: Sequence[object], *, kill_at: Point | None = None, counts: bool = False) -> Ended:
    with start(arguments, kill_at=kill_at, counts=counts) as running:
        return running.end()


def _main(
    arguments: list[str], pipe: Connection, kill_at: Point | None, held: tuple[Point, str] | None, counts: bool
) -> None:
    out, err = io.StringIO(), io.StringIO()
    watch = Watch(kill_at, die, counts=counts) if held is None else Watch(held[0], lambda: hold(held[1]))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(arguments, watch)
    pipe.send((out.getvalue(), err.getvalue(), watch.calls))
    pipe.close()
    os._exit(code)


def run_command(arguments: list[str], watch: Watch) -> Any:
    """`sottovoce` with `arguments` in this process, watched: its exit code.

    Reports have empty figures: a short run would spend most of its time on drawing them, and more of it when watched.
    """
    from sottovoce.cli import main
    from sottovoce.report import page

    page.inline_svg = lambda _: "<svg />"  # type: ignore[attr-defined]
    sys.argv = ["sottovoce", *arguments]
    try:
        with watch:
            main()
    except SystemExit as ended:
        return ended.code or 0
    return 0
