"""Multilingual LibriSpeech: `<split>/{transcripts.txt, segments.txt, audio/<speaker>/<book>/<id>.{flac,opus}}`.

The numbers in ids are not in time order. `segments.txt` has it: from which LibriVox file an utterance is, and where.
"""

import math
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Clip, Corpus, Metadata, Problem, ProblemKind, ProblemLog, Speaker
from sottovoce.data.corpora.listing import (
    GENDERS,
    NO_METADATA,
    choose_splits,
    find_base_folder,
    list_audio_files,
    list_books,
    list_subfolders,
    natural_key,
    read_numbered_lines,
)
from sottovoce.data.corpora.rendering import make_file_corpus

_STANDARD_SPLITS = ("train", "dev", "test")
_LIMITED = "limited_supervision"
_LANGUAGES = {
    "dutch": "nl",
    "english": "en",
    "french": "fr",
    "german": "de",
    "italian": "it",
    "polish": "pl",
    "portuguese": "pt",
    "spanish": "es",
}
_LAYOUT = "{train,dev,test}/{transcripts.txt, audio/<speaker>/<book>/}, as in mls_french/train/"


def read_mls(
    root: str | Path,
    *,
    splits: Sequence[str] | None = None,
    language: str | None = None,
    point: bool = False,
    strict: bool = False,
) -> Corpus[Speaker]:
    """One language of MLS, FLAC or Opus; its folder's name tells which, unless `language` does.

    The splits are train, dev and test, as far as they are there. Parts of train by the corpus's own lists are to be
    named: train-9hr, train-1hr, train-1hr-0 to train-1hr-5. `metainfo.txt` gives each speaker's gender. `point`: the
    store is to point into the FLAC files and not to copy them.
    """
    log = ProblemLog(strict=strict)
    base = find_base_folder(Path(root), _is_language_folder, corpus="MLS", expected=_LAYOUT)
    whole = [split for split in _STANDARD_SPLITS if (base / split / "audio").is_dir()]
    lists = _limited_lists(base / "train")
    chosen = whole if splits is None else choose_splits([*whole, *lists], splits, where=base)
    people = _read_metainfo(base / "metainfo.txt", log)
    speakers = [
        Speaker(name, split, clips, people.get(name, NO_METADATA), in_time)
        for split in chosen
        for name, clips, in_time in (
            _speakers(base / split, log) if split in whole else _speakers(base / "train", log, lists=lists[split])
        )
    ]
    return make_file_corpus(
        "mls",
        language=language or _language(base),
        speakers=speakers,
        folders=[base / split / "audio" for split in whole],
        log=log,
        root=base if point else None,
    )


def _is_language_folder(folder: Path) -> bool:
    return any(
        (folder / split / "audio").is_dir() and (folder / split / "transcripts.txt").is_file()
        for split in _STANDARD_SPLITS
    )


def _language(base: Path) -> str:
    name = base.resolve().name
    for word, code in _LANGUAGES.items():
        if word in name.split("_"):
            return code
    raise InputError(f"{base}: cannot tell its language from its name (mls_french, say); expected --language")


def _speakers(
    split: Path, log: ProblemLog, *, lists: Sequence[Path] | None = None
) -> Iterator[tuple[str, list[Clip], bool]]:
    """Everybody in a split, their clips in the order of time, and whether that is known of all of them.

    With `lists` only the utterances named there, and whoever spoke one of them.
    """
    listed = None if lists is None else {id for path in lists for _, (id, *_) in _rows(path, log)}
    texts = _read_transcripts(split / "transcripts.txt", log)
    times = _read_segments(split / "segments.txt", log)
    absent = set(texts if listed is None else listed)
    for speaker in list_subfolders(split / "audio"):
        clips = []
        for book, folder in list_books(speaker):
            for id, name in list_audio_files(folder, log).items():
                if listed is not None and id not in listed:
                    continue
                absent.discard(id)
                path = os.path.join(folder, name)
                if id not in texts:
                    log.add(ProblemKind.UNLABELLED, path)
                clips.append(Clip(id, path, texts.get(id), _book_metadata(book)))
        if clips or listed is None:
            yield speaker.name, *_in_time(clips, times, log)
    where = str(split / "transcripts.txt") if lists is None else " and ".join(map(str, lists))
    log.extend(Problem(ProblemKind.MISSING_AUDIO, where, id) for id in sorted(absent))


