"""Processes that this one starts: none outlives it, however it ends, and signals are for this one alone.

Each has a connection of its own to this process and nothing else in common with the others, so that one may be killed
at any moment, halfway through an answer too, and it is noticed. (An executor's queues are shared: it would wait for
ever.)
"""

import multiprocessing
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeVar, final

from sottovoce.base.interrupts import SIGNALS

T = TypeVar("T")
R = TypeVar("R")


class ChildKilled(Exception):
    """A process ended before it had answered: killed, or out of memory."""


@dataclass(frozen=True)
class Answer:
    """What came of the call named `name`: a value, or an error."""

    name: Any
    value: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class _Child:
    process: BaseProcess
    connection: Connection
    name: Any = None
    busy: bool = False


@final
class Children:
    """Processes that are handed one call at a time. Made by `children`."""

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._waiting: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = deque()

    def hand(self, name: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Have `function(*arguments)` called as soon as one is free; `name` is what its answer will go by."""
        self._waiting.append((name, function, arguments))
        self._hand_out()

    def answers(self, *, timeout: float | None = None) -> list[Answer]:
        """What has been answered since; waits for something, for `timeout` seconds at most."""
        by_connection = {child.connection: child for child in self._children if child.busy}
        found = []
        for connection in wait(list(by_connection), timeout) if by_connection else ():
            child = by_connection[connection]  # type: ignore[index]
            try:
                value, error = child.connection.recv()
            except (EOFError, OSError):
                raise ChildKilled(f"a process was killed at {child.name}") from None
            child.busy = False
            found.append(Answer(child.name, value, error))
            self._hand_out()
        return found

    @property
    def busy(self) -> bool:
        return any(child.busy for child in self._children)

    def ask_to_stop(self) -> None:
        """Call nothing more, and send those that are at work a SIGTERM, for which they may have a handler."""
        self._waiting.clear()
        for child in self._children:
            if child.busy and child.process.pid is not None:
                os.kill(child.process.pid, signal.SIGTERM)

    def _hand_out(self) -> None:
        for child in self._children:
            if self._waiting and not child.busy:
                child.name, *call = self._waiting.popleft()
                child.busy = True
                try:
                    child.connection.send(call)
                except OSError:
                    raise ChildKilled(f"a process was killed before {child.name}") from None

    def _start(self, context: Any, begin: Callable[..., None] | None, given: Sequence[Any]) -> None:
        ours, theirs = multiprocessing.Pipe()
        process = context.Process(target=_serve, args=(theirs, begin, given))
        self._children.append(_Child(process, ours))  # first: a signal may come while it starts
        process.start()
        theirs.close()

    def _end(self) -> None:
        for child in self._children:
            child.connection.close()
            if child.process.pid is not None:
                child.process.kill()
        for child in self._children:
            if child.process.pid is not None:
                child.process.join()


@contextmanager
def children(
    count: int, context: Any, *, begin: Callable[..., None] | None = None, given: Sequence[Any] = ()
) -> Iterator[Children]:
    """`count` processes of multiprocessing's `context`; each calls `begin(*given)` first. At the end of the block they
    are ended, whatever they are at."""
    found = Children()
    try:
        for _ in range(count):
            found._start(context, begin, given)
        yield found
    finally:
        found._end()


def in_order(found: Children, function: Callable[[T], R], tasks: Sequence[T], *, ahead: int) -> Iterator[R]:
    """`function` of every task, in the tasks' order; never more than `ahead` of them are handed out or waiting here."""
    done: dict[int, Answer] = {}
    handed = 0
    for number in range(len(tasks)):
        while handed < min(len(tasks), number + ahead):
            found.hand(handed, function, tasks[handed])
            handed += 1
        while number not in done:
            done |= {answer.name: answer for answer in found.answers()}
        answer = done.pop(number)
        if answer.error is not None:
            raise answer.error
        yield answer.value


# In the other process.


def leave_with(parent: int) -> None:
    """End this process when the other end of the connection `parent` is closed, as it is by any death.

    A thread watches it, since work may go on for long. Nothing is lost: all that is written is written atomically.
    """
    Thread(target=_leave_when_closed, args=(parent,), daemon=True).start()


def _leave_when_closed(parent: int) -> None:
    watch = select.poll()
    watch.register(parent, 0)  # asks for nothing, and is told of the end even so
    watch.poll()
    os._exit(0)


def _serve(connection: Connection, begin: Callable[..., None] | None, given: Sequence[Any]) -> None:
    for number in SIGNALS:  # a terminal sends them to all of its processes, but the first one has the last word
        signal.signal(number, signal.SIG_IGN)
    leave_with(connection.fileno())
    if begin is not None:
        begin(*given)
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
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
