"""From audio files of any length to words with their times.

A file longer than a window is recognised in windows that overlap (`stitching`), read from disk as they are needed.
CTC's log-probabilities are stitched before they are decoded; what was searched with attention is stitched by word.
Every window is normalised by its own loudness, as every utterance was in training: a file of one window gives what
its utterance in a store would give, and in a long recording each half minute is heard at its own level.

Windows of all files go through the model in batches, in order, so that many short files are as fast as one long one.

Shapes: B windows, T frames, V outputs (the blank, then the tokens).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.corpora.problems import Unusable
from sottovoce.errors import InputError
from sottovoce.evaluation.decoder import Decoder, usual_decoder
from sottovoce.evaluation.prefetch import ahead
from sottovoce.evaluation.recognise import batch_seconds_on, emissions, placed, recognition_of, searched
from sottovoce.evaluation.sound import SUFFIXES, Samples, blocks, windows
from sottovoce.evaluation.stitching import (
    Piece,
    WordsHeard,
    attended_spans,
    best_path,
    path_spans,
    stitch,
    stitch_words,
)
from sottovoce.models import ctc
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.decoding import WORD_BOUNDARY, Hypothesis, decode_greedily
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.utterances import record_lines

WINDOW_SECONDS = 30.0
OVERLAP_SECONDS = 4.0
LONGEST_WINDOW = 600.0  # an attention over more takes gigabytes


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word, and when in the recording it is heard, in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a file, and in how many of its windows an attention has stopped listening."""

    path: Path
    seconds: float
    words: tuple[TimedWord, ...]
    collapsed: int = 0

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def as_json(self) -> dict[str, Any]:
        words = [{"text": word.text, "start": word.start, "end": word.end} for word in self.words]
        found = {"path": str(self.path), "seconds": self.seconds, "text": self.text, "words": words}
        return found | ({"collapsed_windows": self.collapsed} if self.collapsed else {})


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be transcribed, and why."""

    path: Path
    reason: str

    def as_json(self) -> dict[str, str]:
        return {"path": str(self.path), "reason": self.reason}


def find_files(places: Sequence[Path]) -> list[Path]:
    """The files among `places`, and the audio files in the folders among them and below, sorted; none twice."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.exists():
            raise InputError(f"{place}: there is no such file or folder")
        if not place.is_dir():
            found[place] = None
            continue
        inside = sorted(path for path in place.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not inside:
            raise InputError(f"{place}: no audio file in this folder; expected some of {', '.join(sorted(SUFFIXES))}")
        found |= dict.fromkeys(inside)
    return list(found)


def transcribe(
    recogniser: Recogniser,
    paths: Sequence[Path],
    *,
    device: torch.device | str = "cpu",
    decode: Decoder | SearchOptions | None = None,
    window_seconds: float = WINDOW_SECONDS,
    batch_seconds: float | None = None,
) -> Iterator[Transcript | Failure]:
    """What is said in each of `paths`, in order; a file that cannot be read does not stop the others.

    By default decoding is greedy. By CTC, beam search decodes piece by piece; greedy decoding does not notice where the
    pieces meet.
    """
    if not 0 < window_seconds <= LONGEST_WINDOW:
        raise InputError(f"window={window_seconds:g} s: expected at most {LONGEST_WINDOW:g} s")
    device = torch.device(device)
    recogniser = placed(recogniser, device)
    decode = usual_decoder(recogniser.family) if decode is None else decode
    seconds = batch_seconds_on(device, decode) if batch_seconds is None else batch_seconds
    frame = recognition_of(recogniser).samples_per_frame(recogniser.settings)
    heard = _listen(paths, window_seconds=window_seconds, frame_samples=frame)
    batches = ahead(_batched(heard, max_samples=int(seconds * SAMPLE_RATE)))
    recognised = _recognised(recogniser, batches, decode, device=device)
    for number, results in groupby(recognised, key=lambda result: result.file):
        try:
            yield _transcript(paths[number], results, recogniser, decode, frame_samples=frame)
        except Unusable as reason:
            detail = f" ({reason.detail})" if reason.detail else ""
            yield Failure(paths[number], f"{reason.kind}{detail}")


@dataclass(frozen=True, slots=True)
class _Window:
    """Samples of one file from its frame `start` on, or why there are none. What was `heard` comes from the model."""

    file: int
    start: int
    samples: Samples
    trouble: Unusable | None = None
    heard: torch.Tensor | Hypothesis | None = None


def _listen(paths: Sequence[Path], *, window_seconds: float, frame_samples: int) -> Iterator[_Window]:
    """All windows of all files. A file that turns out to be damaged ends with a window that says so.

    A window begins where a frame of the model does, so that the frames of neighbours are the same moments.
    """
    frame_seconds = frame_samples / SAMPLE_RATE
    overlap_seconds = min(OVERLAP_SECONDS, window_seconds / 4)
    window_frames, overlap_frames = (round(s / frame_seconds) for s in (window_seconds, overlap_seconds))
    if overlap_frames < 4:
        raise InputError(f"window={window_seconds:g} s: expected at least {16 * frame_seconds:g} s")
    sizes = {
        "window_samples": window_frames * frame_samples,
        "step_samples": (window_frames - overlap_frames) * frame_samples,
    }
    for number, path in enumerate(paths):
        try:
            for start, samples in windows(blocks(path), **sizes):
                yield _Window(number, start // frame_samples, samples)
        except Unusable as trouble:
            yield _Window(number, 0, np.zeros(0, dtype=np.int16), trouble)


def _batched(heard: Iterable[_Window], *, max_samples: int) -> Iterator[list[_Window]]:
    """Consecutive windows, together at most `max_samples` with their padding."""
    batch: list[_Window] = []
    longest = 0
    for window in heard:
        grown = max(longest, len(window.samples))
        if batch and grown * (len(batch) + 1) > max_samples:
            yield batch
            batch, grown = [], len(window.samples)
        batch.append(window)
        longest = grown
    if batch:
        yield batch


def _recognised(
    recogniser: Recogniser, batches: Iterable[list[_Window]], decode: Decoder | SearchOptions, *, device: torch.device
) -> Iterator[_Window]:
    """The same windows with what was heard, on the host: their log-probabilities or, of a search, their texts."""
    for batch in batches:
        sound = [window for window in batch if window.trouble is None]
        heard: Iterator[torch.Tensor | Hypothesis] = iter(())
        if sound:
            recordings = record_lines([window.samples for window in sound], device=device)
            with torch.no_grad():
                if isinstance(decode, SearchOptions):
                    heard = iter(searched(recogniser, recordings, decode))
                else:
                    log_probs_BTV, lengths_B = emissions(recogniser, recordings)
                    lines = zip(log_probs_BTV.cpu(), lengths_B.tolist(), strict=True)
                    heard = (emission[:length] for emission, length in lines)
        for window in batch:
            if window.trouble is not None:
                yield window
            else:
                yield _Window(window.file, window.start, window.samples, heard=next(heard))


def _transcript(
    path: Path,
    results: Iterable[_Window],
    recogniser: Recogniser,
    decode: Decoder | SearchOptions,
    *,
    frame_samples: int,
) -> Transcript:
    """The transcript of one file; raises `Unusable` when its windows end with trouble."""
    samples = collapsed = 0
    pieces = recogniser.tokens.pieces()

    def sound() -> Iterator[_Window]:
        nonlocal samples
        for window in results:
            if window.trouble is not None:
                raise window.trouble
            samples = window.start * frame_samples + len(window.samples)
            yield window

    def pieces_heard() -> Iterator[Piece]:
        for window in sound():
            assert isinstance(window.heard, torch.Tensor)
            yield Piece(window.start, window.heard)

    def words_heard() -> Iterator[WordsHeard]:
        nonlocal collapsed
        for window in sound():
            assert isinstance(window.heard, Hypothesis)
            collapsed += window.heard.collapsed
            frames = [window.start + frame for frame in window.heard.frames]
            end = window.start + math.ceil(len(window.samples) / frame_samples)
            yield WordsHeard(window.start, end, ctc.join_words(attended_spans(window.heard.tokens, frames), pieces))

    if isinstance(decode, SearchOptions):
        found = list(stitch_words(words_heard()))
    else:
        found = _ctc_words(stitch(pieces_heard(), silent=_silent(pieces)), pieces, decode)
    seconds = frame_samples / SAMPLE_RATE
    timed = tuple(_timed(word, frame_seconds=seconds) for word in found)
    return Transcript(path, samples / SAMPLE_RATE, timed, collapsed)


def _silent(pieces: Sequence[str]) -> list[int]:
    """The blank, and the word boundary where it is a token of its own."""
    return [ctc.BLANK, *(i for i, piece in enumerate(pieces) if piece == WORD_BOUNDARY)]


def _ctc_words(stitched: Iterable[Piece], pieces: Sequence[str], decode: Decoder) -> list[ctc.AlignedWord]:
    """The words of pieces that follow one another."""
    if decode is decode_greedily:
        # Only the best tokens of each frame are kept: some megabytes for ten hours.
        path_T = np.concatenate([best_path(piece.log_probs_TV) for piece in stitched])
        return ctc.join_words(path_spans(path_T), pieces)
    return [word for piece in stitched for word in _decoded_words(piece, pieces, decode)]


def _decoded_words(piece: Piece, pieces: Sequence[str], decode: Decoder) -> Iterator[ctc.AlignedWord]:
    """The words that `decode` finds in a piece. Its text is aligned anew: a beam search reports where tokens begin."""
    (hypothesis,) = decode(piece.log_probs_TV[None], torch.tensor([len(piece.log_probs_TV)]))
    for word in ctc.join_words(ctc.align_tokens(piece.log_probs_TV, hypothesis.tokens), pieces):
        yield ctc.AlignedWord(word.text, word.start + piece.start, word.end + piece.start)


def _timed(word: ctc.AlignedWord, *, frame_seconds: float) -> TimedWord:
    # To the millisecond: 3 · 0.03 is not 0.09 in binary.
    return TimedWord(word.text, *(round(frame * frame_seconds, 3) for frame in (word.start, word.end)))
