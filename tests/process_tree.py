"""A command and all processes that come of it, waited for to the last one.

Linux gives the orphans among a guard's descendants to the guard, so that it knows exactly when nobody is left: no test
has to guess how long an end may take.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>


@dataclass
class ProcessTree:
    """A running command: the number of its first process, and where its standard error goes."""

    guard: "subprocess.Popen[str]"
    pid: int
    said: Path

    def send(self, number: signal.Signals) -> None:
        """To the first process alone."""
        os.kill(self.pid, number)

    def end(self) -> int:
        """The exit code of the first process (negative: the signal that killed it), when the last of all is gone."""
        assert self.guard.stdout is not None
        return int(self.guard.stdout.readline())


@contextmanager
def started(
    command: Sequence[object], *, said: Path, environment: Mapping[str, str] | None = None
) -> Iterator[ProcessTree]:
    """`command`, running; whoever is left of it at the end of the block is killed."""
    arguments = [sys.executable, __file__, str(said), *map(str, command)]
    around = os.environ | (environment or {})
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=around) as guard:
        assert guard.stdout is not None
        try:
            yield ProcessTree(guard, int(guard.stdout.readline()), said)
        finally:
            guard.terminate()


def _guard(said: str, command: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: _kill_all())
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # when the tests are killed, too
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Ignored where tests run in the background or with `nohup`, and so they would be below.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with open(said, "w") as errors:
        first = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
    print(first.pid, flush=True)
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid == first.pid:
                code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):
        print(code, flush=True)
    os._exit(0)


def _kill_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:  # the orphans of those who are killed come here too
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.wait()
    os._exit(1)


if __name__ == "__main__":
    _guard(sys.argv[1], sys.argv[2:])
