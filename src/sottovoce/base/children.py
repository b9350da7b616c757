"""A pool of child processes: none outlives this process, however it ends, and signals go to this process alone.

Each child has a connection of its own and nothing else in common with the others, so that one may be killed at any
moment, halfway through an answer too, and it is noticed. (An executor's queues are shared: it would wait for ever.)
"""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeVar, final

from sottovoce.base.interrupts import SIGNALS

T = TypeVar("T")
R = TypeVar("R")

_PROGRAM = "from sottovoce.base.children import serve_fresh_interpreter; serve_fresh_interpreter()"


class ChildKilled(RuntimeError):
    """A process ended before it had answered: killed, or out of memory."""


@dataclass(frozen=True)
class ChildAnswer:
    """What came of the call named `name`: a value, or an error."""

    name: Any
    value: Any = None
    error: Exception | None = None


_Call = tuple[Any, Callable[..., Any], tuple[Any, ...]]  # name, function, arguments


@dataclass(eq=False)
class _Child:
    """A process and the calls that were sent to it: first the one that it is at."""

    process: "BaseProcess | subprocess.Popen[bytes]"
    connection: Connection
    is_ready: bool = False
    calls: deque[_Call] = field(default_factory=deque)

    def end(self) -> int | None:
        """End the process at once, since it keeps nothing; its exit status."""
        self.connection.close()
        if self.process.pid is None:  # a signal came before it was started
            return None
        self.process.kill()
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait()
        self.process.join()
        return self.process.exitcode


