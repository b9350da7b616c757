"""Any file that soundfile reads, as 16 kHz mono, block by block: a recording of ten hours never lies in memory whole.

16-bit mono at 16 kHz comes through bit by bit; everything else as `sottovoce prepare` would store it.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from sottovoce.data.corpora.corpus import SAMPLE_RATE, ProblemKind, Unusable
from sottovoce.data.corpora.listing import AUDIO_SUFFIXES
from sottovoce.data.corpora.rendering import check_header, check_regular, read_blocks
from sottovoce.data.corpora.truncation import is_truncated

# What a folder is searched for; a file that is named itself may be called anything.
SUFFIXES = frozenset({*AUDIO_SUFFIXES, ".oga", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64"})
BLOCK_SECONDS = 10

Samples = NDArray[np.int16]


def blocks(path: Path) -> Iterator[Samples]:
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


def windows(sound: Iterator[Samples], *, window_samples: int, step_samples: int) -> Iterator[tuple[int, Samples]]:
    """Windows of `sound` that begin every `step_samples`, each with the number of its first sample.

    All but the last are full, and the last reaches further than the one before it.

    >>> [(start, len(w)) for start, w in windows(iter([np.zeros(7, np.int16)]), window_samples=4, step_samples=3)]
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
