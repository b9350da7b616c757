"""Libri-Light and MLS as they lie on disk, to the letter, out of any speech."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 16_000
Sound = NDArray[np.int16]
Voices = Callable[[int, int], list[Sound]]  # so many stretches of voice, the same for the same first number
FAIRIES, CRIMES = "sea_fairies_0812_librivox_64kb_mp3", "celebrated_crimes_vol_3_librivox_64kb_mp3"


def noise(seed: int, count: int) -> list[Sound]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-2_000, 2_000, rng.integers(RATE, 9 * RATE)).astype(np.int16) for _ in range(count)]


def recorded(data: Path) -> Voices:
    """Utterances of LibriSpeech."""
    speakers = sorted((data / "librispeech-mini/LibriSpeech/test-other").iterdir())

    def voices(seed: int, count: int) -> list[Sound]:
        paths = sorted(speakers[seed % len(speakers)].glob("*/*.flac"))
        return [soundfile.read(path, dtype="int16")[0] for path in paths[:count]]

    return voices


@dataclass(frozen=True)
class Chapter:
    """A chapter as it was written: its sound, and where there is voice, in samples."""

    path: Path
    sound: Sound
    voiced: list[tuple[int, int]]


def write_chapter(folder: Path, name: str, voices: Sequence[Sound], **changes: Any) -> Chapter:
    """A whole chapter with pauses of 0.6 s, and its JSON with all fields of Libri-Light's; None leaves one out."""
    pause = np.zeros(int(0.6 * RATE), dtype=np.int16)
    pieces, voiced, at = [pause], [], len(pause)
    for voice in voices:
        voiced.append((at, at + len(voice)))
        pieces += [voice, pause]
        at += len(voice) + len(pause)
    folder.mkdir(parents=True, exist_ok=True)
    sound = np.concatenate(pieces)
    soundfile.write(folder / f"{name}.flac", sound, RATE, subtype="PCM_16")
    described = {
        "speaker": folder.parent.name,
        "book_meta": {
            "id": "2512",
            "title": "Sea Fairies",
            "language": "English",
            "genre": ["Action & Adventure Fiction"],
            "url_librivox": "http://librivox.org/the-sea-fairies-by-l-frank-baum/",
            "authors": [{"id": "406", "first_name": "L. Frank", "last_name": "Baum"}],
            "Dramatic Readings": False,
            "meta_genre": "Literature",
        },
        "snr": 11.2345,
        "voice_activity": [[start / RATE, end / RATE] for start, end in voiced],
        "file_length_sec": len(sound) / RATE,
    } | changes
    (folder / f"{name}.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    return Chapter(folder / f"{name}.flac", sound, voiced)


def librilight(root: Path, voices: Voices) -> dict[str, list[Chapter]]:
    """Two speakers of `large` and one of `small`, written in any order; their chapters in order of time."""
    chapters = {
        (book, name): write_chapter(root / "large/100" / book, name, voices(number, 4))
        for number, (book, name) in enumerate(
            [
                (FAIRIES, "10_baum_sea_fairies_64kb"),
                (FAIRIES, "02_baum_sea_fairies_64kb"),
                (FAIRIES, "01_baum_sea_fairies_64kb"),
                (CRIMES, "celebratedcrimes_2-3_dumas_64kb"),
                (CRIMES, "celebratedcrimes_1-25_dumas_64kb"),
                (CRIMES, "celebratedcrimes_1-4_dumas_64kb"),
            ]
        )
    }
    return {
        "large/100": [
            chapters[CRIMES, "celebratedcrimes_1-4_dumas_64kb"],
            chapters[CRIMES, "celebratedcrimes_1-25_dumas_64kb"],
            chapters[CRIMES, "celebratedcrimes_2-3_dumas_64kb"],
            chapters[FAIRIES, "01_baum_sea_fairies_64kb"],
            chapters[FAIRIES, "02_baum_sea_fairies_64kb"],
            chapters[FAIRIES, "10_baum_sea_fairies_64kb"],
        ],
        "large/20": [write_chapter(root / "large/20/essay_librivox", "essayoncriticism_01_pope_64kb", voices(7, 2))],
        "small/7": [write_chapter(root / "small/7/poems_librivox", "poems_1_64kb", voices(8, 1))],
    }


URL = "http://www.archive.org/download/book_0710_librivox/{}_64kb.mp3"
# Book 10003 as it is: its numbers do not follow its chapters.
FRENCH = {
    "1001_10003_000000": ("book_05", 12.5, "chapitre cinq"),
    "1001_10003_000001": ("book_03", 300.25, "chapitre trois plus tard"),
    "1001_10003_000002": ("book_10", 1.0, "chapitre dix"),
    "1001_10003_000003": ("book_03", 20.75, "chapitre trois"),
    "1001_9876_000000": ("book_12", 3.0, "un autre livre"),
}
IN_TIME = [
    "1001_9876_000000",
    "1001_10003_000003",
    "1001_10003_000001",
    "1001_10003_000000",
    "1001_10003_000002",
]


def mls(root: Path, voices: Voices, *, suffix: str = "flac") -> Mapping[str, Sound]:
    """French MLS: one speaker of train and one of dev; the samples of each utterance."""
    sounds = dict(zip(FRENCH, voices(1, 5), strict=True)) | {"2002_555_000000": voices(2, 1)[0]}
    write_mls_split(root / "train", FRENCH, sounds, suffix=suffix)
    write_mls_split(root / "dev", {"2002_555_000000": ("b_1", 0.0, "l'été")}, sounds, suffix=suffix)
    limited = root / "train/limited_supervision"
    for name, ids in {"9hr": IN_TIME[:2], "1hr/0": IN_TIME[2:3], "1hr/1": IN_TIME[3:4]}.items():
        (limited / name).mkdir(parents=True)
        (limited / name / "handles.txt").write_text("".join(f"{id}\n" for id in ids))
    rows = [
        "1001     |     F     | train | 12.345 | 10003 | Un livre | Chapitre 05",
        "2002 | M | dev | 1.0 | 555 | B | 1",
    ]
    header = " SPEAKER   |   GENDER   | PARTITION | MINUTES |  BOOK ID  | TITLE | CHAPTER "
    (root / "metainfo.txt").write_text("\n".join([header, *rows]) + "\n")
    return sounds


def write_mls_split(
    split: Path, said: Mapping[str, tuple[str, float, str]], sounds: Mapping[str, Sound], *, suffix: str
) -> None:
    for id in said:
        speaker, book, _ = id.split("_")
        (split / "audio" / speaker / book).mkdir(parents=True, exist_ok=True)
        path = split / "audio" / speaker / book / f"{id}.{suffix}"
        if suffix == "opus":
            soundfile.write(path, sounds[id], RATE, format="OGG", subtype="OPUS")
        else:
            soundfile.write(path, sounds[id], RATE, subtype="PCM_16")
    lines = [f"{id}\t{text}\n" for id, (_, _, text) in said.items()]
    (split / "transcripts.txt").write_text("".join(lines))
    rows = [f"{id}\t{URL.format(file)}\t{at}\t{at + len(sounds[id]) / RATE}\n" for id, (file, at, _) in said.items()]
    (split / "segments.txt").write_text("".join(rows))
