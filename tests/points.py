"""Named points of a program at which a test kills it or holds it: never at a time, so that load changes nothing.

A point is a function of ours by its name, and which of its calls or returns. Whoever is held has told the test so over
a socket and waits for its answer; nobody polls, and nothing has a time limit. A process that ends before its point
ends the waiting, too.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal, Self

ROOT = Path(__file__).parent.parent
_OURS = f"{os.sep}sottovoce{os.sep}"
_ARMED = "SOTTOVOCE_TEST_POINT"
ANYTHING = ""  # any function, of C too, that our own code calls


@dataclass(frozen=True)
class Point:
    """The `nth` time that the function `name` ("sottovoce.base.files:write_json") is called, or has returned.

    `later`: so many calls of anything after that.
    """

    name: str = ANYTHING
    nth: int = 1
    at: Literal["call", "return"] = "return"
    later: int = 0


CHARGED = Point("sottovoce.privacy.ledger:Ledger.intend")
SAVED = Point("sottovoce.training.checkpoint:save_checkpoint")


def die() -> None:
    """As kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


class Watch:
    """Calls `reached` at `point`, once. With `counts`, `calls` is what our own code calls in this thread."""

    def __init__(self, point: Point | None, reached: Callable[[], None] = die, *, counts: bool = False) -> None:
        self._point, self._reached, self._counts = point, reached, counts
        self.calls = self._seen = self._since = 0

    def __enter__(self) -> Self:
        if self._counts or self._point is not None:
            sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if _OURS not in frame.f_code.co_filename:
            return
        is_call = event in ("call", "c_call")
        self.calls += is_call
        if self._point is None:
            return
        if self._seen < self._point.nth:
            self._seen += self._is_it(frame, event, self._point)
        else:
            self._since += is_call
        if self._seen == self._point.nth and self._since == self._point.later:
            self._point = None
            if not self._counts:
                sys.setprofile(None)
            self._reached()

    def _is_it(self, frame: FrameType, event: str, point: Point) -> bool:
        if point.name == ANYTHING:
            return event in ("call", "c_call")
        module, _, function = point.name.partition(":")
        return event == point.at and (frame.f_globals.get("__name__"), frame.f_code.co_qualname) == (module, function)


# In the test.


@dataclass(frozen=True)
class Held:
    """A process that has come to its point."""

    pid: int
    _line: socket.socket

    def go(self) -> None:
        """Let it go on."""
        self._line.close()


class Gate:
    """Where processes report that they have come to their point; those still held when it closes go on."""

    def __init__(self) -> None:
        self._door, self._lines = socket.socket(socket.AF_UNIX), list[socket.socket]()
        self._door.bind("")  # Linux finds a free address, which is not in the file system
        self._door.listen()
        self.address = self._door.getsockname().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in (self._door, *self._lines):
            line.close()

    def reached(self, *processes: Any) -> Held:
        """The next process that is held. AssertionError if one of `processes`, which have a `pid`, ends before."""
        ends = [os.pidfd_open(process.pid) for process in processes]
        try:
            assert self._door in wait([self._door, *ends]), "a process ended before it came to its point"
        finally:
            for end in ends:
                os.close(end)
        line, _ = self._door.accept()
        self._lines.append(line)
        return Held(int(line.makefile().readline()), line)

    def environment(self, point: Point) -> Mapping[str, str]:
        """For commands that are started with it: they, and all that they start, are held at `point`."""
        assert (point.name != ANYTHING, point.later) == (True, 0), "held in a function of its name"
        path = os.pathsep.join([str(ROOT / "tests/armed"), str(ROOT), *sys.path])
        return {_ARMED: json.dumps([asdict(point), self.address]), "PYTHONPATH": path}


# In the process.


def hold(address: str) -> None:
    """Tell the test that the point has come, and wait. A test that has ended lets nobody wait."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        line.sendall(f"{os.getpid()}\n".encode())
        line.recv(1)


def arm() -> None:
    """Called when Python starts, in whatever was given a point by its environment (tests/armed/sitecustomize.py)."""
    if (told := os.environ.get(_ARMED)) is not None:
        point, address = json.loads(told)
        sys.meta_path.insert(0, _Armed(Point(**point), address))


class _Armed(MetaPathFinder):
    """Lets the module of `point` be loaded as ever, with a function in it that is held there.

    A `Watch` would be the same and simpler, but torch takes several times as long to load under its eyes.
    """

    def __init__(self, point: Point, address: str) -> None:
        self._point, self._address = point, address
        self._module, _, self._function = point.name.partition(":")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.loader is not None
        load = found.loader.exec_module

        def load_armed(module: ModuleType) -> None:
            load(module)
            *within, name = self._function.split(".")
            owner = reduce(getattr, within, module)
            setattr(owner, name, self._held(getattr(owner, name)))

        found.loader.exec_module = load_armed  # type: ignore[method-assign]
        return found

    def _held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        seen = count(1)

        @wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self._point.at == "call" and next(seen) == self._point.nth:
                hold(self._address)
            try:
                return function(*arguments, **named)
            finally:
                if self._point.at == "return" and next(seen) == self._point.nth:
                    hold(self._address)

        return wrapped
