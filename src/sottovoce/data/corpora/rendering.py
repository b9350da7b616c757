"""What all corpora of audio files share: from one speaker's clips to samples at 16 kHz and normalised text."""

import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import (
    SAMPLE_RATE,
    Clip,
    Corpus,
    FileSpan,
    Problem,
    ProblemKind,
    ProblemLog,
    RenderedSpeaker,
    RenderedUtterance,
    Speaker,
    Unusable,
)
from sottovoce.data.corpora.flac import point_into
from sottovoce.data.corpora.truncation import is_truncated
from sottovoce.data.text.normalisation import alphabet, foreign_characters, normalise_text, spell_as_released
from sottovoce.data.text.spelling import SHORTEST_GAO, Spelling, spell_as_gao

Sample = TypeVar("Sample", np.int16, np.float32)
Samples = NDArray[np.int16] | FileSpan
Sound = tuple[Samples, list[tuple[ProblemKind, str]]]  # samples or where they lie, and what was converted

# Below telephone quality, or above what any recorder has, a header is damaged, and resampling would fill the memory.
_LOWEST_RATE, _HIGHEST_RATE = 4_000, 768_000
_BLOCK_SAMPLES = 1 << 22  # of all channels together; more than four minutes of speech
_UNKNOWN_FRAMES = 1 << 62
_LOW_RESOLUTION = {"PCM_S8", "PCM_U8", "ULAW", "ALAW", "DPCM_8"}
LONGEST_SECONDS = 1e9  # of any recording: thirty years
_OVERSHOOT = 0.1  # seconds by which a segment may end behind its file: times are rounded


def make_file_corpus(
    name: str,
    *,
    language: str,
    speakers: Iterable[Speaker],
    folders: Iterable[str | Path],
    log: ProblemLog,
    root: str | Path | None = None,
    spelling: Spelling = Spelling.OURS,
) -> Corpus[Speaker]:
    """A corpus of audio files inside `folders`, in its one order: speakers by split and name, clips as they come.

    With `root` nothing is copied: a store points into the files below it. `spelling`: see `FileRenderer`.
    """
    alphabet(language)  # refuses what is no language code before hours of work
    if spelling is Spelling.GAO:
        spell_as_gao("", language)  # refuses a language that it has no rules for
    ordered = sorted(speakers, key=lambda speaker: (speaker.split, speaker.name))
    if not any(speaker.clips for speaker in ordered):
        reasons = "; ".join(f"{kind} ({count})" for kind, count in log.counts.items()) or "it is empty"
        raise InputError(f"{name}: nothing usable in {', '.join(map(str, folders))}: {reasons}")
    _report_overlaps(ordered, log)
    real_folders = tuple(sorted({os.path.realpath(folder) for folder in folders}))
    root = None if root is None else os.path.abspath(root)
    renderer = FileRenderer(language, real_folders, root, spelling)
    return Corpus(name, language, ordered, renderer, log, root=root, spelling=spelling)


def _report_overlaps(speakers: Iterable[Speaker], log: ProblemLog) -> None:
    first_split: dict[str, str] = {}
    overlapping: dict[str, list[str]] = {}
    for speaker in speakers:
        split = first_split.setdefault(speaker.name, speaker.split)
        if split != speaker.split:
            overlapping.setdefault(speaker.name, [split]).append(speaker.split)
    log.extend(Problem(ProblemKind.SPLIT_OVERLAP, name, ", ".join(splits)) for name, splits in overlapping.items())


