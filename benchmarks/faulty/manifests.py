"""Damaged tables of clips (TSV, CSV, JSONL), listed and rendered as `prepare tsv` does."""

import csv
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import soundfile

from faulty import damage
from faulty.children import Case
from sottovoce.base.seeds import stream
from sottovoce.corpora import tsv
from sottovoce.corpora.holdout import hold_out

WHAT = "tables"
_DEEP, _HUGE = "[" * 3_000 + "]" * 3_000, "7" * 5_000
# What people, spreadsheets and hostile programs put into a cell.
CELLS = ("", " ", "\0", "..", "/", "/etc/passwd", "../" * 50 + "a.wav", "a" * 5_000, '"', "\ufeff", "é\u0301\U0001f600")
JSON_VALUES = (_DEEP, _HUGE, f"-{_HUGE}", "1e999", "NaN", "null", "true", "{}", '"\\ud800"', '"\\u0000"', '{"a":' * 900)


def cases(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    rows: list[dict[str, object]] = []
    for n, word in enumerate(words):
        soundfile.write(folder / f"{word}.wav", np.zeros(1_600, np.int16), 16_000)
        rows.append({"client_id": f"user-{n % 4}", "path": f"{word}.wav", "sentence": f"Say {word}.", "age": 30 + n})
    whole = {".tsv": _table(rows, "\t"), ".csv": _table(rows, ","), ".jsonl": _lines(rows)}
    kinds = (*damage.TEXT, _another_cell)
    for number in range(count):
        rng = stream(seed, WHAT, number)
        suffix = list(whole)[int(rng.integers(len(whole)))]
        kind = kinds[int(rng.integers(len(kinds)))]
        path = folder / f"train-{number}{suffix}"
        path.write_bytes(kind(whole[suffix], rng))
        yield Case(WHAT, f"case {number}, {kind.__name__} of a {suffix} file", partial(_read, path))


def _table(rows: list[dict[str, object]], delimiter: str) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def _lines(rows: list[dict[str, object]]) -> bytes:
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


def _read(path: Path) -> object:
    """All that is understood; None where something was counted as unusable."""
    corpus = tsv.read([path])
    rendered = [corpus.render(speaker) for speaker in corpus.speakers]
    hold_out(corpus, {"test": 1}, seed=1)
    said = [problem for speaker in rendered for problem in speaker.problems]
    if said or any(not kind.is_kept for kind in corpus.problems.counts):
        return None
    return [(speaker.name, [utterance.text for utterance in speaker.utterances]) for speaker in rendered]
