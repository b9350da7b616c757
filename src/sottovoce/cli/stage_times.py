"""How long the stages of a command took, for its last line."""

import time
from collections.abc import Callable
from typing import final

SHORT = 0.02  # stages that take less of the whole are added up as one
OTHERS = "others"


@final
class StageTimes:
    """Seconds by title; stages of one title are added up. What precedes the first counts among the others."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._title, self._begun = clock, OTHERS, clock()
        self._seconds: dict[str, float] = {}

    def begin(self, title: str) -> None:
        """The stage so far has ended, and that of this title begins or goes on."""
        now = self._clock()
        self._seconds[self._title] = self._seconds.get(self._title, 0.0) + now - self._begun
        self._title, self._begun = title, now

    def format(self) -> str:
        """In one line, up to now."""
        from sottovoce.training.estimate import format_time

        self.begin(self._title)
        total = sum(self._seconds.values())
        shown = {name: t for name, t in self._seconds.items() if name != OTHERS and t >= SHORT * total}
        shown[OTHERS] = total - sum(shown.values())
        return f"took {format_time(total)}: {', '.join(f'{name} {format_time(t)}' for name, t in shown.items())}"
