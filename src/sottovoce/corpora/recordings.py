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
from sottovoce.corpora.corpus import (
    SAMPLE_RATE,
    Clip,
    Corpus,
    Metadata,
    RenderedSpeaker,
    RenderedUtterance,
    Span,
    Speaker,
)
from sottovoce.corpora.pointing import point_into
from sottovoce.corpora.problems import Kind, Problem, ProblemLog, Unusable
from sottovoce.corpora.truncation import cut_short
from sottovoce.text.normalise import alphabet, foreign_characters, normalise
from sottovoce.text.released import spell_as_released

AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".opus", ".ogg")
NO_METADATA: Metadata = {}  # one for all: a million clips need not hold a million empty dictionaries

Sample = TypeVar("Sample", np.int16, np.float32)

# Below telephone quality, or above what any recorder has, a header is damaged, and resampling would fill the memory.
_LOWEST_RATE, _HIGHEST_RATE = 4_000, 768_000
_BLOCK_SAMPLES = 1 << 22  # of all channels together; more than four minutes of speech
_UNKNOWN_FRAMES = 1 << 62
_LOW_RESOLUTION = {"PCM_S8", "PCM_U8", "ULAW", "ALAW", "DPCM_8"}
_ENTRIES_SHOWN = 6
LONGEST_SECONDS = 1e9  # of any recording: thirty years
_OVERSHOOT = 0.1  # seconds by which a segment may end behind its file: times are rounded


def file_corpus(
    name: str,
    *,
    language: str,
    speakers: Iterable[Speaker],
    folders: Iterable[str | Path],
    log: ProblemLog,
    root: str | Path | None = None,
    as_released: bool = False,
) -> Corpus[Speaker]:
    """A corpus of audio files inside `folders`, in its one order: speakers by split and name, clips as they come.

    With `root` nothing is copied: a store points into the files below it. `as_released`: see `FileRenderer`.
    """
    alphabet(language)  # refuses what is no language code before hours of work
    ordered = sorted(speakers, key=lambda speaker: (speaker.split, speaker.name))
    if not any(speaker.clips for speaker in ordered):
        reasons = "; ".join(f"{kind} ({count})" for kind, count in log.counts.items()) or "it is empty"
        raise InputError(f"{name}: nothing usable in {', '.join(map(str, folders))}: {reasons}")
    _report_overlaps(ordered, log)
    real_folders = tuple(sorted({os.path.realpath(folder) for folder in folders}))
    root = None if root is None else os.path.abspath(root)
    return Corpus(name, language, ordered, FileRenderer(language, real_folders, root, as_released), log, root=root)


def _report_overlaps(speakers: Iterable[Speaker], log: ProblemLog) -> None:
    first_split: dict[str, str] = {}
    overlapping: dict[str, list[str]] = {}
    for speaker in speakers:
        split = first_split.setdefault(speaker.name, speaker.split)
        if split != speaker.split:
            overlapping.setdefault(speaker.name, [split]).append(speaker.split)
    log.extend(Problem(Kind.SPLIT_OVERLAP, name, ", ".join(splits)) for name, splits in overlapping.items())


def wrong_layout(root: Path, *, corpus: str, expected: str) -> InputError:
    """The error for a path that does not hold `corpus`: what was expected, and what lies there instead."""
    if not root.exists():
        found = "there is nothing there"
    elif not root.is_dir():
        found = "it is a file"
    else:
        entries = sorted(entry.name + "/" * entry.is_dir() for entry in root.iterdir())
        shown = ", ".join(entries[:_ENTRIES_SHOWN]) or "an empty folder"
        found = f"found {shown}" + f" and {len(entries) - _ENTRIES_SHOWN} more" * (len(entries) > _ENTRIES_SHOWN)
    return InputError(f"{root} does not hold {corpus}: expected {expected}; {found}")


