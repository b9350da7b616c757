"""LibriSpeech: `<split>/<speaker>/<chapter>/<speaker>-<chapter>.trans.txt` beside the chapter's audio files."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from sottovoce.data.corpora.corpus import Clip, Corpus, Metadata, ProblemKind, ProblemLog, Speaker
from sottovoce.data.corpora.listing import (
    GENDERS,
    NO_METADATA,
    choose_splits,
    find_base_folder,
    list_audio_files,
    list_subfolders,
    natural_key,
    read_numbered_lines,
)
from sottovoce.data.corpora.rendering import make_file_corpus

TRANSCRIPT_SUFFIX = ".trans.txt"
_LAYOUT = "<split>/<speaker>/<chapter>/<speaker>-<chapter>.trans.txt, as in LibriSpeech/train-clean-100/19/198/"
_SPLIT_NAME = re.compile(r"(train|dev|test)-")


def read_librispeech(
    root: str | Path,
    *,
    splits: Sequence[str] | None = None,
    language: str = "en",
    in_time: bool = False,
    strict: bool = False,
) -> Corpus[Speaker]:
    """LibriSpeech under `root`, the folder that holds the splits or its parent; all splits unless some are named.

    SPEAKERS.TXT, where it lies beside the splits, gives each speaker's gender. `in_time` orders a speaker's utterances
    by the numbers of chapter and utterance; else they are in alphabetical order of their ids.
    """
    log = ProblemLog(strict=strict)
    base = find_base_folder(Path(root), _holds_librispeech, corpus="LibriSpeech", expected=_LAYOUT)
    people = _read_speakers_file(base / "SPEAKERS.TXT", log)
    folders = {split: base / split for split in choose_splits(_splits_in(base), splits, where=base)}
    speakers = []
    for split, folder in folders.items():
        for entry in list_subfolders(folder):
            # The speaker's own folder should hold chapters only; a recording that strayed there is reported.
            chapters = [entry.path, *(chapter.path for chapter in list_subfolders(entry.path))]
            clips = list_transcribed_clips(chapters, log)
            if in_time:
                clips.sort(key=lambda clip: natural_key(clip.id))
            speakers.append(Speaker(entry.name, split, clips, people.get(entry.name, NO_METADATA), in_time))
    return make_file_corpus("librispeech", language=language, speakers=speakers, folders=folders.values(), log=log)


def list_transcribed_clips(folders: Iterable[str], log: ProblemLog) -> list[Clip]:
    """The clips in `folders` that have both audio and a line in one of the folder's `*.trans.txt`, by id."""
    return sorted((clip for folder in folders for clip in _folder_clips(folder, log)), key=lambda clip: clip.id)


def _folder_clips(folder: str, log: ProblemLog) -> Iterator[Clip]:
    audio = list_audio_files(folder, log)
    seen = set()
    for transcript in sorted(name for name in os.listdir(folder) if name.endswith(TRANSCRIPT_SUFFIX)):
        for where, line in read_numbered_lines(os.path.join(folder, transcript), log):
            id, _, text = line.strip().partition(" ")
            if id in seen:
                log.add(ProblemKind.DUPLICATE_ROW, where, id)
                continue
            seen.add(id)
            if "/" in id or os.sep in id:
                log.add(ProblemKind.PATH_ESCAPES, where, id)
            elif id not in audio:
                log.add(ProblemKind.MISSING_AUDIO, where, id)
            elif not text.strip():
                log.add(ProblemKind.MISSING_TEXT, where, id)
            else:
                yield Clip(id, os.path.join(folder, audio[id]), text.strip(), _chapter(id))
    for id in sorted(audio.keys() - seen):
        log.add(ProblemKind.MISSING_TEXT, os.path.join(folder, audio[id]))


def _chapter(id: str) -> Metadata:
    parts = id.split("-")  # <speaker>-<chapter>-<utterance>
    return _chapter_metadata(parts[1]) if len(parts) == 3 else NO_METADATA


@cache
def _chapter_metadata(chapter: str) -> Metadata:
    """One dictionary for all clips of a chapter."""
    return {"chapter": chapter}


def _holds_librispeech(folder: Path) -> bool:
    return any(_has_transcripts(Path(entry.path)) for entry in list_subfolders(folder))


def _splits_in(folder: Path) -> list[str]:
    # By name too: a split that has lost all its transcripts must be reported, not overlooked.
    return [
        entry.name
        for entry in list_subfolders(folder)
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
        if len(cells) < 3 or cells[1] not in GENDERS:
            log.add(ProblemKind.MALFORMED_ROW, f"{path}:{number}", "expected ID | F or M | SUBSET")
            continue
        people[cells[0]] = {"gender": GENDERS[cells[1]], "subset": cells[2]}
    return people
