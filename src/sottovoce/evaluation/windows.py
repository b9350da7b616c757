"""Long recordings in overlapping windows: read in blocks, cut into windows, and the results stitched together.

Any file that soundfile reads comes out as 16 kHz mono; a recording of ten hours is never in memory whole. 16-bit mono
at 16 kHz is unchanged; everything else is as `sottovoce prepare` would store it.

    window 1  ├──────────────────────────┤
    window 2                      ├──────────────────────────┤
    stitched  ├─────────────────────┼───────────────────────── …     cut in a pause, if there is one near the middle

Shapes: T frames of a window or of a stitched part, V outputs (the blank, then the tokens), O frames that two windows
share.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import cast

import numpy as np
import soundfile
import soxr
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.data.corpora.corpus import SAMPLE_RATE, ProblemKind, Unusable
from sottovoce.data.corpora.listing import AUDIO_SUFFIXES
from sottovoce.data.corpora.rendering import check_header, check_regular, read_blocks
from sottovoce.data.corpora.truncation import is_truncated
from sottovoce.models.ctc import BLANK, AlignedWord, TokenSpan

# What a folder is searched for; a file that is named itself may be called anything.
SUFFIXES = frozenset({*AUDIO_SUFFIXES, ".oga", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64"})
BLOCK_SECONDS = 10

Samples = NDArray[np.int16]


def read_audio_blocks(path: Path) -> Iterator[Samples]:
    """The samples of `path` in blocks of some seconds; raises `Unusable` where it is damaged, be it at its end."""
    _check_file(path)
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            check_header(file)
            found = 0
            for block in _decoded(file):
                found += len(block)
                yield block
    except soundfile.LibsndfileError as error:
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, str(error.error_string).strip(" .")) from None
    if not found:
        raise Unusable(ProblemKind.EMPTY_AUDIO, "nothing left after resampling")


def cut_windows(sound: Iterator[Samples], *, window_samples: int, step_samples: int) -> Iterator[tuple[int, Samples]]:
    """Windows of `sound` that begin every `step_samples`, each with the number of its first sample.

    All but the last are full, and the last reaches further than the one before it.

    >>> [(start, len(w)) for start, w in cut_windows(iter([np.zeros(7, np.int16)]), window_samples=4, step_samples=3)]
    [(0, 4), (3, 4)]
    """
    held, start = np.zeros(0, dtype=np.int16), 0
    for block in sound:
        held = np.concatenate([held, block])
        while len(held) > window_samples:
            yield start, held[:window_samples]
            held, start = held[step_samples:], start + step_samples
    if len(held):
        yield start, held


def _decoded(file: soundfile.SoundFile) -> Iterator[Samples]:
    samples = BLOCK_SECONDS * file.samplerate
    if (file.samplerate, file.channels, file.subtype) == (SAMPLE_RATE, 1, "PCM_16"):
        yield from read_blocks(file, np.int16, samples=samples)
        return
    resampler = None
    if file.samplerate != SAMPLE_RATE:
        resampler = soxr.ResampleStream(file.samplerate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
    for sound in read_blocks(file, np.float32, samples=samples):
        yield _to_int16(_mono(sound), resampler)
    if resampler is not None:
        yield _to_int16(np.zeros(0, dtype=np.float32), resampler, last=True)


def _mono(sound: NDArray[np.float32]) -> NDArray[np.float32]:
    if sound.ndim > 1:
        sound = sound.mean(axis=1)
    if not np.isfinite(sound).all():
        raise Unusable(ProblemKind.NON_FINITE_AUDIO)
    return sound


def _to_int16(sound: NDArray[np.float32], resampler: soxr.ResampleStream | None, *, last: bool = False) -> Samples:
    if resampler is not None:
        sound = resampler.resample_chunk(sound, last=last)
    return np.clip(np.rint(sound * 32_768), -32_768, 32_767).astype(np.int16)


def _check_file(path: Path) -> None:
    try:
        check_regular(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # Mapped, since reading hours of sound only to look at its container would fill the memory.
            if mapped[:4] != b"fLaC" and is_truncated(cast(bytes, mapped)):
                raise Unusable(ProblemKind.TRUNCATED_AUDIO)
    except OSError as error:
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, error.strerror or str(error)) from None


@dataclass(frozen=True, slots=True)
class Emissions:
    """Log-probabilities of some frames of a recording, the first of which is its frame `start`."""

    start: int
    log_probs_TV: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.log_probs_TV)


def stitch_emissions(windows: Iterable[Emissions], *, silent: Sequence[int]) -> Iterator[Emissions]:
    """Pieces that follow one another without gap or overlap, from windows that overlap their neighbours.

    A window knows least near its ends, where it lacks what comes before or after: so each overlap is cut in its
    middle half, at the longest pause that both windows have there (frames of nothing but `silent` tokens: the blank
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
            yield Emissions(start, last.log_probs_TV[start - last.start : cut - last.start])
            start = cut
        last = window
    if last is not None:
        yield Emissions(start, last.log_probs_TV[start - last.start :])


@dataclass(frozen=True, slots=True)
class WindowWords:
    """The words of a window, in frames of the recording, as the window's own `start` and `end` are."""

    start: int
    end: int
    words: Sequence[AlignedWord]

    def said_in(self, start: int, end: int) -> Iterator[AlignedWord]:
        """The words whose middle is in [start, end)."""
        return (word for word in self.words if 2 * start <= word.start + word.end < 2 * end)


def stitch_words(windows: Iterable[WindowWords]) -> Iterator[AlignedWord]:
    """The words of a recording from windows searched one by one: overlaps are cut as in `stitch_emissions`."""
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


def stitch_untimed_words(windows: Iterable[WindowWords]) -> Iterator[AlignedWord]:
    """The words of a recording where nobody knows when they were said: their places are guesses.

    Neighbours are joined in the middle of the longest run of words that the end of one and the beginning of the next
    have in common. Runs are looked for in as much again as the windows share; without one, the guesses decide.
    """
    kept: list[AlignedWord] = []
    last: WindowWords | None = None
    for window in windows:
        found = list(window.words)
        if last is not None:
            shared = last.end - window.start
            tail = next((i for i, word in enumerate(kept) if word.end > window.start - shared), len(kept))
            head = [word for word in found if word.start < last.end + shared]
            before, after = ([_bare(word.text) for word in words] for words in (kept[tail:], head))
            run = SequenceMatcher(None, before, after, autojunk=False).find_longest_match()
            if run.size:
                middle = run.size // 2
                keep, skip = tail + run.a + middle, run.b + middle
            else:
                cut = window.start + shared // 2
                keep = next((i for i, word in enumerate(kept) if word.start + word.end >= 2 * cut), len(kept))
                skip = next((i for i, word in enumerate(found) if word.start + word.end >= 2 * cut), len(found))
            yield from kept[:keep]
            found = found[skip:]
        kept, last = found, window
    yield from kept


def _bare(word: str) -> str:
    """Windows differ in capitals and punctuation."""
    return "".join(letter for letter in word.casefold() if letter.isalnum())


def _speech(window: WindowWords, start: int, end: int) -> NDArray[np.bool_]:
    """Which of the frames [start, end) are inside a word."""
    spoken_O = np.zeros(end - start, dtype=np.bool_)
    for word in window.words:
        spoken_O[max(word.start - start, 0) : max(word.end - start, 0)] = True
    return spoken_O


def align_attended_tokens(tokens: Sequence[int], frames: Sequence[int], *, until_next: bool = False) -> list[TokenSpan]:
    """Tokens, each attended to at one of `frames`: a frame long, less where the next follows, never before the last.

    `until_next`: frames are where tokens begin, and each lasts until the next one does.

    >>> align_attended_tokens([5, 6, 7], [2, 1, 4])
    [TokenSpan(token=5, start=2, end=2), TokenSpan(token=6, start=2, end=3), TokenSpan(token=7, start=4, end=5)]
    >>> align_attended_tokens([5, 6, 7], [2, 3, 8], until_next=True)
    [TokenSpan(token=5, start=2, end=3), TokenSpan(token=6, start=3, end=8), TokenSpan(token=7, start=8, end=9)]
    """
    starts = np.maximum.accumulate(np.asarray(frames, dtype=np.int64)).tolist()
    following = [*starts[1:], starts[-1] + 1] if starts else []
    ends = following if until_next else [min(start + 1, end) for start, end in zip(starts, following, strict=True)]
    return [TokenSpan(token, start, end) for token, start, end in zip(tokens, starts, ends, strict=True)]


def find_best_path(log_probs_TV: Tensor) -> NDArray[np.int64]:
    """The best token of every frame, or the blank."""
    return np.asarray(log_probs_TV.argmax(dim=-1).cpu().numpy(), dtype=np.int64)


def find_token_spans(path_T: NDArray[np.int64]) -> list[TokenSpan]:
    """The tokens of a path and the frames of each.

    The path of best tokens is more probable than any other, so also than any other that spells its text: these spans
    are the Viterbi alignment (`ctc.align`) of the greedy text, at no cost.

    >>> find_token_spans(np.array([0, 2, 2, 0, 1]))
    [TokenSpan(token=2, start=1, end=3), TokenSpan(token=1, start=4, end=5)]
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
    return _pause(np.isin(find_best_path(before_OV), wanted) & np.isin(find_best_path(after_OV), wanted))


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