@cache
def _book_metadata(book: str) -> Metadata:
    """One dictionary for all clips of a book."""
    return {"book": book}


def _limited_lists(train: Path) -> dict[str, list[Path]]:
    """The parts of train that the corpus lists for training with few labels, by the name of their split."""
    lists: dict[str, list[Path]] = {}
    for path in sorted((train / _LIMITED).glob("**/handles.txt"), key=lambda path: natural_key(str(path))):
        parts = path.parent.relative_to(train / _LIMITED).parts  # 9hr; 1hr, 0
        for depth in range(1, len(parts) + 1):
            lists.setdefault("-".join(("train", *parts[:depth])), []).append(path)
    return lists


def _read_transcripts(path: Path, log: ProblemLog) -> dict[str, str]:
    texts: dict[str, str] = {}
    for where, cells in _rows(path, log):
        if len(cells) != 2:
            log.add(ProblemKind.MALFORMED_ROW, where, "expected an id, a TAB and the text")
        elif cells[0] in texts:
            log.add(ProblemKind.DUPLICATE_ROW, where, cells[0])
        elif not cells[1].strip():
            log.add(ProblemKind.EMPTY_ROW, where, cells[0])
        else:
            texts[cells[0]] = cells[1]
    return texts


Time = tuple[Any, ...]


def _read_segments(path: Path, log: ProblemLog) -> dict[str, Time]:
    """Each utterance's place in time within its book: the chapter's file and the second it begins at."""
    times: dict[str, Time] = {}
    if not path.is_file():
        log.add(ProblemKind.NO_TIME, str(path), "no such file: nobody's utterances are in order of time")
    for where, cells in _rows(path, log):
        start = _seconds(cells[2]) if len(cells) == 4 else None
        if start is None:
            log.add(ProblemKind.MALFORMED_ROW, where, "expected an id, a URL, start and end, with a TAB between")
        elif cells[0] in times:
            log.add(ProblemKind.DUPLICATE_ROW, where, cells[0])
        else:
            chapter = unquote(cells[1].rstrip("/").rpartition("/")[2])
            times[cells[0]] = (natural_key(chapter), start)
    return times


def _seconds(cell: str) -> float | None:
    try:
        seconds = float(cell)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def _in_time(clips: list[Clip], times: dict[str, Time], log: ProblemLog) -> tuple[list[Clip], bool]:
    """By book and place in it; those without a place come last, by id, and then it is no order of time."""
    placed = [clip for clip in clips if clip.id in times]
    lost = sorted((clip for clip in clips if clip.id not in times), key=lambda clip: clip.id)
    placed.sort(key=lambda clip: (natural_key(clip.metadata["book"]), *times[clip.id], clip.id))
    if times:  # else it was said once for all
        log.extend(Problem(ProblemKind.NO_TIME, clip.path, "segments.txt lacks it") for clip in lost)
    return placed + lost, not lost


def _read_metainfo(path: Path, log: ProblemLog) -> dict[str, Metadata]:
    """Gender by speaker: SPEAKER | GENDER | PARTITION | …, one row per chapter and a first line with the names."""
    people: dict[str, Metadata] = {}
    for where, cells in _rows(path, log, separator="|"):
        if len(cells) < 3 or (gender := GENDERS.get(cells[1].strip())) is None:
            if not where.endswith(":1"):
                log.add(ProblemKind.MALFORMED_ROW, where, "expected SPEAKER | F or M | PARTITION | …")
            continue
        people[cells[0].strip()] = {"gender": gender}
    return people


def _rows(path: Path, log: ProblemLog, *, separator: str = "\t") -> Iterator[tuple[str, list[str]]]:
    """Where, and the cells, for every line of a table; none where there is no such file."""
    for where, line in read_numbered_lines(path, log) if path.is_file() else ():
        cells = [cell.strip() for cell in line.split(separator)]
        if any(cells):
            yield where, cells
        else:
            log.add(ProblemKind.EMPTY_ROW, where)
