"""When rounds begin.

A round ends early where everybody has answered. If the next one began right away, one slow person would move it for all
others, and with it who of them is still connected: their speech would decide whose updates are in later sums, which no
ε covers. With a fixed interval rounds begin at times that are known before the first.
"""

import math
import time
from collections.abc import Callable
from typing import final


@final
class Schedule:
    """Rounds begin every so many `seconds` from the first on, or with None as soon as the last is over.

    A round that takes longer does not move later ones: the next begins late, and the one after it in time.
    """

    def __init__(self, seconds: float | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = seconds, now
        self._first: float | None = None
        self._due = -math.inf

    @property
    def is_fixed(self) -> bool:
        """Whether the time of every round is known before the first."""
        return self._seconds is not None

    def left(self) -> float:
        """Seconds until the next round may begin; 0 where it may now."""
        return max(self._due - self._now(), 0.0)

    def begin(self) -> None:
        """A round begins now."""
        if self._seconds is None:
            return
        now = self._now()
        self._first = now if self._first is None else self._first
        self._due = self._first + self._seconds * (math.floor((now - self._first) / self._seconds) + 1)
