"""Training that ends in time, or counts as nothing.

How long a node trains depends on its speech. If it answered too late, a secure sum would be one person smaller, and
might not be opened at all: its speech would decide about everybody's updates. So where people have accepted a limit, a
node that is not done by then sends zeros in time, as it does above its user's own limits.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, final

T = TypeVar("T")


@final
class TimeLimit:
    """What functions return within `seconds` (None: however long they take), one function at a time."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._running: threading.Thread | None = None

    def result(self, compute: Callable[[], T]) -> T | None:
        """What `compute` returns; None where it takes longer, or an earlier one does still.

        It cannot be interrupted: it ends by itself, and nothing becomes of it.
        """
        if self._seconds is None:
            return compute()
        if self._running is not None and self._running.is_alive():
            return None
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(compute())
            except BaseException as error:
                found.set_exception(error)

        self._running = threading.Thread(target=run, name="training")
        self._running.start()
        try:
            return found.result(timeout=self._seconds)
        except TimeoutError:
            return None
