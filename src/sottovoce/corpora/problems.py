"""What was wrong with a corpus: every unusable row is counted, with its first examples, and none is lost silently."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from sottovoce.base.errors import InputError

EXAMPLES_KEPT = 3


class Kind(StrEnum):
    """Why a row, a recording or a speaker was left out, or what was changed to keep it."""

    EMPTY_ROW = "empty or incomplete row"
    MALFORMED_ROW = "row that cannot be parsed"
    DUPLICATE_ROW = "duplicated row"
    PATH_ESCAPES = "path leaves the corpus folder"
    MISSING_AUDIO = "text with no audio file"
    MISSING_TEXT = "audio with no text"
    EMPTY_TEXT = "text that normalises to nothing"
    FOREIGN_TEXT = "text with characters outside the language's alphabet"
    UNREADABLE_AUDIO = "audio that cannot be decoded"
    TRUNCATED_AUDIO = "audio shorter than its header says"
    EMPTY_AUDIO = "zero-length audio"
    NON_FINITE_AUDIO = "audio with NaN or infinite samples"
    NO_VOICE = "chapter in which no voice was found"
    NOT_AS_STORED = "audio that would have to be converted, which a store that points cannot"
    EMPTY_SPEAKER = "speaker with no usable utterance"
    # Kept all the same:
    SPLIT_OVERLAP = "speaker in more than one split"
    UNLABELLED = "audio with no text, taken as speech without text"
    NO_VOICE_ACTIVITY = "chapter with no voice activity beside it, cut evenly"
    BEYOND_THE_END = "voice activity beyond the end of its audio, shortened"
    SEGMENT_BEYOND = "segment beyond the end of its audio, shortened"
    NO_TIME = "no place in time, put last"
    # Kept, after conversion:
    MIXED_DOWN = "several channels, mixed down"
    LOW_RESOLUTION = "fewer than 16 bits per sample"
    RESAMPLED = "other sample rate, resampled"
    UNWRITTEN = "text with characters that no token writes, left out of it"

    @property
    def is_conversion(self) -> bool:
        """Whether the recording was only converted: reported, but no reason for a strict run to stop."""
        return self in _CONVERSIONS

    @property
    def is_kept(self) -> bool:
        """Whether what was found stays in the corpus all the same."""
        return self.is_conversion or self in _KEPT


_KEPT = {
    Kind.SPLIT_OVERLAP,
    Kind.UNLABELLED,
    Kind.NO_VOICE_ACTIVITY,
    Kind.BEYOND_THE_END,
    Kind.SEGMENT_BEYOND,
    Kind.NO_TIME,
}
_CONVERSIONS = {Kind.MIXED_DOWN, Kind.LOW_RESOLUTION, Kind.RESAMPLED, Kind.UNWRITTEN}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that was wrong: `where` names the row or file, `detail` says what was found there."""

    kind: Kind
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}" + (f" ({self.detail})" if self.detail else "")


class Unusable(Exception):
    """A recording that must be left out, and why."""

    def __init__(self, kind: Kind, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


@dataclass
class ProblemLog:
    """Counts problems and keeps the first examples of each kind; when `strict`, the first real one stops the work."""

    strict: bool = False
    counts: Counter[Kind] = field(default_factory=Counter)
    examples: dict[Kind, list[Problem]] = field(default_factory=dict)

    def add(self, problem: Problem) -> None:
        if self.strict and not problem.kind.is_conversion:
            raise InputError(f"{problem} [stopped because of --strict]")
        self.counts[problem.kind] += 1
        examples = self.examples.setdefault(problem.kind, [])
        if len(examples) < EXAMPLES_KEPT:
            examples.append(problem)

    def extend(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.add(problem)

    def merge(self, other: "ProblemLog") -> None:
        """Add what another log has counted."""
        for kind, count in other.counts.items():
            self.counts[kind] += count
            examples = self.examples.setdefault(kind, [])
            examples += other.examples[kind][: EXAMPLES_KEPT - len(examples)]

    def state(self) -> dict[str, list[Any]]:
        """All of it, to be written down; `from_state` makes a log of it again."""
        return {kind: [n, [(p.where, p.detail) for p in self.examples[kind]]] for kind, n in self.counts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, list[Any]]) -> Self:
        log = cls()
        for name, (count, examples) in state.items():
            log.counts[Kind(name)] = count
            log.examples[Kind(name)] = [Problem(Kind(name), where, detail) for where, detail in examples]
        return log

    def as_json(self) -> dict[str, dict[str, object]]:
        return {
            str(kind): {
                "count": self.counts[kind],
                "kept": kind.is_kept,
                "examples": [f"{p.where} ({p.detail})" if p.detail else p.where for p in self.examples[kind]],
            }
            for kind in Kind
            if self.counts[kind]
        }
