"""Commands in processes of their own that start in milliseconds and are waited for to the last of their children.

A fork server has everything loaded. For each command it forks a guard, to whom Linux gives the orphans among its
descendants: so it knows exactly when nobody is left.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faulty.points import Points

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
# A command takes a second or two. Whoever needs so long will never end.
PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Ended:
    """How a command ended, when the last of its processes was gone; `code` is None where that never came."""

    code: int | None
    output: str
    points: tuple[str, ...]

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output


class ForkServer:
    """Made by `fork_server`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, arguments: Sequence[object], *, folder: Path, kill_at: str | None = None) -> Ended:
        """`sottovoce` with `arguments`, its working folder `folder`; killed at the point `kill_at` of that folder."""
        self._connection.send((list(map(str, arguments)), folder, kill_at))
        ended: Ended = self._connection.recv()
        return ended


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ForkServer(ours)
    finally:
        ours.close()
        process.join()


# In the fork server.


def _serve(connection: Connection) -> None:
    _load()
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            if (guard := os.fork()) == 0:
                connection.send(_guarded(*request))
                os._exit(0)
            os.waitpid(guard, 0)


def _load() -> None:
    """All that commands import later, and what accounting works out for the campaign's kind of step."""
    import soundfile  # noqa: F401
    import torch
    import torch.utils.tensorboard

    import sottovoce.data.corpora.tsv
    import sottovoce.data.store.packing
    import sottovoce.report.summary
    import sottovoce.training.run
    import sottovoce.training.suites  # noqa: F401
    from sottovoce.privacy.accounting import RunningEpsilon
    from sottovoce.privacy.events import poisson_release
    from sottovoce.privacy.planner import plan_run, smallest_population
    from sottovoce.privacy.pld import QUICK

    torch.set_num_threads(1)  # threads would not survive the fork
    RunningEpsilon(delta=1e-3).peek(poisson_release(8.0, sampling_rate=2 / 9))
    planned = plan_run(9, cohort_size=2, central_steps=4, delta=1e-3, noise_multiplier=8.0, cap=QUICK)
    smallest_population(planned, target_epsilon=8.0, accountant="rdp", cap=QUICK)


def _guarded(arguments: list[str], folder: Path, kill_at: str | None) -> Ended:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        output, log = Path(place) / "output", Path(place) / "points"
        log.touch()
        if (first := os.fork()) == 0:
            _be_the_command(arguments, folder, kill_at, output=output, log=log)
        hung, statuses = False, dict[int, int]()

        def give_up(*_: object) -> None:
            nonlocal hung
            hung = True
            _kill_all()

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(PATIENCE_SECONDS)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.wait()
                statuses[pid] = os.waitstatus_to_exitcode(status)
        signal.alarm(0)
        return Ended(
            None if hung else statuses[first], output.read_text(errors="replace"), tuple(log.read_text().splitlines())
        )


def _kill_all() -> None:
    """Those who are orphaned by it come here too, and are killed by the next alarm."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def _be_the_command(arguments: list[str], folder: Path, kill_at: str | None, *, output: Path, log: Path) -> None:
    code: Any = 1
    try:
        os.chdir(folder)
        os.environ["SOTTOVOCE_COMMIT"] = "unknown"  # nobody has to ask git
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
        _start_quickly()
        Points(folder, log=log, kill_at=kill_at).install()
        from sottovoce.cli import main

        sys.argv = ["sottovoce", *arguments]
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
    except BaseException:  # before the command: a point that is called otherwise now
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start_quickly() -> None:
    """Children of the command are forked, too. Of this process's side of their connections they keep nothing, just as
    if a new program had been started in them."""
    from sottovoce.base import children
    from sottovoce.report import page

    page.inline_svg = lambda drawing: "<svg></svg>"  # type: ignore[attr-defined]  # it would take longer than all else
    pipe, ours = multiprocessing.Pipe, list[Connection]()

    def noted() -> tuple[Connection, Connection]:
        pair = pipe()
        ours.append(pair[0])
        return pair

    forks = multiprocessing.get_context("fork")
    children.multiprocessing.Pipe = noted  # type: ignore[attr-defined]
    multiprocessing.get_context = lambda method=None: forks  # type: ignore[assignment]

    def close() -> None:
        for connection in ours:
            connection.close()

    os.register_at_fork(after_in_child=close)
