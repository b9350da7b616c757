"""From audio files of any length to words with their times.

A file longer than a window is recognised in overlapping windows (`windows`), read from disk as they are needed.
CTC's log-probabilities are stitched before they are decoded; results of a search with attention are stitched by word,
where words have no times by the words that neighbours have in common.
Every window is normalised by its own loudness, as every utterance was in training: a file of one window gives what
its utterance in a store would give.

Windows of all files go through the model in batches of like lengths: they are read some minutes ahead and sorted, and
the results are given back in order. Many short files are then as fast as one long one.

Shapes: B windows, T frames, V outputs (the blank, then the tokens).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Unusable
from sottovoce.data.loading import prefetch
from sottovoce.data.text.tokens import Tokens
from sottovoce.evaluation.decoder import Decoder, choose_greedy
from sottovoce.evaluation.recognise import (
    choose_batch_seconds,
    compute_emissions,
    place_for_evaluation,
    plan_batches,
    require_recognition,
    search_timed_texts,
)
from sottovoce.evaluation.transcripts import FailedFile, TimedWord, Transcript
from sottovoce.evaluation.windows import (
    SUFFIXES,
    Emissions,
    Samples,
    WindowWords,
    align_attended_tokens,
    cut_windows,
    find_best_path,
    find_token_spans,
    read_audio_blocks,
    stitch_emissions,
    stitch_untimed_words,
    stitch_words,
)
from sottovoce.models import ctc
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.decoding import WORD_BOUNDARY, Hypothesis, decode_greedily
from sottovoce.models.recogniser import Recogniser

WINDOW_SECONDS = 30.0
OVERLAP_SECONDS = 4.0
LONGEST_WINDOW = 600.0  # an attention over more takes gigabytes
# Of audio whose windows are sorted together: little at first, so that text comes soon, then twice as much each time.
FIRST_SECONDS, SORTED_SECONDS = 120.0, 600.0


def find_audio_files(places: Sequence[Path]) -> list[Path]:
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


def transcribe_files(
    recogniser: Recogniser,
    paths: Sequence[Path],
    *,
    device: torch.device | str = "cpu",
    decode: Decoder | SearchOptions | None = None,
    window_seconds: float = WINDOW_SECONDS,
    batch_seconds: float | None = None,
) -> Iterator[Transcript | FailedFile]:
    """What is said in each of `paths`, in order; a file that cannot be read does not stop the others.

    By default decoding is greedy. By CTC, beam search decodes piece by piece; greedy decoding does not notice where the
    pieces meet.
    """
    if not 0 < window_seconds <= LONGEST_WINDOW:
        raise InputError(f"window={window_seconds:g} s: expected at most {LONGEST_WINDOW:g} s")
    device = torch.device(device)
    recogniser = place_for_evaluation(recogniser, device)
    decode = choose_greedy(recogniser.family, recogniser.settings) if decode is None else decode
    seconds = choose_batch_seconds(device, decode) if batch_seconds is None else batch_seconds
    frame = require_recognition(recogniser).samples_per_frame(recogniser.settings)
    windows = _read_windows(paths, window_seconds=window_seconds, frame_samples=frame)
    groups = prefetch(_gather(windows, first_seconds=max(seconds, FIRST_SECONDS)))
    recognised = _recognise(recogniser, groups, decode, device=device, batch_seconds=seconds)
    for number, results in groupby(recognised, key=lambda result: result.file):
        try:
            yield _transcript(paths[number], results, recogniser, decode, frame_samples=frame)
        except Unusable as reason:
            detail = f" ({reason.detail})" if reason.detail else ""
            yield FailedFile(paths[number], f"{reason.kind}{detail}")


@dataclass(frozen=True, slots=True)
class _Window:
    """Samples of one file from its frame `start` on, or why there are none; `output` is the model's."""

    file: int
    start: int
    samples: Samples
    trouble: Unusable | None = None
    output: torch.Tensor | Hypothesis | None = None