@final
class ChildPool:
    """`count` processes that are sent one call at a time; each calls `begin(*given)` first.

    They are started by multiprocessing's `context`, or without one as fresh interpreters of one thread, which import
    nothing of this program's main module and inherit the file `descriptors`. A child that dies raises `ChildKilled`.
    With `replaces`, for many short calls, it costs the one call that it was at, and another child takes its place.
    """

    def __init__(
        self,
        count: int,
        context: Any = None,
        *,
        begin: Callable[..., None] | None = None,
        given: Sequence[Any] = (),
        descriptors: Sequence[int] = (),
        replaces: bool = False,
    ) -> None:
        self._context, self._begin, self._given = context, begin, tuple(given)
        self._descriptors, self._replaces = tuple(descriptors), replaces
        self._children: list[_Child] = []
        self._waiting: deque[_Call] = deque()
        try:
            for _ in range(count):
                self._start()
        except BaseException:
            self.close()
            raise

    def submit(self, name: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Have `function(*arguments)` called as soon as a child is free; its answer has this `name`."""
        self._waiting.append((name, function, arguments))
        self._send_calls()

    def answers(self, *, timeout: float | None = None) -> list[ChildAnswer]:
        """What has been answered since the last time; waits for an answer, or for `timeout` seconds at most."""
        found: list[ChildAnswer] = []
        while not found and (self.busy or self._replaces):
            watched = [child for child in self._children if child.calls or not child.is_ready or self._replaces]
            by_connection = {child.connection: child for child in watched}
            for connection in wait(list(by_connection), timeout):
                found += self._receive(by_connection[connection])  # type: ignore[index]
            self._send_calls()
            if timeout is not None:
                break
        return found

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(child.calls for child in self._children)

    def cancel_waiting(self) -> list[Any]:
        """Forget the calls that were sent to no child yet; their names."""
        names = [name for name, _, _ in self._waiting]
        self._waiting.clear()
        return names

    def ask_to_stop(self) -> None:
        """Call nothing more, and send those that are at work a SIGTERM, for which they may have a handler."""
        self.cancel_waiting()
        for child in self._children:
            if child.calls and child.process.pid is not None:
                os.kill(child.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End all processes, whatever they are at."""
        for child in self._children:
            child.end()
        self._children.clear()

    def _send_calls(self) -> None:
        """A call for every child; a second one while plenty of short ones wait, so that no child waits for this."""
        for depth in (1, 2) if self._replaces else (1,):
            for child in self._children:
                plenty = depth == 1 or len(self._waiting) > len(self._children)
                if self._waiting and plenty and child.is_ready and len(child.calls) < depth:
                    call = self._waiting.popleft()
                    child.calls.append(call)
                    with suppress(OSError):  # it has died: reading from it says so
                        child.connection.send(call[1:])

    def _receive(self, child: _Child) -> list[ChildAnswer]:
        try:
            value, error = child.connection.recv()
        except (EOFError, OSError):
            return self._lose(child)
        if child.is_ready:
            return [ChildAnswer(child.calls.popleft()[0], value, error)]
        if error is not None:
            raise error
        child.is_ready = True
        return []

    def _lose(self, child: _Child) -> list[ChildAnswer]:
        """The call that `child` was at is lost; what it had not begun is sent to others."""
        self._children.remove(child)
        status = child.end()
        if not child.is_ready:
            raise ChildKilled(f"a process ended with status {status} before it could start")
        lost = child.calls.popleft()[0] if child.calls else None
        if not self._replaces:
            raise ChildKilled(f"a process was killed at {lost}")
        self._waiting.extendleft(reversed(child.calls))
        self._start()
        return [] if lost is None else [ChildAnswer(lost, error=ChildKilled(f"its process ended with status {status}"))]

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        if self._context is None:
            self._children.append(_Child(_start_interpreter(theirs, self._descriptors), ours))
            ours.send((self._begin, self._given))
        else:
            process = self._context.Process(target=_serve, args=(theirs, self._begin, self._given))
            self._children.append(_Child(process, ours))  # first: a signal may come while it starts
            process.start()
        theirs.close()


@contextmanager
def child_pool(
    count: int, context: Any, *, begin: Callable[..., None] | None = None, given: Sequence[Any] = ()
) -> Iterator[ChildPool]:
    """A pool whose processes are ended at the end of the block, whatever they are at."""
    pool = ChildPool(count, context, begin=begin, given=given)
    try:
        yield pool
    finally:
        pool.close()


def map_in_order(pool: ChildPool, function: Callable[[T], R], tasks: Sequence[T], *, ahead: int) -> Iterator[R]:
    """`function` of every task, in the tasks' order; never more than `ahead` of them are submitted or waiting here."""
    done: dict[int, ChildAnswer] = {}
    submitted = 0
    for number in range(len(tasks)):
        while submitted < min(len(tasks), number + ahead):
            pool.submit(submitted, function, tasks[submitted])
            submitted += 1
        while number not in done:
            done |= {answer.name: answer for answer in pool.answers()}
        answer = done.pop(number)
        if answer.error is not None:
            raise answer.error
        yield answer.value


def _start_interpreter(connection: Connection, descriptors: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited, until it can ignore them
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(connection.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(connection.fileno(), *descriptors),
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            start_new_session=True,  # a terminal's Ctrl-C is for this process alone
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the child.


def serve_fresh_interpreter() -> None:
    """Serve the connection whose file descriptor is the program's argument."""
    connection = Connection(int(sys.argv[1]))
    try:
        begin, given = connection.recv()
    except (EOFError, OSError):  # the other side is gone
        os._exit(0)
    _serve(connection, begin, given)


def _serve(connection: Connection, begin: Callable[..., None] | None, given: Sequence[Any]) -> None:
    for number in SIGNALS:  # a terminal sends them to all of its processes, but the first one decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _exit_with_parent(connection.fileno())
    _answer(connection, begin or _do_nothing, given)
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        _answer(connection, function, arguments)


def _answer(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    value, error = None, None
    try:
        value = function(*arguments)
    except Exception as raised:
        raised.add_note("".join(["in a process of its own:\n", *traceback.format_exception(raised)]))
        error = raised
    try:
        connection.send((value, error))
    except OSError:
        os._exit(0)
    except Exception as unsendable:
        connection.send((None, RuntimeError(f"{function} gave back what cannot be sent: {unsendable}")))


def _do_nothing() -> None:
    pass


def _exit_with_parent(parent: int) -> None:
    """End this process when the other end of the connection `parent` is closed, as it is by any death.

    A thread watches it, since work may go on for long. Nothing is lost: all that is written is written atomically.
    """
    Thread(target=_exit_when_closed, args=(parent,), daemon=True).start()


def _exit_when_closed(parent: int) -> None:
    watch = select.poll()
    watch.register(parent, 0)  # asks for nothing, and is still woken by the end
    watch.poll()
    os._exit(0)