@dataclass(frozen=True)
class FileRenderer:
    """Reads a speaker's audio files. `folders` are real paths; a link that leads out of all of them is refused.

    With `root` the files are only looked at, and pointed into by their paths below it. `as_released` spells as Pelikan
    et al.'s code does, which keeps an utterance whose text cannot be written whole.
    """

    language: str
    folders: tuple[str, ...]
    root: str | None = None
    as_released: bool = False

    def __call__(self, speaker: Speaker) -> RenderedSpeaker:
        utterances: list[RenderedUtterance] = []
        problems: list[Problem] = []
        whole: dict[str, tuple[NDArray[np.int16] | Span, list[tuple[Kind, str]]]] = {}
        for clip in speaker.clips:
            try:
                text, unwritten = self._text(clip)
                if clip.path not in whole:  # the parts of a file come one after another: it is decoded once
                    whole = {clip.path: self.sound(clip.path)}
                samples, conversions = whole[clip.path]
                if clip.seconds is not None:
                    samples, shortened = _cut(samples, clip.seconds)
                    conversions = conversions + shortened
            except Unusable as reason:
                problems.append(Problem(reason.kind, clip.path, reason.detail))
                continue
            conversions = conversions + ([(Kind.UNWRITTEN, unwritten)] if unwritten else [])
            problems.extend(Problem(kind, clip.path, detail) for kind, detail in conversions)
            utterances.append(RenderedUtterance(clip.id, samples, text, clip.text, clip.metadata))
        return RenderedSpeaker(speaker.name, speaker.split, utterances, speaker.metadata, problems, speaker.in_time)

    def sound(self, path: str) -> tuple[NDArray[np.int16] | Span, list[tuple[Kind, str]]]:
        """All samples of a file, or where they lie, and what was converted; raises `Unusable`."""
        real = self._inside(path)
        if self.root is None:
            return decode(real)
        with _looking():
            check_regular(real)
            file = point_into(real, name=os.path.relpath(path, self.root))
        return Span(file, 0, file.samples), []

    def _text(self, clip: Clip) -> tuple[str | None, str]:
        """The text as tokens write it, and which characters had to be left out of it."""
        if clip.text is None:
            return None, ""
        if self.as_released:
            text, foreign = spell_as_released(clip.text, self.language)
        else:
            text = normalise(clip.text, self.language)
            foreign = foreign_characters(text, self.language)
        # The characters and not the sentence: what somebody said does not belong in a log.
        named = " ".join(sorted(foreign))
        if not text:
            raise Unusable(Kind.EMPTY_TEXT)
        if foreign and not self.as_released:
            raise Unusable(Kind.FOREIGN_TEXT, named)
        return text, named

    def _inside(self, path: str) -> str:
        real = os.path.realpath(path)
        if not any(real.startswith(folder.rstrip(os.sep) + os.sep) for folder in self.folders):
            raise Unusable(Kind.PATH_ESCAPES, f"leads to {real}")
        return real


def part(sound: NDArray[np.int16] | Span, start: int, stop: int) -> NDArray[np.int16] | Span:
    """The samples from `start` to `stop`, or where they lie."""
    return Span(sound.file, sound.start + start, stop - start) if isinstance(sound, Span) else sound[start:stop]


def _cut(
    sound: NDArray[np.int16] | Span, seconds: tuple[float, float]
) -> tuple[NDArray[np.int16] | Span, list[tuple[Kind, str]]]:
    """One segment of a file, and what had to be changed of it."""
    start, end = seconds
    first, last = round(start * SAMPLE_RATE), min(round(end * SAMPLE_RATE), len(sound))
    told = f"{start:g} to {end:g} s of {len(sound) / SAMPLE_RATE:g} s"
    if first >= last:
        raise Unusable(Kind.EMPTY_AUDIO, told)
    is_beyond = end > len(sound) / SAMPLE_RATE + _OVERSHOOT
    return part(sound, first, last), [(Kind.SEGMENT_BEYOND, told)] if is_beyond else []


def path_inside(path: str, *, folder: str) -> str:
    """`path` relative to `folder`, `Unusable` where it leads out; links are followed later, when the file is opened."""
    if "/" not in path and path != "..":
        return path
    relative = os.path.relpath(path, folder) if os.path.isabs(path) else os.path.normpath(path)
    if relative.split(os.sep, 1)[0] == os.pardir:
        raise Unusable(Kind.PATH_ESCAPES, path)
    return relative


def audio_root_of(root: str | Path) -> str:
    """The folder where a corpus's audio is said to lie."""
    if not Path(root).is_dir():
        raise InputError(f"audio_root={root}: expected the folder where the audio lies")
    return os.path.abspath(root)


def check_led_in(speakers: Iterable[Speaker], folder: str, log: ProblemLog) -> None:
    """Where every path has led out of `folder`, say what would help."""
    if (count := log.counts[Kind.PATH_ESCAPES]) and not any(speaker.clips for speaker in speakers):
        (first, *_) = log.examples[Kind.PATH_ESCAPES]
        raise InputError(
            f"{first.where}: {first.detail} and {count - 1:,} other paths lead out of {folder}: "
            "--audio-root names the folder where the audio lies"
        )


