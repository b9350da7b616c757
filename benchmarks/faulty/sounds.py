"""Damaged recordings: small files of every format that soundfile writes, read as `prepare` and `transcribe` do."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from faulty import damage
from faulty.children import Case
from sottovoce.corpora.problems import Unusable
from sottovoce.corpora.recordings import decode
from sottovoce.evaluation.windows import read_audio_blocks
from sottovoce.seeds import stream

WHAT = "audio files"
# The formats that people record in come as often as all the others together.
COMMON = (
    *(("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "PCM_U8"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")),
    *(("OGG", "OPUS"), ("OGG", "VORBIS"), ("AIFF", "PCM_16")),
)
RATES = (16_000, 44_100, 8_000)
# Containers that tell how much there must be: a piece cut off their end may not go unnoticed.
TELL_THEIR_LENGTH = {"WAV", "WAVEX", "RF64", "FLAC", "OGG", "AIFF", "AU", "CAF", "W64"}
CUTS = {damage.truncate, damage.truncate_a_little}


def cases(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    whole = _written(folder)
    common = [name for name in whole if name[:2] in COMMON]
    lengths = {name: _read(path) for name, path in whole.items()}
    for number in range(count):
        rng = stream(seed, WHAT, number)
        names = common if rng.integers(2) else list(whole)
        name = names[int(rng.integers(len(names)))]
        kind = damage.BINARY[int(rng.integers(len(damage.BINARY)))]
        path = folder / f"case-{number}"
        path.write_bytes(kind(whole[name].read_bytes(), rng))
        expected = lengths[name] if kind in CUTS and name[0] in TELL_THEIR_LENGTH else None
        words = f"case {number}, {kind.__name__} of {' '.join(map(str, name))}"
        yield Case(WHAT, words, partial(_read, path), partial(_shorter, expected))


def _written(folder: Path) -> dict[tuple[str, str, int], Path]:
    """A second of a gliding tone in every format, coding and rate there is."""
    found = {}
    for container in soundfile.available_formats():
        for coding in soundfile.available_subtypes(container):
            for rate in RATES if (container, coding) in COMMON else RATES[:1]:
                path = folder / f"{container}-{coding}-{rate}"
                with suppress(
                    soundfile.LibsndfileError, ValueError
                ):  # a coding for other rates, or that is only written
                    soundfile.write(path, _tone(rate), rate, format=container, subtype=coding)
                    soundfile.info(path)
                    found[container, coding, rate] = path
    return found


def _tone(rate: int) -> NDArray[np.float64]:
    time = np.arange(rate) / rate
    return np.asarray(0.3 * np.sin(2 * np.pi * (220 + 300 * time) * time))


def _read(path: Path) -> int | None:
    """How many samples both readers find; None where one of them says what is wrong."""
    found = []
    with suppress(Unusable):
        found.append(sum(len(block) for block in read_audio_blocks(path)))
    with suppress(Unusable):
        found.append(len(decode(str(path))[0]))
    return min(found) if len(found) == 2 else None


def _shorter(expected: int | None, found: object) -> bool:
    return expected is not None and isinstance(found, int) and found < expected
