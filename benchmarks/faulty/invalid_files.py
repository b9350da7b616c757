"""Files that are something else: pipes, devices and sockets in a file's place, archives, streams and whole corpora."""

import json
import os
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import soundfile

from faulty import damage, fixtures
from faulty.cases import Case
from faulty.commands import Asked, command_case
from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE

SPECIAL, ARCHIVES, STREAMS, CORPORA = "pipes, devices and the like", "archives of runs", "WAV streams", "corpora"
KEPT = Path(__file__).parents[2] / "results" / "guide-model.zip"
SPARSE = 1 << 41  # bytes: more than any memory

# What may lie in a file's place.


def _socket(path: Path) -> None:
    """Bound in its own folder: the whole path may be too long."""
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(before)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


KINDS: Mapping[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "an empty device": lambda path: path.symlink_to("/dev/null"),
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a file of 2 TiB": _sparse,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}

# Which file, and the command that reads it; FILE stands for the folder of the case.
INPUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("FILE/x.wav", ("transcribe", "models/ctc_transformer", "FILE/x.wav")),
    ("FILE/x.wav", ("transcribe", "models/ctc_transformer", "FILE")),
    ("FILE/x", ("transcribe", "FILE/x", "sound.wav")),
    ("FILE/x", ("evaluate", "FILE/x", "--on", "store")),
    ("FILE/x", ("evaluate", "models/ctc_transformer", "--on", "FILE/x")),
    ("FILE/x", ("evaluate", "models/ctc_transformer", "--on", "store:test", "--beam-width", "2", "--words", "FILE/x")),
    ("FILE/x", ("evaluate", "models/ctc_transformer", "--on", "store:test", "--beam-width", "2", "--lm", "FILE/x")),
    ("FILE/x.yaml", ("recipes", "show", "FILE/x.yaml")),
    ("FILE/x.yaml", ("run", "FILE/x.yaml", "--estimate")),
    ("FILE/x.yaml", ("audit", "FILE/x.yaml")),
    ("FILE/x", ("ledger", "FILE/x")),
    ("FILE/ledger.jsonl", ("ledger", "FILE")),
    ("FILE/ledger.jsonl", ("ledger", "FILE/ledger.jsonl")),
    ("FILE/x", ("report", "FILE/x", "--out", "FILE/page.html")),
    ("FILE/x.zip", ("report", "FILE/x.zip", "--out", "FILE/page.html")),
    ("FILE/x.zip", ("ledger", "FILE/x.zip")),
    ("FILE/x", ("compare", "FILE/x", "models/ctc_transformer", "--on", "store:test")),
    ("FILE/x", ("stats", "FILE/x")),
    ("FILE/x", ("tokens", "FILE/x", "--out", "FILE/pieces")),
    ("FILE/x.tsv", ("prepare", "tsv", "FILE/x.tsv", "--split", "train", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x.csv", ("prepare", "tsv", "FILE/x.csv", "--split", "train", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x.json", ("prepare", "nemo", "FILE/x.json", "--split", "train", "--out", "FILE/store", "--workers", "1")),
    ("FILE/wav.scp", ("prepare", "kaldi", "FILE", "--split", "train", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x.wav", ("prepare", "folder", "FILE", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x", ("prepare", "librispeech", "FILE/x", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x", ("prepare", "librilight", "FILE/x", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x", ("prepare", "mls", "FILE/x", "--out", "FILE/store", "--workers", "1")),
    ("FILE/x", ("keys", "show", "FILE/x")),
    ("FILE/node.key", ("keys", "renew", "FILE")),
    ("FILE/x", ("keys", "revoke", "FILE/x", "--authority", "keys/authority")),
    ("FILE/x", ("keys", "server", "FILE/new", "--authority", "FILE/x", "--host", "localhost")),
    ("FILE/x", ("import", "speechbrain", "FILE/x", "--language", "fr", "--out", "FILE/model")),
    ("FILE/x", ("node", "show", "FILE/x")),
    ("FILE/x", ("run", "demo-clipping/global", "federation.seed_model=FILE/x", "--estimate")),
    ("FILE/x", ("run", "demo-clipping/global", "federation.seed_model=null", "tokens.file=FILE/x", "--estimate")),
)
# Folders in which one file is something else.
INSIDE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(
        ("models/ctc_transformer", file, ("export", "FILE/whole", "--out", "FILE/out"))
        for file in ("config.json", "model.safetensors", "tokens.json")
    ),
    *(
        ("theirs", file, ("import", "speechbrain", "FILE/whole", "--language", "fr", "--out", "FILE/model"))
        for file in ("model.ckpt", "tokenizer.ckpt", "normalizer.ckpt")
    ),
    *(("keys/server", file, ("keys", "show", "FILE/whole")) for file in ("server.pem", "orders.pem")),
    *(("run", file, ("ledger", "FILE/whole")) for file in ("ledger.jsonl", "results.json", "metrics.jsonl")),
    *(
        ("run", file, ("report", "FILE/whole", "--out", "FILE/page.html"))
        for file in ("config.yaml", "results.json", "metrics.jsonl", "diagnostics.jsonl", "ledger.jsonl")
    ),
)


def special(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Every input of every command once with each of these in its place, as far as `count` goes."""
    fixtures.build(folder)
    with zipfile.ZipFile(KEPT) as kept:
        kept.extractall(folder / "kept")
    run = next(path.parent for path in (folder / "kept").rglob("config.yaml"))
    shutil.copytree(run, folder / "run")
    places = [("", file, words) for file, words in INPUTS] + [
        (whole, file, words) for whole, file, words in INSIDE if (folder / whole / file).exists()
    ]
    stored = (path.relative_to(folder / "store").as_posix() for path in sorted((folder / "store").rglob("*")))
    places += [
        ("store", file, ("stats", "FILE/whole", "--check"))
        for file in stored
        if (folder / "store" / file).is_file() and not file.startswith(".")
    ]
    combined = [(place, kind) for place in places for kind in KINDS]
    order = stream(seed, SPECIAL).permutation(len(combined))
    for number, chosen in enumerate(order[:count]):
        (whole, file, words), kind = combined[int(chosen)]
        place = folder / f"case-{number}"
        place.mkdir()
        if whole:
            shutil.copytree(folder / whole, place / "whole", symlinks=True)
            target = place / "whole" / file
            target.unlink()
        else:
            target = Path(file.replace("FILE", str(place)))
        KINDS[kind](target)
        asked = tuple(word.replace("FILE", str(place)) for word in words)
        # A link that leads nowhere is no file: what may be missing may be so. A report shows what there is of a run.
        due = not kind.startswith(("a link", "a folder")) and whole != "run"
        label = f"case {number}, {kind} as {file.removeprefix('FILE/')}"
        yield command_case(SPECIAL, label, Asked(asked, folder), due=due)


# Archives.


def archives(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """An archive of a run that was damaged, packed otherwise, or made to harm."""
    whole = KEPT.read_bytes()
    for number in range(count):
        rng = stream(seed, ARCHIVES, number)
        path = folder / f"run-{number}.zip"
        due = number % 3 == 0
        if due:
            kind = list(PACKED)[int(rng.integers(len(PACKED)))]
            PACKED[kind](path, rng)
            label = kind
        elif number % 3 == 1:
            way = damage.BINARY[int(rng.integers(len(damage.BINARY)))]
            path.write_bytes(way(whole, rng))
            label = way.__name__
        else:  # LZMA and bzip2, whose streams end in errors of their own
            method = (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)[int(rng.integers(2))]
            _repacked(path, method)
            data = bytearray(path.read_bytes())
            for _ in range(3):
                data[int(rng.integers(30, len(data) // 2))] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            label, due = f"damaged, packed by method {method}", True
        command = ("ledger",) if rng.integers(2) else ("report", "--out", folder / f"page-{number}.html")
        yield command_case(ARCHIVES, f"case {number}, {label}", Asked((*command, path), folder), due=due)


def _repacked(path: Path, method: int) -> None:
    with zipfile.ZipFile(KEPT) as kept, zipfile.ZipFile(path, "w", method) as packed:
        for entry in kept.infolist():
            packed.writestr(entry.filename, kept.read(entry), method)


def _with_entry(name: str, content: bytes = b"x") -> Callable[[Path, np.random.Generator], None]:
    def write(path: Path, _: np.random.Generator) -> None:
        with zipfile.ZipFile(path, "w") as packed:
            packed.writestr("run/config.yaml", "about: x")
            packed.writestr(name, content, zipfile.ZIP_DEFLATED)

    return write


def _bomb(path: Path, _: np.random.Generator) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("run/config.yaml", bytes(1 << 29))


def _crowd(path: Path, _: np.random.Generator) -> None:
    with zipfile.ZipFile(path, "w") as packed:
        for number in range(60_000):
            packed.writestr(f"run/{number}", b"")


PACKED: Mapping[str, Callable[[Path, np.random.Generator], object]] = {
    "a path that leads out": _with_entry("../../x"),
    "an absolute path": _with_entry("/tmp/x"),
    "a backslash": _with_entry("..\\x"),
    "a name of 5,000 letters": _with_entry("run/" + "a" * 5_000),
    "a file within a file": _with_entry("run/config.yaml/x"),
    "half a gigabyte of zeros": _bomb,
    "60,000 files": _crowd,
    "LZMA": lambda path, _: _repacked(path, zipfile.ZIP_LZMA),
    "bzip2": lambda path, _: _repacked(path, zipfile.ZIP_BZIP2),
    "nothing": lambda path, _: path.write_bytes(b""),
    "no archive": lambda path, rng: path.write_bytes(rng.bytes(1_000)),
}


# Streams.


def streams(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """WAV headers as pipes bring them, right and wrong, through `transcribe --stream`."""
    fixtures.build(folder)
    samples = stream(seed, "samples").integers(-9_000, 9_000, SAMPLE_RATE // 4).astype("<i2").tobytes()
    right = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, SAMPLE_RATE, 2 * SAMPLE_RATE, 2, 16))
    data = _chunk(b"data", samples)
    for number in range(count):
        rng = stream(seed, STREAMS, number)
        kind = list(STREAM_KINDS)[int(rng.integers(len(STREAM_KINDS)))]
        piped, due = STREAM_KINDS[kind](right, data, rng)
        words = ("transcribe", "models/transducer", "-", "--stream")
        yield command_case(STREAMS, f"case {number}, {kind}", Asked(words, folder, piped), due=due)


def _chunk(name: bytes, content: bytes, length: int | None = None) -> bytes:
    return name + struct.pack("<I", len(content) if length is None else length) + content + b"\0" * (len(content) % 2)


def _wav(*chunks: bytes, form: bytes = b"WAVE") -> bytes:
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + form + b"".join(chunks)


def _format(rng: np.random.Generator) -> bytes:
    values = [int(rng.choice([0, 1, 2, 3, 8, 16, 24, 32, 8_000, 44_100, 0xFFFE])) for _ in range(6)]
    return _chunk(b"fmt ", struct.pack("<HHIIHH", *values))


Streamed = tuple[bytes, bool]
STREAM_KINDS: Mapping[str, Callable[[bytes, bytes, np.random.Generator], Streamed]] = {
    "without a format": lambda right, data, rng: (_wav(data), True),
    "another format": lambda right, data, rng: (_wav(_format(rng), data), True),
    "a format of two bytes": lambda right, data, rng: (_wav(_chunk(b"fmt ", b"\1\0"), data), True),
    "no samples": lambda right, data, rng: (_wav(right), True),
    "not WAVE": lambda right, data, rng: (_wav(right, data, form=rng.bytes(4)), True),
    "20 MB of something else": lambda right, data, rng: (_wav(_chunk(b"LIST", bytes(20 << 20)), right, data), True),
    "a chunk of 4 GB that is not there": lambda right, data, rng: (_wav(_chunk(b"junk", b"x", 0xFFFFFFF0)), True),
    "a format of 4 GB": lambda right, data, rng: (_wav(_chunk(b"fmt ", right[8:], 0xFFFFFFF0), data), True),
    "a small chunk before": lambda right, data, rng: (_wav(_chunk(b"LIST", rng.bytes(99)), right, data), False),
    "samples that announce more": lambda right, data, rng: (
        _wav(right, data[:4] + struct.pack("<I", int(rng.integers(2**32))) + data[8:]),
        False,
    ),
    "cut": lambda right, data, rng: (_wav(right, data)[: int(rng.integers(4, 44))], True),
    "flipped": lambda right, data, rng: (damage.flip_header(_wav(right, data), rng), False),
    "raw bytes": lambda right, data, rng: (rng.bytes(int(rng.integers(0, 5_000))), False),
}


# Corpora.

NUMBERS = (
    *("1e308", "-1e308", "1e999", "NaN", "-1", "0", "5e-324", "1e15", "9" * 300, "9" * 5_000, '"x"', "null", "[]"),
    *("Infinity", "-Infinity", "1e9", "1e18", "true", '""', "{}", '"1e308"', '"nan"', '"inf"'),
)
NAMES = (
    b"\xff\xfe",
    b"a\xffb",
    b"\xc3\x28",
    "é".encode("latin-1"),
    b"a\nb",
    b"a\tb",
    b"a\rb",
    b" ",
    b"-x",
    b"\x1b[31m",
)


def corpora(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Corpora with times that are none, and files whose names are no text, prepared whole."""
    makers = (_nemo, _librilight, _kaldi, _folder, _table, _librispeech)
    for number in range(count):
        rng = stream(seed, CORPORA, number)
        place = folder / f"corpus-{number}"
        place.mkdir()
        make = makers[number % len(makers)]
        words = make(place, rng)
        asked = Asked(
            (*words, "--out", place / "store", "--workers", "1", "--json"),
            folder,
            is_counted=lambda printed: bool(json.loads(printed)["problems"]),
        )
        yield command_case(CORPORA, f"case {number}, {make.__name__}", asked, due=False)


def _sound(path: Path | bytes, seconds: float = 0.5) -> None:
    samples = stream(1, "sound").integers(-9_000, 9_000, round(seconds * SAMPLE_RATE)).astype(np.int16)
    with open(path, "wb") as file:
        suffix = os.fsdecode(path).rpartition(".")[2].upper()
        soundfile.write(file, samples, SAMPLE_RATE, format=suffix if suffix in ("WAV", "FLAC") else "WAV")


def _pick(some: tuple[str, ...], rng: np.random.Generator) -> str:
    return some[int(rng.integers(len(some)))]


def _nemo(place: Path, rng: np.random.Generator) -> tuple[object, ...]:
    _sound(place / "call.wav", 2.0)
    good = '{"audio_filepath": "call.wav", "offset": 0.25, "duration": 0.5, "text": "Two", "speaker": "ann"}'
    offset, duration = _pick(NUMBERS, rng), _pick(NUMBERS, rng)
    offset, duration = (
        (offset, "0.5") if rng.integers(3) == 0 else ("0.5", duration) if rng.integers(2) else (offset, duration)
    )
    bad = (
        f'{{"audio_filepath": "call.wav", "offset": {offset}, "duration": {duration}, "text": "One", "speaker": "ann"}}'
    )
    (place / "train_manifest.json").write_text(f"{good}\n{bad}\n")
    return ("prepare", "nemo", place / "train_manifest.json")


def _librilight(place: Path, rng: np.random.Generator) -> tuple[object, ...]:
    chapters = place / "small" / "10" / "book_64kb"
    chapters.mkdir(parents=True)
    for name in ("one", "two"):
        _sound(chapters / f"{name}.flac", 2.0)
    start, end, snr = (_pick(NUMBERS, rng) for _ in range(3))
    (chapters / "one.json").write_text(f'{{"snr": {snr}, "voice_activity": [[0.1, 0.4], [{start}, {end}]]}}')
    (chapters / "two.json").write_text('{"snr": 11.2, "voice_activity": [[0.1, 1.4]]}')
    return ("prepare", "librilight", place)


def _kaldi(place: Path, rng: np.random.Generator) -> tuple[object, ...]:
    _sound(place / "call.wav", 2.0)
    start, end = (_pick(NUMBERS, rng).strip('"') or "-" for _ in range(2))
    (place / "wav.scp").write_text("call call.wav\n")
    (place / "segments").write_text(f"ann-1 call 0.1 0.5\nann-2 call {start} {end}\n")
    (place / "utt2spk").write_text("ann-1 ann\nann-2 ann\n")
    (place / "text").write_text("ann-1 one\nann-2 two\n")
    return ("prepare", "kaldi", place, "--split", "train")


def _named(place: Path, rng: np.random.Generator, ending: bytes) -> bytes:
    return os.path.join(os.fsencode(place), NAMES[int(rng.integers(len(NAMES)))] + ending)


def _folder(place: Path, rng: np.random.Generator) -> tuple[object, ...]:
    _sound(place / "good.wav")
    (place / "good.txt").write_text("Good day")
    name = _named(place, rng, b"")
    _sound(name + b".wav")
    with open(name + b".txt" if rng.integers(2) else _named(place, rng, b".txt"), "wb") as file:
        file.write(b"Hello" if rng.integers(2) else rng.bytes(20))
    return ("prepare", "folder", place, "--user", "ann")


def _table(place: Path, rng: np.random.Generator) -> tuple[object, ...]:
    name = NAMES[int(rng.integers(len(NAMES)))] + b".wav"
    _sound(os.path.join(os.fsencode(place), name))
    _sound(place / "good.wav")
    with open(place / "train.tsv", "wb") as file:
        file.write(b"client_id\tpath\tsentence\nann\tgood.wav\tGood day\nben\t" + name + b"\tHello\n")
    return ("prepare", "tsv", place / "train.tsv")


def _librispeech(place: Path, rng: np.random.Generator) -> tuple[object, ...]:
    chapter = place / "train-clean" / "19" / "198"
    chapter.mkdir(parents=True)
    _sound(chapter / "19-198-0000.flac")
    (chapter / "19-198.trans.txt").write_text("19-198-0000 GOOD DAY\n")
    _sound(_named(chapter, rng, b".flac"))
    odd = _named(place / "train-clean", rng, b"")
    os.makedirs(os.path.join(odd, b"1"))
    name = os.path.basename(odd)
    _sound(os.path.join(odd, b"1", name + b"-1-0000.flac"))
    with open(os.path.join(odd, b"1", name + b"-1.trans.txt"), "wb") as file:
        file.write(name + b"-1-0000 HELLO\n")
    return ("prepare", "librispeech", place)
