"""Subtitles that a player takes and a person can read."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sottovoce.evaluation.transcripts import (
    LINE_CHARACTERS,
    LINES,
    LONGEST_SUBTITLE_SECONDS,
    TimedWord,
    format_srt,
    group_subtitles,
)


@st.composite
def speeches(draw: st.DrawFn) -> list[TimedWord]:
    words, now = [], 0.0
    for text in draw(st.lists(st.text("abc'-", min_size=1, max_size=12), max_size=40)):
        start = now + draw(st.sampled_from([0.0, 0.06, 0.3, 2.0]))
        now = start + draw(st.sampled_from([0.03, 0.3, 0.9]))
        words.append(TimedWord(text, round(start, 3), round(now, 3)))
    return words


@given(speeches())
def test_subtitles_hold_every_word_and_fit_the_screen(words: list[TimedWord]) -> None:
    shown = group_subtitles(words)
    assert " ".join(" ".join(subtitle.lines) for subtitle in shown) == " ".join(word.text for word in words)
    for subtitle in shown:
        assert 1 <= len(subtitle.lines) <= LINES
        assert all(len(line) <= LINE_CHARACTERS for line in subtitle.lines)
        assert 0 < subtitle.end - subtitle.start <= LONGEST_SUBTITLE_SECONDS + 1e-6
    for before, after in pairwise(shown):
        assert before.end <= after.start


def test_a_pause_begins_a_new_subtitle_and_a_short_word_stays_a_second() -> None:
    spoken = [TimedWord("yes", 1.2, 1.29), TimedWord("but", 3661.5, 3661.8), TimedWord("no", 3661.9, 3662.4)]
    assert format_srt(spoken) == ("1\n00:00:01,200 --> 00:00:02,200\nyes\n\n2\n01:01:01,500 --> 01:01:02,500\nbut no\n")


def test_a_word_longer_than_a_line_is_not_broken() -> None:
    (subtitle,) = group_subtitles([TimedWord("a" * 60, 0.0, 0.5)])
    assert subtitle.lines == ("a" * 60,)


@given(speeches())
def test_srt_has_the_shape_players_expect(words: list[TimedWord]) -> None:
    content = format_srt(words)
    time = r"\d\d:\d\d:\d\d,\d\d\d"
    assert re.fullmatch(rf"((^|\n)\d+\n{time} --> {time}\n(.+\n){{1,2}})*", content)


def test_no_words_no_subtitles() -> None:
    assert format_srt([]) == ""
