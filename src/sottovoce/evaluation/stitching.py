"""Long recordings in overlapping windows: where one window ends and the next takes over, and which frames spell what.

Shapes: T frames of a window or of a piece, V outputs (the blank, then the tokens), O frames that two windows share.

    window 1  ├──────────────────────────┤
    window 2                      ├──────────────────────────┤
    pieces    ├─────────────────────┼───────────────────────── …     cut in a pause, if there is one near the middle
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.models.ctc import BLANK, AlignedWord, TokenSpan


@dataclass(frozen=True, slots=True)
class Piece:
    """Log-probabilities of some frames of a recording, the first of which is its frame `start`."""

    start: int
    log_probs_TV: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.log_probs_TV)


def stitch(windows: Iterable[Piece], *, silent: Sequence[int]) -> Iterator[Piece]:
    """Pieces that follow one another without gap or overlap, from windows that overlap their neighbours.

    A window knows least near its ends, where it lacks what comes before or after: so each overlap is cut in its
    middle half, at the longest pause that both windows hear there (frames of nothing but `silent` tokens: the blank
    and the word boundary), or else in the middle. A word is then rarely cut in two, however the windows differ.
    """
    start, last = 0, None
    for window in windows:
        if last is not None:
            shared = last.end - window.start
            assert 0 <= shared <= len(window.log_probs_TV), (last.start, last.end, window.start, window.end)
            cut = window.start + _cut(
                last.log_probs_TV[window.start - last.start :], window.log_probs_TV[:shared], silent
            )
            yield Piece(start, last.log_probs_TV[start - last.start : cut - last.start])
            start = cut
        last = window
    if last is not None:
        yield Piece(start, last.log_probs_TV[start - last.start :])


@dataclass(frozen=True, slots=True)
class WordsHeard:
    """The words of a window, in frames of the recording, as the window's own `start` and `end` are."""

    start: int
    end: int
    words: Sequence[AlignedWord]

    def said_in(self, start: int, end: int) -> Iterator[AlignedWord]:
        """The words whose middle is in [start, end)."""
        return (word for word in self.words if 2 * start <= word.start + word.end < 2 * end)


def stitch_words(windows: Iterable[WordsHeard]) -> Iterator[AlignedWord]:
    """The words of a recording from windows that were searched one by one: each overlap is cut as in `stitch`."""
    start, last = 0, None
    for window in windows:
        if last is not None:
            assert last.start <= window.start <= last.end, (last.start, last.end, window.start, window.end)
            cut = window.start + _pause(
                ~(_speech(last, window.start, last.end) | _speech(window, window.start, last.end))
            )
            yield from last.said_in(start, cut)
            start = cut
        last = window
    if last is not None:
        yield from last.said_in(start, last.end + 1)


def _speech(heard: WordsHeard, start: int, end: int) -> NDArray[np.bool_]:
    """Which of the frames [start, end) are inside a word."""
    spoken_O = np.zeros(end - start, dtype=np.bool_)
    for word in heard.words:
        spoken_O[max(word.start - start, 0) : max(word.end - start, 0)] = True
    return spoken_O


def attended_spans(tokens: Sequence[int], frames: Sequence[int]) -> list[TokenSpan]:
    """Tokens that were each heard at one of `frames`: a frame long, less where the next follows, never before the last.

    >>> attended_spans([5, 6, 7], [2, 1, 4])
    [Span(token=5, start=2, end=2), Span(token=6, start=2, end=3), Span(token=7, start=4, end=5)]
    """
    starts = np.maximum.accumulate(np.asarray(frames, dtype=np.int64)).tolist()
    ends = [min(start + 1, following) for start, following in zip(starts, [*starts[1:], np.inf], strict=False)]
    return [TokenSpan(token, start, int(end)) for token, start, end in zip(tokens, starts, ends, strict=True)]


def best_path(log_probs_TV: Tensor) -> NDArray[np.int64]:
    """The best token of every frame, or the blank."""
    return np.asarray(log_probs_TV.argmax(dim=-1).cpu().numpy(), dtype=np.int64)


def path_spans(path_T: NDArray[np.int64]) -> list[TokenSpan]:
    """The tokens of a path and the frames of each.

    The path of best tokens is more probable than any other, so also than any other that spells its text: these spans
    are the Viterbi alignment (`ctc.align`) of the greedy text, at no cost.

    >>> path_spans(np.array([0, 2, 2, 0, 1]))
    [Span(token=2, start=1, end=3), Span(token=1, start=4, end=5)]
    """
    starts, ends = _runs(path_T)
    return [
        TokenSpan(token, start, end)
        for token, start, end in zip(path_T[starts].tolist(), starts.tolist(), ends.tolist(), strict=True)
        if token != BLANK
    ]


def _cut(before_OV: Tensor, after_OV: Tensor, silent: Sequence[int]) -> int:
    """The frame of an overlap at which to go from the window `before` to the window `after`."""
    wanted = torch.as_tensor(silent)
    return _pause(np.isin(best_path(before_OV), wanted) & np.isin(best_path(after_OV), wanted))


def _pause(is_pause_O: NDArray[np.bool_]) -> int:
    """The middle of the longest pause in the middle half of an overlap, or else of the overlap."""
    shared = len(is_pause_O)
    first, stop = shared // 4, shared - shared // 4
    starts, ends = _runs(is_pause_O[first:stop].astype(np.int64))
    lengths = np.where(is_pause_O[first:stop][starts], ends - starts, 0) if len(starts) else starts
    if not lengths.any():
        return shared // 2
    longest = int(lengths.argmax())
    return first + int(starts[longest] + ends[longest]) // 2


def _runs(values_T: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs of equal values start and end."""
    if not len(values_T):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    changes = np.flatnonzero(np.diff(values_T)) + 1
    return np.concatenate([[0], changes]), np.concatenate([changes, [len(values_T)]])
