"""Named points of a run at which its process can be killed: each file operation, and what matters most of the rest.

A point is an operation, the file below `folder` that it is on, and the how-many-eth it is in its process: "rename
run/metrics.jsonl 2". Names hold nothing that another run of the same would call otherwise.
"""

import functools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python's audit events and the place of the path among their arguments.
_OPERATIONS = {
    "os.rename": 1,
    "os.remove": 0,
    "os.mkdir": 0,
    "os.rmdir": 0,
    "os.symlink": 1,
    "os.truncate": 0,
    "os.chmod": 0,
}
_RANDOM = (
    (re.compile(r"(/\.[^/]+)\.[a-z0-9_]{8}$"), r"\1.*"),
    (re.compile(r"/\.writing-[a-z0-9_]{8}"), "/.writing-*"),
    (re.compile(r"/data-[0-9a-f]{12}"), "/data-*"),
    (re.compile(r"/events\.out\..*"), "/events*"),
)
# Before and after each of these.
_FUNCTIONS = {
    "sottovoce.privacy.ledger": ("Ledger.intend", "Ledger.commit"),
    "sottovoce.privacy.plan": ("Plan.add_noise",),
    "sottovoce.federated.server": ("Server.step",),
    "sottovoce.training.checkpoint": ("_save", "point_link"),
    "sottovoce.data.store.writing": ("Writer.add", "Writer.finish"),
}


class Points:
    """Writes the points that this process and its children pass to the file `log`, and kills the one that comes to
    `kill_at`."""

    def __init__(self, folder: Path, *, log: Path, kill_at: str | None) -> None:
        self._folder, self._kill_at = f"{folder}{os.sep}", kill_at
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._passed: Counter[str] = Counter()

    def install(self) -> None:
        """For the rest of this process's life, and its children's."""
        sys.addaudithook(self._heard)
        for name in ("fsync", "pwrite"):  # of which Python tells nobody
            setattr(os, name, self._on_file(name, getattr(os, name)))
        for module, names in _FUNCTIONS.items():
            for name in names:
                owner: Any = sys.modules[module]
                *inside, last = name.split(".")
                for part in inside:
                    owner = getattr(owner, part)
                setattr(owner, last, self._around(name, getattr(owner, last)))

    def _passes(self, name: str) -> None:
        self._passed[name] += 1
        point = f"{name} {self._passed[name]}"
        os.write(self._log, f"{point}\n".encode())
        if point == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _passes_on(self, operation: str, path: Any) -> None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        whole = os.path.abspath(os.fsdecode(path))
        if whole.startswith(self._folder):
            named = f"/{whole.removeprefix(self._folder)}"
            for pattern, instead in _RANDOM:
                named = pattern.sub(instead, named)
            self._passes(f"{operation} {named[1:]}")

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OPERATIONS:
            self._passes_on(event.removeprefix("os."), arguments[_OPERATIONS[event]])
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._passes_on("open", arguments[0])

    def _on_file(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(descriptor: int, *arguments: Any) -> Any:
            self._passes_on(name, descriptor)
            return function(descriptor, *arguments)

        return watched

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            self._passes(f"before {name}")
            result = function(*arguments, **named)
            self._passes(f"after {name}")
            return result

        return watched
