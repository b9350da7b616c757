"""What every corpus module returns: speakers with their clips, how to turn one speaker into samples, what was wrong.

corpus module ──► Corpus(speakers, render) ──► store.pack_corpus
                   listing, cheap               render(speaker) runs in worker processes

An unusable row, clip or speaker is counted by its `ProblemKind`, with its first examples, and never lost silently.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.data.text.spelling import Spelling

SAMPLE_RATE = 16_000
EXAMPLES_KEPT = 3
Metadata = Mapping[str, str]


class ProblemKind(StrEnum):
    """Why a row, a recording or a speaker was left out; or, if it `is_kept`, what was changed.

    A mere conversion is reported, but no reason for a strict run to stop.
    """

    is_kept: bool
    is_conversion: bool

    def __new__(cls, text: str, is_kept: bool = False, is_conversion: bool = False) -> Self:
        kind = str.__new__(cls, text)
        kind._value_, kind.is_kept, kind.is_conversion = text, is_kept, is_conversion
        return kind

    EMPTY_ROW = "empty or incomplete row"
    MALFORMED_ROW = "row that cannot be parsed"
    DUPLICATE_ROW = "duplicated row"
    PATH_ESCAPES = "path leaves the corpus folder"
    MISSING_AUDIO = "text with no audio file"
    MISSING_TEXT = "audio with no text"
    EMPTY_TEXT = "text that normalises to nothing"
    FOREIGN_TEXT = "text with characters outside the language's alphabet"
    SHORT_TEXT = "text of fewer than 3 characters"
    UNREADABLE_AUDIO = "audio that cannot be decoded"
    TRUNCATED_AUDIO = "audio shorter than its header says"
    EMPTY_AUDIO = "zero-length audio"
    NON_FINITE_AUDIO = "audio with NaN or infinite samples"
    NO_VOICE = "chapter in which no voice was found"
    NOT_AS_STORED = "audio that would have to be converted, which a store that points cannot"
    EMPTY_SPEAKER = "speaker with no usable utterance"
    SPLIT_OVERLAP = "speaker in more than one split", True
    UNLABELLED = "audio with no text, taken as speech without text", True
    NO_VOICE_ACTIVITY = "chapter with no voice activity beside it, cut evenly", True
    BEYOND_THE_END = "voice activity beyond the end of its audio, shortened", True
    SEGMENT_BEYOND = "segment beyond the end of its audio, shortened", True
    NO_TIME = "no place in time, put last", True
    MIXED_DOWN = "several channels, mixed down", True, True
    LOW_RESOLUTION = "fewer than 16 bits per sample", True, True
    RESAMPLED = "other sample rate, resampled", True, True
    UNWRITTEN = "text with characters that no token writes, left out of it", True, True
    SPELLED_OTHERWISE = "text that our own rules spell otherwise", True, True
    LEFT_OUT_BY_OURS = "text that our own rules leave out", True, True


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that was wrong: `where` names the row or file, `detail` says what was found there."""

    kind: ProblemKind
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.example}"

    @property
    def example(self) -> str:
        return f"{self.where} ({self.detail})" if self.detail else self.where


class Unusable(Exception):
    """A recording that must be left out, and why."""

    def __init__(self, kind: ProblemKind, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


@dataclass
class ProblemLog:
    """Counts problems and keeps the first examples of each kind; when `strict`, the first real one stops the work."""

    strict: bool = False
    counts: Counter[ProblemKind] = field(default_factory=Counter)
    examples: dict[ProblemKind, list[Problem]] = field(default_factory=dict)

    def add(self, kind: ProblemKind, where: object, detail: str = "") -> None:
        self.extend([Problem(kind, str(where), detail)])

    def extend(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            if self.strict and not problem.kind.is_conversion:
                raise InputError(f"{problem} [stopped because of --strict]")
            self.counts[problem.kind] += 1
            examples = self.examples.setdefault(problem.kind, [])
            if len(examples) < EXAMPLES_KEPT:
                examples.append(problem)

    def merge(self, other: "ProblemLog") -> None:
        """Add what another log has counted."""
        for kind, count in other.counts.items():
            self.counts[kind] += count
            examples = self.examples.setdefault(kind, [])
            examples += other.examples[kind][: EXAMPLES_KEPT - len(examples)]

    def state(self) -> dict[str, list[Any]]:
        """All of it as JSON, from which `from_state` makes the log again."""
        return {kind: [n, [(p.where, p.detail) for p in self.examples[kind]]] for kind, n in self.counts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, list[Any]]) -> Self:
        log = cls()
        for name, (count, examples) in state.items():
            kind = ProblemKind(name)
            log.counts[kind] = count
            log.examples[kind] = [Problem(kind, where, detail) for where, detail in examples]
        return log

    def as_json(self) -> dict[str, dict[str, object]]:
        return {
            str(kind): {"count": n, "kept": kind.is_kept, "examples": [one.example for one in self.examples[kind]]}
            for kind in ProblemKind
            if (n := self.counts[kind])
        }


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording as the corpus lists it. `text` is None where the corpus has no transcript column at all.

    `seconds`: from where to where it lies in its file; None for all of it.
    """

    id: str
    path: str
    text: str | None
    metadata: Metadata = field(default_factory=dict)
    seconds: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Speaker:
    """One user of a corpus. `metadata` holds what is known of the person: gender, age, accent.

    `in_time`: the clips come in the order in which they were spoken.
    """

    name: str
    split: str
    clips: Sequence[Clip]
    metadata: Metadata = field(default_factory=dict)
    in_time: bool = False


@dataclass(frozen=True, slots=True)
class AudioFile:
    """A FLAC file below the corpus's folder.

    `ends`, a digest of its first and last 4 KiB, shows whether it changed: the first hold the MD5 of all its samples.
    """

    path: str
    bytes: int
    samples: int
    ends: str


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Samples of an audio file, from `start` on."""

    file: AudioFile
    start: int
    length: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class RenderedUtterance:
    """One utterance, ready to be stored. `text` is normalised, `raw_text` as the corpus wrote it; None: unlabelled."""

    id: str
    samples: NDArray[np.int16] | FileSpan
    text: str | None
    raw_text: str | None
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedSpeaker:
    """All usable utterances of one speaker at `SAMPLE_RATE`, and what was wrong with the others.

    `in_time`: they come in the order in which they were spoken.
    """

    name: str
    split: str
    utterances: Sequence[RenderedUtterance]
    metadata: Metadata = field(default_factory=dict)
    problems: Sequence[Problem] = ()
    in_time: bool = False


S = TypeVar("S")


@dataclass(frozen=True)
class Corpus(Generic[S]):
    """A corpus that has been listed but not yet read.

    `render` must be picklable and a function of its argument alone: it runs in worker processes, in any order. With
    `root` it gives spans of files below that folder instead of samples. `clips_per_task`: no worker renders more of
    a speaker's clips at once. `spelling`: by whose rules its texts are spelled.
    """

    name: str
    language: str
    speakers: Sequence[S]
    render: Callable[[S], RenderedSpeaker]
    problems: ProblemLog = field(default_factory=ProblemLog)
    root: str | None = None
    clips_per_task: int | None = None
    spelling: Spelling = Spelling.OURS
