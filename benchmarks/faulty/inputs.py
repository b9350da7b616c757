"""Damaged inputs: recordings of every format, tables of clips, and synthetic corpora of absurd sizes.

Recordings are read as `prepare` and `transcribe` do, tables as `prepare tsv` does, sizes as `prepare synthetic`
does.
"""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from faulty import damage
from faulty.cases import Case
from sottovoce.base.seeds import stream
from sottovoce.data.corpora import synthetic, tsv
from sottovoce.data.corpora.corpus import Unusable
from sottovoce.data.corpora.listing import hold_out_speakers
from sottovoce.data.corpora.rendering import decode_audio
from sottovoce.evaluation.windows import read_audio_blocks

RECORDINGS = "audio files"
# The formats that people record in come as often as all the others together.
COMMON = (
    *(("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "PCM_U8"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")),
    *(("OGG", "OPUS"), ("OGG", "VORBIS"), ("AIFF", "PCM_16")),
)
RATES = (16_000, 44_100, 8_000)
# Containers that store their length: a piece cut off their end may not go unnoticed.
WITH_LENGTH = {"WAV", "WAVEX", "RF64", "FLAC", "OGG", "AIFF", "AU", "CAF", "W64"}
CUTS = {damage.truncate, damage.truncate_a_little}


def recordings(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    whole = _write_recordings(folder)
    common = [name for name in whole if name[:2] in COMMON]
    lengths = {name: _count_samples(path) for name, path in whole.items()}
    for number in range(count):
        rng = stream(seed, RECORDINGS, number)
        names = common if rng.integers(2) else list(whole)
        name = names[int(rng.integers(len(names)))]
        kind = damage.BINARY[int(rng.integers(len(damage.BINARY)))]
        path = folder / f"case-{number}"
        path.write_bytes(kind(whole[name].read_bytes(), rng))
        expected = lengths[name] if kind in CUTS and name[0] in WITH_LENGTH else None
        words = f"case {number}, {kind.__name__} of {' '.join(map(str, name))}"
        yield Case(RECORDINGS, words, partial(_count_samples, path), partial(_is_shorter, expected))


def _write_recordings(folder: Path) -> dict[tuple[str, str, int], Path]:
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


def _count_samples(path: Path) -> int | None:
    """How many samples both readers find; None where one of them says what is wrong."""
    found = []
    with suppress(Unusable):
        found.append(sum(len(block) for block in read_audio_blocks(path)))
    with suppress(Unusable):
        found.append(len(decode_audio(str(path))[0]))
    return min(found) if len(found) == 2 else None


def _is_shorter(expected: int | None, found: object) -> bool:
    return expected is not None and isinstance(found, int) and found < expected


TABLES = "tables"
_DEEP, _HUGE = "[" * 3_000 + "]" * 3_000, "7" * 5_000
# What people, spreadsheets and hostile programs put into a cell.
CELLS = ("", " ", "\0", "..", "/", "/etc/passwd", "../" * 50 + "a.wav", "a" * 5_000, '"', "\ufeff", "é\u0301\U0001f600")
JSON_VALUES = (_DEEP, _HUGE, f"-{_HUGE}", "1e999", "NaN", "null", "true", "{}", '"\\ud800"', '"\\u0000"', '{"a":' * 900)


def tables(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    rows: list[dict[str, object]] = []
    for n, word in enumerate(words):
        soundfile.write(folder / f"{word}.wav", np.zeros(1_600, np.int16), 16_000)
        rows.append({"client_id": f"user-{n % 4}", "path": f"{word}.wav", "sentence": f"Say {word}.", "age": 30 + n})
    whole = {".tsv": _as_table(rows, "\t"), ".csv": _as_table(rows, ","), ".jsonl": _as_lines(rows)}
    kinds = (*damage.TEXT, _another_cell)
    for number in range(count):
        rng = stream(seed, TABLES, number)
        suffix = list(whole)[int(rng.integers(len(whole)))]
        kind = kinds[int(rng.integers(len(kinds)))]
        path = folder / f"train-{number}{suffix}"
        path.write_bytes(kind(whole[suffix], rng))
        yield Case(TABLES, f"case {number}, {kind.__name__} of a {suffix} file", partial(_read_table, path))


def _as_table(rows: list[dict[str, object]], delimiter: str) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def _as_lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _another_cell(data: bytes, rng: np.random.Generator) -> bytes:
    """Something unexpected in the place of one value."""
    if data.startswith(b"{"):
        value = JSON_VALUES[int(rng.integers(len(JSON_VALUES)))].encode()
        old = (b'"one.wav"', b'"user-1"', b'"Say six."', b"33")[int(rng.integers(4))]
        return data.replace(old, value)
    value = CELLS[int(rng.integers(len(CELLS)))].encode()
    old = (b"one.wav", b"user-1", b"Say six.", b"33", b"path")[int(rng.integers(5))]
    return data.replace(old, value)


def _read_table(path: Path) -> object:
    """All that is understood; None where something was counted as unusable."""
    corpus = tsv.read_tsv([path])
    rendered = [corpus.render(speaker) for speaker in corpus.speakers]
    hold_out_speakers(corpus, {"test": 1}, seed=1)
    problems = [problem for speaker in rendered for problem in speaker.problems]
    if problems or any(not kind.is_kept for kind in corpus.problems.counts):
        return None
    return [(speaker.name, [utterance.text for utterance in speaker.utterances]) for speaker in rendered]


SIZES = "sizes of synthetic corpora"
USERS = (-1, 0, 1, 3, 7, 40, 1_000, 1_000_001, 10**9, 10**12, 2**63, 10**30)
HOURS = (None, -1.0, 0.0, 5e-324, 1e-300, 1e-9, 1e-3, 0.1, 1.0, 40.0, 1e5, 1e9, 1e300, float("inf"), float("nan"))


def corpus_sizes(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    for number in range(count):
        rng = stream(seed, SIZES, number)
        task = list(synthetic.PRESETS)[int(rng.integers(len(synthetic.PRESETS)))]
        users, hours = USERS[int(rng.integers(len(USERS)))], HOURS[int(rng.integers(len(HOURS)))]
        words = f"case {number}, {task} of users={users}, hours={hours}"
        yield Case(SIZES, words, partial(_count_speakers, task, users, hours, seed, folder / "store"))


def _count_speakers(task: str, users: int, hours: float | None, seed: int, out: Path) -> int:
    return len(synthetic.read_synthetic(task, users=users, hours=hours, seed=seed, out=out).speakers)
