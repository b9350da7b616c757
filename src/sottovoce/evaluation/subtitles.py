"""Subtitles (SubRip, .srt) from words with their times: two short lines at a time, shown long enough to read."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sottovoce.evaluation.transcribe import TimedWord

LINE_CHARACTERS = 42
LINES = 2
LONGEST_SUBTITLE_SECONDS = 6.0
SHORTEST_SUBTITLE_SECONDS = 1.0
# A silence of this length ends a subtitle: whoever speaks next begins a new one.
PAUSE_SECONDS = 0.8


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