def decode(path: str) -> tuple[NDArray[np.int16], list[tuple[Kind, str]]]:
    """The samples of one file at `SAMPLE_RATE`, mono, and what was converted; raises `Unusable`.

    16-bit mono at `SAMPLE_RATE` comes through bit by bit.
    """
    _check_file(path)
    conversions: list[tuple[Kind, str]] = []
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            check_header(file)
            rate, channels, subtype = file.samplerate, file.channels, file.subtype
            if (rate, channels, subtype) == (SAMPLE_RATE, 1, "PCM_16"):
                return _read(file, np.int16), conversions
            sound = _read(file, np.float32)
    except (soundfile.LibsndfileError, MemoryError) as error:
        raise Unusable(Kind.UNREADABLE_AUDIO, _reason(error)) from None
    if subtype in _LOW_RESOLUTION:
        conversions.append((Kind.LOW_RESOLUTION, subtype))
    if channels > 1:
        sound = sound.mean(axis=1)
        conversions.append((Kind.MIXED_DOWN, f"{channels} channels"))
    if not np.isfinite(sound).all():
        raise Unusable(Kind.NON_FINITE_AUDIO)
    if rate != SAMPLE_RATE:
        sound = soxr.resample(sound, rate, SAMPLE_RATE, quality="HQ")
        conversions.append((Kind.RESAMPLED, f"{rate} Hz"))
        if not len(sound):
            raise Unusable(Kind.EMPTY_AUDIO, "nothing left after resampling")
    return _to_int16(sound), conversions


def check_regular(path: Path | str) -> None:
    """Refuse what is no file with something in it; OSError where it cannot even be looked at."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a named pipe would wait for ever
        raise Unusable(Kind.UNREADABLE_AUDIO, "not a regular file")
    if status.st_size == 0:
        raise Unusable(Kind.EMPTY_AUDIO, "0 bytes")


def _check_file(path: str) -> None:
    with _looking():
        check_regular(path)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # Mapped: whatever a file says of its length, only its container is looked at.
            if mapped[:4] != b"fLaC" and cut_short(cast(bytes, mapped)):
                raise Unusable(Kind.TRUNCATED_AUDIO)


@contextmanager
def _looking() -> Iterator[None]:
    """Within, a file that cannot be looked at is one that cannot be used."""
    try:
        yield
    except FileNotFoundError:
        raise Unusable(Kind.MISSING_AUDIO) from None
    except OSError as error:
        raise Unusable(Kind.UNREADABLE_AUDIO, _reason(error)) from None


def check_header(file: soundfile.SoundFile) -> None:
    """Refuse a sound whose header cannot be believed."""
    if not _LOWEST_RATE <= file.samplerate <= _HIGHEST_RATE:
        raise Unusable(Kind.UNREADABLE_AUDIO, f"sample rate {file.samplerate} Hz")
    if file.frames > _UNKNOWN_FRAMES:
        raise Unusable(Kind.UNREADABLE_AUDIO, "its header gives no length")


def read_blocks(
    file: soundfile.SoundFile, dtype: type[Sample], *, samples: int = _BLOCK_SAMPLES
) -> Iterator[NDArray[Sample]]:
    """The samples of an open file, so many at a time: [frames], or [frames, channels] if it has several.

    Never all that the header announces, which may be more than any memory holds; and a format that cannot be sought
    tells where it ends only by coming to its end.
    """
    frames, found = max(1, samples // file.channels), 0
    try:
        while len(sound := np.asarray(file.read(frames, dtype=np.dtype(dtype).name))):
            found += len(sound)
            yield sound
    except soundfile.LibsndfileError:
        # It opened, so the header is sound: the stream breaks off or is damaged on the way.
        raise Unusable(Kind.TRUNCATED_AUDIO, f"decoding stops before {file.frames} samples") from None
    # libsndfile only guesses the length of an MP3; `cut_short` has counted its frames.
    if found < file.frames and file.subtype != "MPEG_LAYER_III":
        raise Unusable(Kind.TRUNCATED_AUDIO, f"{found} of {file.frames} samples")
    if not found:
        raise Unusable(Kind.EMPTY_AUDIO)


def _read(file: soundfile.SoundFile, dtype: type[Sample]) -> NDArray[Sample]:
    blocks = list(read_blocks(file, dtype))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _to_int16(sound: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.clip(np.rint(sound * 32_768), -32_768, 32_767).astype(np.int16)


def _reason(error: BaseException) -> str:
    if isinstance(error, soundfile.LibsndfileError):
        return str(error.error_string).strip(" .")
    return getattr(error, "strerror", None) or "does not fit into memory"