@dataclass(frozen=True)
class FileRenderer:
    """Reads a speaker's audio files. `folders` are real paths; a link that leads out of all of them is refused.

    With `root` the files are only looked at, and pointed into by their paths below it. `spelling`: by whose rules texts
    are spelled; the released codes keep utterances that our own leave out.
    """

    language: str
    folders: tuple[str, ...]
    root: str | None = None
    spelling: Spelling = Spelling.OURS

    def __call__(self, speaker: Speaker) -> RenderedSpeaker:
        utterances: list[RenderedUtterance] = []
        problems: list[Problem] = []
        whole: dict[str, Sound] = {}
        for clip in speaker.clips:
            try:
                text, respelled = self._text(clip)
                if clip.path not in whole:  # the parts of a file come one after another: it is decoded once
                    whole = {clip.path: self.sound(clip.path)}
                samples, conversions = whole[clip.path]
                if clip.seconds is not None:
                    samples, shortened = _cut(samples, clip.seconds)
                    conversions = conversions + shortened
            except Unusable as reason:
                problems.append(Problem(reason.kind, clip.path, reason.detail))
                continue
            problems.extend(Problem(kind, clip.path, detail) for kind, detail in conversions + respelled)
            utterances.append(RenderedUtterance(clip.id, samples, text, clip.text, clip.metadata))
        return RenderedSpeaker(speaker.name, speaker.split, utterances, speaker.metadata, problems, speaker.in_time)

    def sound(self, path: str) -> Sound:
        """All of a file; raises `Unusable`."""
        real = self._inside(path)
        if self.root is None:
            return decode_audio(real)
        with _unusable_if_unreadable():
            check_regular(real)
            file = point_into(real, name=os.path.relpath(path, self.root))
        return FileSpan(file, 0, file.samples), []

    def _text(self, clip: Clip) -> tuple[str | None, list[tuple[ProblemKind, str]]]:
        """The text as the store has it, and what is to be told of it: characters, since a sentence is private."""
        if clip.text is None:
            return None, []
        match self.spelling:
            case Spelling.PELIKAN:
                text, unwritten = spell_as_released(clip.text, self.language)
                told = [(ProblemKind.UNWRITTEN, _named(unwritten))] if unwritten else []
            case Spelling.GAO:
                text = spell_as_gao(clip.text, self.language)
                if 0 < len(text) < SHORTEST_GAO:
                    raise Unusable(ProblemKind.SHORT_TEXT)
                told = self._compare_with_ours(clip.text, text)
            case Spelling.OURS:
                text, told = normalise_text(clip.text, self.language), []
                if foreign := foreign_characters(text, self.language):
                    raise Unusable(ProblemKind.FOREIGN_TEXT, _named(foreign))
        if not text:
            raise Unusable(ProblemKind.EMPTY_TEXT)
        return text, told

    def _compare_with_ours(self, original: str, text: str) -> list[tuple[ProblemKind, str]]:
        """How `text` differs from what our own rules make of the `original`, if it does."""
        ours = normalise_text(original, self.language)
        if (foreign := foreign_characters(ours, self.language)) or not ours:
            return [(ProblemKind.LEFT_OUT_BY_OURS, _named(foreign))]
        differing = set(ours) ^ set(text)
        return [(ProblemKind.SPELLED_OTHERWISE, _named(differing - {" "}))] if ours != text else []

    def _inside(self, path: str) -> str:
        real = os.path.realpath(path)
        if not any(real.startswith(folder.rstrip(os.sep) + os.sep) for folder in self.folders):
            raise Unusable(ProblemKind.PATH_ESCAPES, f"leads to {real}")
        return real


def _named(characters: set[str]) -> str:
    return " ".join(sorted(characters))


def take_part(sound: Samples, start: int, stop: int) -> Samples:
    """The samples from `start` to `stop`, or where they lie."""
    return FileSpan(sound.file, sound.start + start, stop - start) if isinstance(sound, FileSpan) else sound[start:stop]


def _cut(sound: Samples, seconds: tuple[float, float]) -> Sound:
    """One segment of a file, and what had to be changed of it."""
    start, end = seconds
    first, last = round(start * SAMPLE_RATE), min(round(end * SAMPLE_RATE), len(sound))
    detail = f"{start:g} to {end:g} s of {len(sound) / SAMPLE_RATE:g} s"
    if first >= last:
        raise Unusable(ProblemKind.EMPTY_AUDIO, detail)
    is_beyond = end > len(sound) / SAMPLE_RATE + _OVERSHOOT
    return take_part(sound, first, last), [(ProblemKind.SEGMENT_BEYOND, detail)] if is_beyond else []


