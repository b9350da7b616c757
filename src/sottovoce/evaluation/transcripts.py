"""Transcripts of audio files as text, JSON or subtitles (SubRip, .srt).

Subtitles are two short lines at a time, shown long enough to read.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError

LINE_CHARACTERS = 42
LINES = 2
LONGEST_SUBTITLE_SECONDS = 6.0
SHORTEST_SUBTITLE_SECONDS = 1.0
# A silence of this length ends a subtitle: whoever speaks next begins a new one.
PAUSE_SECONDS = 0.8


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word, and when in the recording it is said, in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a file, and in how many of its windows the attention collapsed.

    Where the model does not say when a word was said, `untimed` says so; words then have places that only keep order.
    """

    path: Path
    seconds: float
    words: tuple[TimedWord, ...]
    collapsed: int = 0
    untimed: str | None = None

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def as_json(self) -> dict[str, Any]:
        words = [asdict(word) if self.untimed is None else {"text": word.text} for word in self.words]
        found = {"path": str(self.path), "seconds": self.seconds, "text": self.text, "words": words}
        found |= {} if self.untimed is None else {"untimed": self.untimed}
        return found | ({"collapsed_windows": self.collapsed} if self.collapsed else {})


@dataclass(frozen=True, slots=True)
class FailedFile:
    """A file that could not be transcribed, and why."""

    path: Path
    reason: str

    def as_json(self) -> dict[str, str]:
        return {"path": str(self.path), "reason": self.reason}


class TranscriptFormat(StrEnum):
    """What a transcript is written as."""

    text = "text"
    json = "json"
    srt = "srt"

    @property
    def suffix(self) -> str:
        return ".txt" if self is TranscriptFormat.text else f".{self.value}"


def format_transcript(transcript: Transcript, format: TranscriptFormat) -> str:
    """The content of a file in this format."""
    if format is TranscriptFormat.srt:
        return format_srt(transcript.words)
    if format is TranscriptFormat.json:
        return json.dumps(transcript.as_json(), indent=2, ensure_ascii=False) + "\n"
    return transcript.text + "\n"


def name_transcripts(files: Sequence[Path], out: Path, *, places: Sequence[Path], suffix: str) -> dict[Path, Path]:
    """Where each file's transcript goes: named after it, in the same subfolders as below the folder that was given."""
    if out.exists() and not out.is_dir():
        raise InputError(f"out={out}: it is a file, expected a folder")
    folders = [place for place in places if place.is_dir()]
    inside = {
        file: next((file.relative_to(f) for f in folders if f in file.parents), Path(file.name)) for file in files
    }
    counts = Counter(path.with_suffix(suffix) for path in inside.values())
    targets: dict[Path, Path] = {}
    for file, path in inside.items():
        name = path.with_suffix(suffix)
        if counts[name] > 1:  # talk.wav and talk.flac would both be talk.txt: they keep their endings
            name = path.with_name(path.name + suffix)
        if out / name in targets.values():
            raise InputError(f"{file}: another file's transcript is called {name} as well; give them one by one")
        targets[file] = out / name
    return targets


@dataclass(frozen=True, slots=True)
class Subtitle:
    """One subtitle and when it is shown, in seconds."""

    lines: tuple[str, ...]
    start: float
    end: float


def group_subtitles(words: Sequence[TimedWord]) -> list[Subtitle]:
    """Words grouped into subtitles that neither overlap nor reach into a long silence."""
    groups: list[list[TimedWord]] = []
    for word in words:
        if groups and _joins(groups[-1], word):
            groups[-1].append(word)
        else:
            groups.append([word])
    shown = [Subtitle(tuple(_lines(group)), group[0].start, group[-1].end) for group in groups]
    following = [*(subtitle.start for subtitle in shown), float("inf")][1:]
    # A single short word would flash by: it stays for a second, or until the next subtitle.
    return [
        replace(subtitle, end=max(subtitle.end, min(subtitle.start + SHORTEST_SUBTITLE_SECONDS, limit)))
        for subtitle, limit in zip(shown, following, strict=True)
    ]


def format_srt(words: Sequence[TimedWord]) -> str:
    """The subtitles of `words` as the content of an .srt file.

    >>> print(format_srt([TimedWord("ciao", 0.3, 0.9), TimedWord("bella", 0.96, 1.5)]), end="")
    1
    00:00:00,300 --> 00:00:01,500
    ciao bella
    """
    entries = [
        "\n".join([str(number), f"{_time(subtitle.start)} --> {_time(subtitle.end)}", *subtitle.lines]) + "\n"
        for number, subtitle in enumerate(group_subtitles(words), start=1)
    ]
    return "\n".join(entries)


def _joins(group: Sequence[TimedWord], word: TimedWord) -> bool:
    return (
        word.start - group[-1].end < PAUSE_SECONDS
        and word.end - group[0].start <= LONGEST_SUBTITLE_SECONDS
        and len(_lines([*group, word])) <= LINES
    )


def _lines(group: Sequence[TimedWord]) -> list[str]:
    # A word longer than a line has a line for itself; hyphens are part of a word's spelling.
    text = " ".join(word.text for word in group)
    return textwrap.wrap(text, LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def _time(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02},{milliseconds % 1000:03}"
