"""LibriSpeech: `<split>/<speaker>/<chapter>/<speaker>-<chapter>.trans.txt` beside the chapter's audio files."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_lines
from sottovoce.corpora.corpus import Clip, Corpus, Metadata, Speaker
from sottovoce.corpora.natural import natural_key
from sottovoce.corpora.problems import Kind, Problem, ProblemLog
from sottovoce.corpora.recordings import AUDIO_SUFFIXES, NO_METADATA, file_corpus, wrong_layout

TRANSCRIPT_SUFFIX = ".trans.txt"
_LAYOUT = "<split>/<speaker>/<chapter>/<speaker>-<chapter>.trans.txt, as in LibriSpeech/train-clean-100/19/198/"
_SPLIT_NAME = re.compile(r"(train|dev|test)-")
_GENDERS = {"F": "female", "M": "male"}


def read(
    root: str | Path,
    *,
    splits: Sequence[str] | None = None,
    language: str = "en",
    in_time: bool = False,
    strict: bool = False,
) -> Corpus[Speaker]:
    """LibriSpeech under `root`, the folder that holds the splits or its parent; all splits unless some are named.

    SPEAKERS.TXT, where it lies beside the splits, gives each speaker's gender. `in_time` orders a speaker's utterances
    by the numbers of chapter and utterance; else they are in the alphabet's order of their ids, as they always were.
    """
    log = ProblemLog(strict=strict)
    base = _base_folder(Path(root))
    people = _read_speakers_file(base / "SPEAKERS.TXT", log)
    folders = {split: base / split for split in chosen_splits(_splits_in(base), splits, where=base)}
    speakers = [
        Speaker(
            entry.name,
            split,
            sorted(clips, key=lambda clip: natural_key(clip.id)) if in_time else clips,
            people.get(entry.name, NO_METADATA),
            in_time,
        )
        for split, folder in folders.items()
        for entry in subfolders(folder)
        for clips in [_speaker_clips(entry.path, log)]
    ]
    return file_corpus("librispeech", language=language, speakers=speakers, folders=folders.values(), log=log)


def _speaker_clips(folder: str, log: ProblemLog) -> list[Clip]:
    # The speaker's own folder should hold chapters only; a recording that strayed there is reported, not passed over.
    return transcribed_clips([folder, *(chapter.path for chapter in subfolders(folder))], log)


def chosen_splits(present: Sequence[str], wanted: Sequence[str] | None, *, where: Path) -> Sequence[str]:
    """`wanted`, or every split there is."""
    for split in wanted or ():
        if split not in present:
            raise InputError(f"split={split!r} is not in {where}: expected one of {', '.join(present)}")
    return present if wanted is None else list(dict.fromkeys(wanted))


def subfolders(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)


def transcribed_clips(folders: Iterable[str], log: ProblemLog) -> list[Clip]:
    """The clips in `folders` that have both audio and a line in one of the folder's `*.trans.txt`, by id."""
    return sorted((clip for folder in folders for clip in _folder_clips(folder, log)), key=lambda clip: clip.id)


def audio_files(folder: str, log: ProblemLog) -> dict[str, str]:
    """The names of the audio files in `folder` by what they are called without their ending."""
    audio: dict[str, str] = {}
    for name in sorted(os.listdir(folder)):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in AUDIO_SUFFIXES and audio.setdefault(stem, name) != name:
            log.add(Problem(Kind.DUPLICATE_ROW, os.path.join(folder, name), f"{audio[stem]} is the same utterance"))
    return audio


def _folder_clips(folder: str, log: ProblemLog) -> Iterator[Clip]:
    audio = audio_files(folder, log)
    seen = set()
    for transcript in sorted(os.listdir(folder)):
        if not transcript.endswith(TRANSCRIPT_SUFFIX):
            continue
        for where, id, text in _lines(os.path.join(folder, transcript), log):
            if id in seen:
                log.add(Problem(Kind.DUPLICATE_ROW, where, id))
                continue
            seen.add(id)
            if "/" in id or os.sep in id:
                log.add(Problem(Kind.PATH_ESCAPES, where, id))
            elif id not in audio:
                log.add(Problem(Kind.MISSING_AUDIO, where, id))
            elif not text:
                log.add(Problem(Kind.MISSING_TEXT, where, id))
            else:
                yield Clip(id, os.path.join(folder, audio[id]), text, _chapter(id))
    for id in sorted(audio.keys() - seen):
        log.add(Problem(Kind.MISSING_TEXT, os.path.join(folder, audio[id])))


def _lines(path: str, log: ProblemLog) -> Iterator[tuple[str, str, str]]:
    """Where, utterance id and text for every line of a transcript."""
    check_file(path)
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(read_lines(file, path=path), start=1):
            where = f"{path}:{number}"
            id, _, text = line.strip().partition(" ")
            if "\ufffd" in line:
                log.add(Problem(Kind.MALFORMED_ROW, where, "not UTF-8"))
            elif not id:
                log.add(Problem(Kind.EMPTY_ROW, where))
            else:
                yield where, id, text.strip()


def _chapter(id: str) -> Metadata:
    parts = id.split("-")  # <speaker>-<chapter>-<utterance>
    return _chapter_metadata(parts[1]) if len(parts) == 3 else NO_METADATA


@cache
def _chapter_metadata(chapter: str) -> Metadata:
    """One dictionary for all clips of a chapter."""
    return {"chapter": chapter}


def _base_folder(root: Path) -> Path:
    """The folder that holds the splits: `root` itself or the one folder in it that does."""
    if root.is_dir():
        if _holds_librispeech(root):
            return root
        inner = [folder for entry in subfolders(root) if _holds_librispeech(folder := Path(entry.path))]
        if len(inner) == 1:
            return inner[0]
        if inner:
            raise InputError(f"{root} holds LibriSpeech more than once: expected one of {', '.join(map(str, inner))}")
    raise wrong_layout(root, corpus="LibriSpeech", expected=_LAYOUT)


def _holds_librispeech(folder: Path) -> bool:
    return any(_has_transcripts(Path(entry.path)) for entry in subfolders(folder))


def _splits_in(folder: Path) -> list[str]:
    # By name too: a split that has lost all its transcripts must be reported, not overlooked.
    return [
        entry.name
        for entry in subfolders(folder)
        if _SPLIT_NAME.match(entry.name) or _has_transcripts(Path(entry.path))
    ]


def _has_transcripts(split: Path) -> bool:
    # UserLibri's tree is as deep, but its transcripts are not named after their folders.
    return any(
        transcript.name == "-".join(transcript.parts[-3:-1]) + TRANSCRIPT_SUFFIX
        for transcript in split.glob(f"*/*/*{TRANSCRIPT_SUFFIX}")
    )


def _read_speakers_file(path: Path, log: ProblemLog) -> dict[str, Metadata]:
    """Gender and subset by reader. The reader's name, in the last column, is not ours to keep."""
    people: dict[str, Metadata] = {}
    if not path.is_file():
        return people
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith(";"):
            continue
        cells = [cell.strip() for cell in line.split("|", maxsplit=4)]  # a reader's name may hold a "|"
        if len(cells) < 3 or cells[1] not in _GENDERS:
            log.add(Problem(Kind.MALFORMED_ROW, f"{path}:{number}", "expected ID | F or M | SUBSET"))
            continue
        people[cells[0]] = {"gender": _GENDERS[cells[1]], "subset": cells[2]}
    return people
