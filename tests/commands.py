"""Processes that end with the test that started them, whatever becomes of it; nothing has a time limit."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@contextlib.contextmanager
def command(
    arguments: Sequence[object], *, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, all of which is killed behind the block; its output and errors are pipes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    environment = os.environ | (environment or {})
    with subprocess.Popen(
        [*map(str, arguments)], env=environment, start_new_session=True, preexec_fn=_restore_signals, **options
    ) as process:
        try:
            yield process
        finally:
            end_group(process.pid)


def _restore_signals() -> None:
    """Ignored where tests run in the background or with `nohup`, and so they would be in what they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def end_group(pid: int) -> None:
    """Kill what is left of the processes that `pid` leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for it; its exit code, output and errors."""
    out, err = process.communicate()
    return process.returncode, out, err
