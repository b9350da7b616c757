"""What lets tests pass on a machine that is busy or different: named points, children that end, no judging by time."""

import os
import signal
import sys
import warnings

import numpy as np
import pytest
from hypothesis import settings
from tests.commands import command, finished
from tests.points import Gate, Point, Watch

from sottovoce.base.processes import split_by_load

DEAL = "sottovoce.base.processes:split_by_load"
THREE_TIMES = (
    "from sottovoce.base.processes import split_by_load as f; import numpy; [f(numpy.ones(2), 2) for _ in range(3)]"
)


def test_a_point_is_reached_once_and_where_it_is_named() -> None:
    seen: list[int] = []
    with Watch(Point(DEAL, nth=2), lambda: seen.append(watch.calls), counts=True) as watch:
        split_by_load(np.ones(2), 2)
        once = watch.calls
        split_by_load(np.ones(2), 2)
        split_by_load(np.ones(2), 2)
    assert seen == [2 * once], "when it has returned for the second time, and never again"
    assert watch.calls == 3 * once

    with Watch(Point(DEAL, nth=2, at="call", later=1), lambda: seen.append(watch.calls), counts=True) as watch:
        split_by_load(np.ones(2), 2)
        split_by_load(np.ones(2), 2)
    assert seen[-1] == once + 2, "one call behind the second one's beginning"


def test_a_command_is_held_at_its_point_and_goes_on() -> None:
    with (
        Gate() as gate,
        command([sys.executable, "-c", THREE_TIMES], environment=gate.environment(Point(DEAL))) as ours,
    ):
        held = gate.reached(ours)
        assert (held.pid, ours.poll()) == (ours.pid, None)
        held.go()
        assert finished(ours) == (0, "", "")


def test_a_command_that_ends_before_its_point_ends_the_waiting() -> None:
    point = Point(DEAL, nth=4)
    early = pytest.raises(AssertionError, match="ended before it came to its point")
    arguments = [sys.executable, "-c", THREE_TIMES]
    with Gate() as gate, command(arguments, environment=gate.environment(point)) as ours, early:
        gate.reached(ours)


def test_a_test_that_fails_leaves_no_process() -> None:
    """Neither the command nor what it has started."""
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    started = []

    def fails() -> None:
        with command([sys.executable, "-c", endless], stdin=reader) as ours:
            assert ours.stdout is not None
            assert ours.stdout.readline() == "1\n"
            started.append((ours, os.dup(ours.stdout.fileno())))
            raise ZeroDivisionError

    reader, writer = os.pipe()
    with pytest.raises(ZeroDivisionError):
        fails()
    ((ours, end),) = started
    assert ours.returncode is not None
    assert os.read(end, 1) == b"", "nobody has the pipe open any more"
    for descriptor in (reader, writer, end):
        os.close(descriptor)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_command_hears_signals_that_the_tests_themselves_ignore(number: signal.Signals) -> None:
    """As they do with `nohup` and in the background of a shell."""
    code = f"import signal; print(signal.getsignal({int(number)}) is signal.SIG_IGN)"
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with command([sys.executable, "-c", code]) as ours:
            assert finished(ours)[1] == "False\n"
    finally:
        signal.signal(number, before)


def test_of_all_warnings_only_that_of_cublas_is_no_error() -> None:
    warnings.warn(
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context... "
        "(Triggered internally at /pytorch/aten/src/ATen/cuda/CublasHandlePool.cpp:181.)",
        stacklevel=1,
    )
    with pytest.raises(UserWarning):
        warnings.warn("Attempting to run cuBLAS without a GPU", stacklevel=1)


def test_no_example_is_judged_by_how_long_it_takes() -> None:
    assert settings().deadline is None