def _read_windows(paths: Sequence[Path], *, window_seconds: float, frame_samples: int) -> Iterator[_Window]:
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
            for start, samples in cut_windows(read_audio_blocks(path), **sizes):
                yield _Window(number, start // frame_samples, samples)
        except Unusable as trouble:
            yield _Window(number, 0, np.zeros(0, dtype=np.int16), trouble)


def _gather(windows: Iterable[_Window], *, first_seconds: float) -> Iterator[list[_Window]]:
    """Consecutive windows, about `first_seconds` of them at first, then ever more."""
    group: list[_Window] = []
    wanted, held = first_seconds, 0.0
    for window in windows:
        group.append(window)
        held += len(window.samples) / SAMPLE_RATE
        if held >= wanted:
            yield group
            group, held, wanted = [], 0.0, max(first_seconds, min(2 * wanted, SORTED_SECONDS))
    if group:
        yield group


def _recognise(
    recogniser: Recogniser,
    groups: Iterable[list[_Window]],
    decode: Decoder | SearchOptions,
    *,
    device: torch.device,
    batch_seconds: float,
) -> Iterator[_Window]:
    """The same windows with the model's output on the host: log-probabilities or, of a search, texts."""
    for group in groups:
        sound = [window for window in group if window.trouble is None]
        lengths = np.array([len(window.samples) for window in sound], dtype=np.int64)
        outputs: dict[int, torch.Tensor | Hypothesis] = {}
        for batch in plan_batches(lengths, max_seconds=batch_seconds, device=device):
            rows = batch.rows.tolist()
            samples = [sound[row].samples for row in rows]
            recordings = pad_waveforms(samples, padded_samples=batch.padded_samples, device=device)
            outputs |= zip(rows, _compute_outputs(recogniser, recordings, decode), strict=True)
        in_order = (outputs[row] for row in range(len(sound)))
        for window in group:
            yield window if window.trouble is not None else replace(window, output=next(in_order))


@torch.no_grad()
def _compute_outputs(
    recogniser: Recogniser, recordings: Waveforms, decode: Decoder | SearchOptions
) -> Sequence[torch.Tensor | Hypothesis]:
    if isinstance(decode, SearchOptions):
        return search_timed_texts(recogniser, recordings, decode)
    log_probs_BTV, lengths_B = compute_emissions(recogniser, recordings)
    # Copies: a view would keep the padding of a whole batch in memory.
    lines = zip(log_probs_BTV.cpu(), lengths_B.tolist(), strict=True)
    return [emission[:length].clone() for emission, length in lines]


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
    pieces, spell = recogniser.tokens.pieces(), recogniser.tokens.spell
    recognition = require_recognition(recogniser)
    lead = recognition.lead_frames(recogniser.settings)

    def usable() -> Iterator[_Window]:
        nonlocal samples
        for window in results:
            if window.trouble is not None:
                raise window.trouble
            samples = window.start * frame_samples + len(window.samples)
            yield window

    def emissions() -> Iterator[Emissions]:
        # What a model is given before a window and behind it is no part of the recording. Behind the last one it stays:
        # a model may write a token late.
        held: tuple[Emissions, int] | None = None
        for window in usable():
            assert isinstance(window.output, torch.Tensor)
            if held is not None:
                last, length = held
                yield last if lead == 0 else Emissions(last.start, last.log_probs_TV[:length])
            held = Emissions(window.start, window.output[lead:]), math.ceil(len(window.samples) / frame_samples)
        if held is not None:
            yield held[0]

    def words() -> Iterator[WindowWords]:
        nonlocal collapsed
        for window in usable():
            assert isinstance(window.output, Hypothesis)
            collapsed += window.output.collapsed
            frames = [window.start + max(frame - lead, 0) for frame in window.output.frames]
            end = window.start + math.ceil(len(window.samples) / frame_samples)
            spans = align_attended_tokens(window.output.tokens, frames, until_next=recognition.align is not None)
            yield WindowWords(window.start, end, ctc.join_words(spans, pieces, spell=spell))

    untimed = recognition.untimed(recogniser.settings) if isinstance(decode, SearchOptions) else None
    if isinstance(decode, SearchOptions):
        found = list((stitch_words if untimed is None else stitch_untimed_words)(words()))
    else:
        found = _ctc_words(stitch_emissions(emissions(), silent=_silent(pieces)), recogniser.tokens, decode)
    seconds = frame_samples / SAMPLE_RATE
    last = math.ceil(samples / frame_samples)
    timed = tuple(_timed(word, frame_seconds=seconds, last=last) for word in found)
    return Transcript(path, samples / SAMPLE_RATE, timed, collapsed, untimed)


def _silent(pieces: Sequence[str]) -> list[int]:
    """The blank, and the word boundary where it is a token of its own."""
    return [ctc.BLANK, *(i for i, piece in enumerate(pieces) if piece == WORD_BOUNDARY)]


def _ctc_words(stitched: Iterable[Emissions], tokens: Tokens, decode: Decoder) -> list[ctc.AlignedWord]:
    """The words of pieces that follow one another."""
    pieces = tokens.pieces()
    if decode is decode_greedily:
        # Only the best tokens of each frame are kept: some megabytes for ten hours.
        path_T = np.concatenate([find_best_path(piece.log_probs_TV) for piece in stitched])
        return ctc.join_words(find_token_spans(path_T), pieces, spell=tokens.spell)
    words: list[ctc.AlignedWord] = []
    for piece in stitched:
        # Its text is aligned anew: a beam search reports where tokens begin.
        (hypothesis,) = decode(piece.log_probs_TV[None], torch.tensor([len(piece.log_probs_TV)]))
        spans = ctc.align_tokens(piece.log_probs_TV, hypothesis.tokens)
        for word in ctc.join_words(spans, pieces, spell=tokens.spell):
            words.append(ctc.AlignedWord(word.text, word.start + piece.start, word.end + piece.start))
    return words


def _timed(word: ctc.AlignedWord, *, frame_seconds: float, last: int) -> TimedWord:
    # To the millisecond: 3 · 0.03 is not 0.09 in binary.
    return TimedWord(word.text, *(round(min(frame, last) * frame_seconds, 3) for frame in (word.start, word.end)))
