"""How a planted fault ended, and how many ended in which way."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """`UNHARMED`: the result is as without the fault. The last three must never occur."""

    UNHARMED = "unharmed"
    CLEAN_ERROR = "clean error"
    TRACEBACK = "traceback"
    HANG = "hang"
    SILENT_LOSS = "silent loss"


BAD = (Outcome.TRACEBACK, Outcome.HANG, Outcome.SILENT_LOSS)


@dataclass
class Tally:
    """Counts by what was tried ("audio files", "kills of a federated run"), and a line for each bad outcome."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[str] = field(default_factory=list)

    def add(self, what: str, outcome: Outcome, *, words: str = "") -> None:
        self.counts[what][outcome] += 1
        if outcome in BAD:
            self.bad.append(f"{what}: {outcome}: {words}")

    def as_json(self) -> Mapping[str, Mapping[str, int]]:
        return {what: {"tried": found.total(), **{o: found[o] for o in Outcome}} for what, found in self.counts.items()}
