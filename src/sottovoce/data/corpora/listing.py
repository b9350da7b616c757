"""What corpus modules share while they list: folders, lines, names in their natural order, splits and hold-outs."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_lines
from sottovoce.base.seeds import keyed_order, name_key
from sottovoce.data.corpora.corpus import Corpus, Metadata, ProblemKind, ProblemLog, Speaker, Unusable

AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".opus", ".ogg")
NO_METADATA: Metadata = {}  # one for all: a million clips need not hold a million empty dictionaries
GENDERS = {"F": "female", "M": "male"}
TRAIN = "train"
NOT_UTF8 = "\ufffd"  # what a broken byte is read as
_NUMBER = re.compile(r"([0-9]+)")
_ENTRIES_SHOWN = 6


def natural_key(name: str) -> tuple[Any, ...]:
    """A key to sort names by, in which a run of digits counts as the number it is.

    >>> sorted(["10_end", "essay_02_pope", "9_end", "1-25", "essay_1_pope", "1-3"], key=natural_key)
    ['1-3', '1-25', '9_end', '10_end', 'essay_1_pope', 'essay_02_pope']
    """
    parts = _NUMBER.split(name)
    # Texts stand at even places and numbers at odd ones, so that like is compared with like. A number is its length
    # and its digits, which are not limited as those of an integer are.
    numbers = [(len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2])]
    return (*(item for pair in zip(parts[::2], [*numbers, (0, "")], strict=True) for item in pair), name)


def hold_out_speakers(corpus: Corpus[Speaker], counts: Mapping[str, int], *, seed: int) -> Corpus[Speaker]:
    """Move so many speakers, chosen by names and seed alone, whole into each split of `counts`; the others stay."""
    names = sorted({speaker.name for speaker in corpus.speakers})
    if any(count < 1 for count in counts.values()) or sum(counts.values()) >= len(names):
        wish = ", ".join(f"{split}={count}" for split, count in counts.items())
        raise InputError(f"hold_out {wish}: expected at least 1 each, and fewer in all than the {len(names)} speakers")
    queue = keyed_order(np.array([name_key(name) for name in names], dtype=np.uint64), seed, "hold out").tolist()
    split_of: dict[str, str] = {}
    for split, count in counts.items():
        split_of |= {names[queue.pop(0)]: split for _ in range(count)}
    moved = [replace(speaker, split=split_of.get(speaker.name, speaker.split)) for speaker in corpus.speakers]
    return replace(corpus, speakers=sorted(moved, key=lambda speaker: (speaker.split, speaker.name)))


def choose_split_for_hold_out(paths: Sequence[str | Path]) -> str | None:
    """The split of those who are not held out: train where all come from one file or folder, whatever it is called.

    Names of several say who is in which split, and stay: None.
    """
    return TRAIN if len(paths) == 1 else None


def choose_splits(present: Sequence[str], wanted: Sequence[str] | None, *, where: Path) -> Sequence[str]:
    """`wanted`, or every split there is."""
    for split in wanted or ():
        if split not in present:
            raise InputError(f"split={split!r} is not in {where}: expected one of {', '.join(present)}")
    return present if wanted is None else list(dict.fromkeys(wanted))


def find_base_folder(root: Path, is_base: Callable[[Path], bool], *, corpus: str, expected: str) -> Path:
    """The folder that holds the corpus: `root` itself, or the one folder in it that does."""
    if root.is_dir():
        if is_base(root):
            return root
        inner = [folder for entry in list_subfolders(root) if is_base(folder := Path(entry.path))]
        if len(inner) == 1:
            return inner[0]
        if inner:
            raise InputError(f"{root} holds {corpus} more than once: expected one of {', '.join(map(str, inner))}")
    raise wrong_layout(root, corpus=corpus, expected=expected)


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


def list_subfolders(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)


def list_books(speaker: os.DirEntry[str]) -> list[tuple[str, str]]:
    """Name and path of a speaker's books. What strayed into the speaker's own folder is a book without a name."""
    return [("", speaker.path), *((entry.name, entry.path) for entry in list_subfolders(speaker.path))]


def list_audio_files(folder: str, log: ProblemLog) -> dict[str, str]:
    """The names of the audio files in `folder` by what they are called without their ending."""
    audio: dict[str, str] = {}
    for name in sorted(os.listdir(folder)):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in AUDIO_SUFFIXES and audio.setdefault(stem, name) != name:
            log.add(ProblemKind.DUPLICATE_ROW, os.path.join(folder, name), f"{audio[stem]} is the same utterance")
    return audio


def read_numbered_lines(path: str | Path, log: ProblemLog) -> Iterator[tuple[str, str]]:
    """PATH:NUMBER and text of every line. Blank and broken ones are logged; a stray carriage return ends no line."""
    check_file(path)
    with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(read_lines(file, path=path), start=1):
            where = f"{path}:{number}"
            if NOT_UTF8 in line or "\0" in line:
                log.add(ProblemKind.MALFORMED_ROW, where, "not UTF-8")
            elif not line.strip():
                log.add(ProblemKind.EMPTY_ROW, where)
            else:
                yield where, line.rstrip("\r\n")


def resolve_inside(path: str, *, folder: str) -> str:
    """`path` relative to `folder`, `Unusable` where it leads out; links are followed later, when the file is opened."""
    if "/" not in path and path != "..":
        return path
    relative = os.path.relpath(path, folder) if os.path.isabs(path) else os.path.normpath(path)
    if relative.split(os.sep, 1)[0] == os.pardir:
        raise Unusable(ProblemKind.PATH_ESCAPES, path)
    return relative


def resolve_audio_root(root: str | Path | None) -> str | None:
    """The folder where a corpus's audio is said to lie, if anything is said."""
    if root is not None and not Path(root).is_dir():
        raise InputError(f"audio_root={root}: expected the folder where the audio lies")
    return None if root is None else os.path.abspath(root)


def check_paths_inside(speakers: Iterable[Speaker], folder: str, log: ProblemLog) -> None:
    """Where every path has led out of `folder`, say what would help."""
    if (count := log.counts[ProblemKind.PATH_ESCAPES]) and not any(speaker.clips for speaker in speakers):
        (first, *_) = log.examples[ProblemKind.PATH_ESCAPES]
        raise InputError(
            f"{first.where}: {first.detail} and {count - 1:,} other paths lead out of {folder}: "
            "--audio-root names the folder where the audio lies"
        )