def decode_audio(path: str) -> tuple[NDArray[np.int16], list[tuple[ProblemKind, str]]]:
    """The samples of one file at `SAMPLE_RATE`, mono, and what was converted; raises `Unusable`.

    16-bit mono at `SAMPLE_RATE` comes through bit by bit.
    """
    with _unusable_if_unreadable():
        check_regular(path)
        with open(path, "rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # Mapped: whatever a file says of its length, only its container is looked at.
            if mapped[:4] != b"fLaC" and is_truncated(cast(bytes, mapped)):
                raise Unusable(ProblemKind.TRUNCATED_AUDIO)
    conversions: list[tuple[ProblemKind, str]] = []
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            check_header(file)
            rate, channels, subtype = file.samplerate, file.channels, file.subtype
            if (rate, channels, subtype) == (SAMPLE_RATE, 1, "PCM_16"):
                return _read(file, np.int16), conversions
            sound = _read(file, np.float32)
    except (soundfile.LibsndfileError, MemoryError) as error:
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, _reason(error)) from None
    if subtype in _LOW_RESOLUTION:
        conversions.append((ProblemKind.LOW_RESOLUTION, subtype))
    if channels > 1:
        sound = sound.mean(axis=1)
        conversions.append((ProblemKind.MIXED_DOWN, f"{channels} channels"))
    if not np.isfinite(sound).all():
        raise Unusable(ProblemKind.NON_FINITE_AUDIO)
    if rate != SAMPLE_RATE:
        sound = soxr.resample(sound, rate, SAMPLE_RATE, quality="HQ")
        conversions.append((ProblemKind.RESAMPLED, f"{rate} Hz"))
        if not len(sound):
            raise Unusable(ProblemKind.EMPTY_AUDIO, "nothing left after resampling")
    return np.clip(np.rint(sound * 32_768), -32_768, 32_767).astype(np.int16), conversions


def check_regular(path: Path | str) -> None:
    """Refuse what is no file with something in it; OSError where it cannot even be looked at."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a named pipe would wait for ever
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, "not a regular file")
    if status.st_size == 0:
        raise Unusable(ProblemKind.EMPTY_AUDIO, "0 bytes")


@contextmanager
def _unusable_if_unreadable() -> Iterator[None]:
    """Turn errors of the file system into `Unusable`."""
    try:
        yield
    except FileNotFoundError:
        raise Unusable(ProblemKind.MISSING_AUDIO) from None
    except OSError as error:
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, _reason(error)) from None


def check_header(file: soundfile.SoundFile) -> None:
    """Refuse a sound whose header cannot be believed."""
    if not _LOWEST_RATE <= file.samplerate <= _HIGHEST_RATE:
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, f"sample rate {file.samplerate} Hz")
    if file.frames > _UNKNOWN_FRAMES:
        raise Unusable(ProblemKind.UNREADABLE_AUDIO, "its header gives no length")


def read_blocks(
    file: soundfile.SoundFile, dtype: type[Sample], *, samples: int = _BLOCK_SAMPLES
) -> Iterator[NDArray[Sample]]:
    """The samples of an open file, so many at a time: [frames], or [frames, channels] if it has several.

    Never all that the header announces, which may be more than any memory holds.
    """
    frames, found = max(1, samples // file.channels), 0
    try:
        while len(sound := np.asarray(file.read(frames, dtype=np.dtype(dtype).name))):
            found += len(sound)
            yield sound
    except soundfile.LibsndfileError:
        # It opened, so the header is sound: the stream breaks off or is damaged on the way.
        raise Unusable(ProblemKind.TRUNCATED_AUDIO, f"decoding stops before {file.frames} samples") from None
    # libsndfile only guesses the length of an MP3; `is_truncated` has counted its frames.
    if found < file.frames and file.subtype != "MPEG_LAYER_III":
        raise Unusable(ProblemKind.TRUNCATED_AUDIO, f"{found} of {file.frames} samples")
    if not found:
        raise Unusable(ProblemKind.EMPTY_AUDIO)


def _read(file: soundfile.SoundFile, dtype: type[Sample]) -> NDArray[Sample]:
    blocks = list(read_blocks(file, dtype))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _reason(error: BaseException) -> str:
    if isinstance(error, soundfile.LibsndfileError):
        return str(error.error_string).strip(" .")
    return getattr(error, "strerror", None) or "does not fit into memory"
