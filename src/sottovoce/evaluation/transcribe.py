"""From audio files of any length to words with their times.

A file longer than a window is recognised in windows that overlap (`stitching`), read from disk as they are needed.
Every window is normalised by its own loudness, as every utterance was in training: a file of one window gives what
its utterance in a store would give, and in a long recording each half minute is heard at its own level.

Windows of all files go through the model in batches, in order, so that many short files are as fast as one long one.

Shapes: B windows, T frames, V outputs (the blank, then the tokens).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.corpora.recordings import Unusable
from sottovoce.errors import InputError
from sottovoce.evaluation.decoder import Decoder
from sottovoce.evaluation.prefetch import ahead
from sottovoce.evaluation.recognise import batch_seconds_on, emissions, placed
from sottovoce.evaluation.sound import SUFFIXES, Samples, blocks, windows
from sottovoce.evaluation.stitching import Piece, best_path, path_spans, stitch
from sottovoce.models import ctc
from sottovoce.models.decoding import WORD_BOUNDARY, greedy
from sottovoce.models.saved import Recogniser
from sottovoce.models.utterances import record_lines

WINDOW_SECONDS = 30.0
OVERLAP_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word, and when in the recording it is heard, in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a file."""

    path: Path
    seconds: float
    words: tuple[TimedWord, ...]

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def as_json(self) -> dict[str, Any]:
        words = [{"text": word.text, "start": word.start, "end": word.end} for word in self.words]
        return {"path": str(self.path), "seconds": self.seconds, "text": self.text, "words": words}


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
    decode: Decoder = greedy,
    window_seconds: float = WINDOW_SECONDS,
    batch_seconds: float | None = None,
) -> Iterator[Transcript | Failure]:
    """What is said in each of `paths`, in order; a file that cannot be read does not stop the others.

    Beam search decodes piece by piece; greedy decoding does not notice where the pieces meet.
    """
    device = torch.device(device)
    recogniser = placed(recogniser, device)
    seconds = batch_seconds_on(device) if batch_seconds is None else batch_seconds
    frame = _frame_samples(recogniser)
    heard = _listen(paths, window_seconds=window_seconds, frame_samples=frame)
    emitted = _emitted(recogniser, ahead(_batched(heard, max_samples=int(seconds * SAMPLE_RATE))), device=device)
    for number, results in groupby(emitted, key=lambda result: result.file):
        try:
            yield _transcript(paths[number], results, recogniser, decode, frame_samples=frame)
        except Unusable as reason:
            detail = f" ({reason.detail})" if reason.detail else ""
            yield Failure(paths[number], f"{reason.kind}{detail}")


@dataclass(frozen=True, slots=True)
class _Window:
    """Samples of one file from its frame `start` on, or why there are none. `emission` comes from the model."""

    file: int
    start: int
    samples: Samples
    trouble: Unusable | None = None
    emission: torch.Tensor | None = None


def _frame_samples(recogniser: Recogniser) -> int:
    """How many samples a frame of the model stands for."""
    if recogniser.family.recognition is None:
        raise InputError(f"models of family={recogniser.family.name} do not write down what they hear")
    return recogniser.family.recognition.samples_per_frame(recogniser.settings)


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


def _emitted(recogniser: Recogniser, batches: Iterable[list[_Window]], *, device: torch.device) -> Iterator[_Window]:
    """The same windows with their log-probabilities, on the host."""
    for batch in batches:
        sound = [window for window in batch if window.trouble is None]
        emitted: Iterator[torch.Tensor] = iter(())
        if sound:
            with torch.no_grad():
                log_probs_BTV, lengths_B = emissions(
                    recogniser, record_lines([window.samples for window in sound], device=device)
                )
            log_probs_BTV = log_probs_BTV.cpu()
            emitted = (emission[:length] for emission, length in zip(log_probs_BTV, lengths_B.tolist(), strict=True))
        for window in batch:
            if window.trouble is not None:
                yield window
            else:
                yield _Window(window.file, window.start, window.samples, emission=next(emitted))


def _transcript(
    path: Path, results: Iterable[_Window], recogniser: Recogniser, decode: Decoder, *, frame_samples: int
) -> Transcript:
    """The transcript of one file; raises `Unusable` when its windows end with trouble."""
    samples = 0

    def pieces_heard() -> Iterator[Piece]:
        nonlocal samples
        for window in results:
            if window.trouble is not None:
                raise window.trouble
            assert window.emission is not None
            samples = window.start * frame_samples + len(window.samples)
            yield Piece(window.start, window.emission)

    pieces = recogniser.tokens.pieces()
    silent = [ctc.BLANK, *(i for i, piece in enumerate(pieces) if piece == WORD_BOUNDARY)]
    stitched = stitch(pieces_heard(), silent=silent)
    if decode is greedy:
        # Only the best tokens of each frame are kept: some megabytes for ten hours.
        path_T = np.concatenate([best_path(piece.log_probs_TV) for piece in stitched])
        found = ctc.words(path_spans(path_T), pieces)
    else:
        found = [word for piece in stitched for word in _decoded_words(piece, pieces, decode)]
    return Transcript(
        path, samples / SAMPLE_RATE, tuple(_timed(word, frame_seconds=frame_samples / SAMPLE_RATE) for word in found)
    )


def _decoded_words(piece: Piece, pieces: Sequence[str], decode: Decoder) -> Iterator[ctc.Word]:
    """The words that `decode` finds in a piece. Its text is aligned anew: a beam search reports where tokens begin."""
    (hypothesis,) = decode(piece.log_probs_TV[None], torch.tensor([len(piece.log_probs_TV)]))
    for word in ctc.words(ctc.align(piece.log_probs_TV, hypothesis.tokens), pieces):
        yield ctc.Word(word.text, word.start + piece.start, word.end + piece.start)


def _timed(word: ctc.Word, *, frame_seconds: float) -> TimedWord:
    # To the millisecond: 3 · 0.03 is not 0.09 in binary.
    return TimedWord(word.text, *(round(frame * frame_seconds, 3) for frame in (word.start, word.end)))
