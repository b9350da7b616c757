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
    # Where tests run in the background SIGINT is ignored, and so it would be in what they start.
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(
        [*map(str, arguments)], env=environment, start_new_session=True, preexec_fn=heard, **options
    ) as process:
        try:
            yield process
        finally:
            end_group(process.pid)


def end_group(pid: int) -> None:
    """Kill what is left of the processes that `pid` leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for it; its exit code, output and errors."""
    out, err = process.communicate()
    return process.returncode, out, err
