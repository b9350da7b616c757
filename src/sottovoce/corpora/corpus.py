"""What every corpus module hands on: speakers with their clips, and how to turn one speaker into samples.

corpus module ──► Corpus(speakers, render) ──► store.pack
                   listing, cheap               render(speaker) runs in worker processes
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sottovoce.corpora.problems import Problem, ProblemLog

SAMPLE_RATE = 16_000
Metadata = Mapping[str, str]


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
    """A FLAC file below the corpus's folder. `ends`, a digest of its first and last 4 KiB, tells whether it changed:
    the first hold the MD5 of all its samples."""

    path: str
    bytes: int
    samples: int
    ends: str


@dataclass(frozen=True, slots=True)
class Span:
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
    samples: NDArray[np.int16] | Span
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
    a speaker's clips at once.
    """

    name: str
    language: str
    speakers: Sequence[S]
    render: Callable[[S], RenderedSpeaker]
    problems: ProblemLog
    root: str | None = None
    clips_per_task: int | None = None
