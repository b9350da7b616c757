"""Kaldi's data folders: `wav.scp`, `utt2spk`, and where there are any `text`, `segments` and `spk2gender`.

    wav.scp     RECORDING PATH               segments    UTTERANCE RECORDING START END
    utt2spk     UTTERANCE SPEAKER            text        UTTERANCE WORDS…

Without `segments` a recording is an utterance. What a `wav.scp` would have a shell do is not done.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Clip, Corpus, Problem, ProblemKind, ProblemLog, Speaker, Unusable
from sottovoce.data.corpora.listing import (
    NO_METADATA,
    check_paths_inside,
    read_numbered_lines,
    resolve_audio_root,
    resolve_inside,
    wrong_layout,
)
from sottovoce.data.corpora.rendering import make_file_corpus
from sottovoce.data.corpora.tsv import infer_split, parse_segment

SOUNDS, SPEAKERS, TEXTS, SEGMENTS, GENDERS = "wav.scp", "utt2spk", "text", "segments", "spk2gender"
_LAYOUT = f"{SOUNDS} and {SPEAKERS}, with {TEXTS} and {SEGMENTS} where there are any"
_GENDERS = {"m": "male", "f": "female"}


def read_kaldi(
    folders: str | Path | Sequence[str | Path],
    *,
    language: str = "en",
    split: str | None = None,
    audio_root: str | Path | None = None,
    strict: bool = False,
) -> Corpus[Speaker]:
    """One or several data folders, with their audio below them or all in the one `audio_root`.

    The split is `split`, else a folder's name where that sounds like one (data/test_clean), else "train".
    """
    places = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
    if not places:
        raise InputError("folders=[] names none; expected at least one data folder")
    log = ProblemLog(strict=strict)
    root = resolve_audio_root(audio_root)
    found: dict[tuple[str, str], Speaker] = {}
    seen: set[str] = set()
    for place in places:
        if not ((place / SOUNDS).is_file() and (place / SPEAKERS).is_file()):
            raise wrong_layout(place, corpus="Kaldi data", expected=_LAYOUT)
        called = split or infer_split(place.resolve().name)
        _list_folder(place, split=called, root=root or os.path.abspath(place), found=found, seen=seen, log=log)
    speakers = list(found.values())
    audio = [root] if root is not None else [os.path.abspath(place) for place in places]
    check_paths_inside(speakers, audio[0], log)
    return make_file_corpus(places[0].resolve().name, language=language, speakers=speakers, folders=audio, log=log)


def _list_folder(
    place: Path, *, split: str, root: str, found: dict[tuple[str, str], Speaker], seen: set[str], log: ProblemLog
) -> None:
    sounds, users = _read_table(place / SOUNDS, log), _read_table(place / SPEAKERS, log)
    texts = _read_table(place / TEXTS, log) if (place / TEXTS).is_file() else None
    genders = _read_table(place / GENDERS, log) if (place / GENDERS).is_file() else {}
    segmented = (place / SEGMENTS).is_file()
    utterances = _read_table(place / SEGMENTS, log) if segmented else {id: id for id in sounds}
    for id in sorted(utterances):
        try:
            user = users.get(id)
            if user is None:
                raise Unusable(ProblemKind.EMPTY_ROW, f"{id} has no speaker in {SPEAKERS}")
            # Before the clip: a user with no usable clip is counted too.
            speaker = found.setdefault((split, user), Speaker(user, split, [], _known(genders.get(user, ""))))
            if id in seen:
                raise Unusable(ProblemKind.DUPLICATE_ROW, id)
            recording, seconds = _part(utterances[id]) if segmented else (id, None)
            path = os.path.join(root, resolve_inside(_file(sounds.get(recording, ""), recording), folder=root))
            text = None if texts is None else texts.get(id, "")
            if text == "":
                raise Unusable(ProblemKind.MISSING_TEXT, id)
        except Unusable as reason:
            log.add(reason.kind, place / (SEGMENTS if segmented else SOUNDS), reason.detail)
            continue
        seen.add(id)
        assert isinstance(speaker.clips, list)
        speaker.clips.append(Clip(id, path, text, NO_METADATA, seconds))
    alone = sorted((texts or {}).keys() - utterances.keys())
    log.extend(Problem(ProblemKind.MISSING_AUDIO, str(place / TEXTS), id) for id in alone)


def _read_table(path: Path, log: ProblemLog) -> dict[str, str]:
    """What stands behind the first word of each line."""
    found: dict[str, str] = {}
    for where, line in read_numbered_lines(path, log):
        key, *rest = line.split(maxsplit=1)
        if key in found:
            log.add(ProblemKind.DUPLICATE_ROW, where, key)
        else:
            found[key] = rest[0].strip() if rest else ""
    return found


def _part(line: str) -> tuple[str, tuple[float, float]]:
    """The recording and the seconds of a line of `segments`, without its first word."""
    words = line.split()
    if len(words) != 3:
        raise Unusable(ProblemKind.MALFORMED_ROW, f"{line!r}: expected a recording, its start and its end")
    recording, start, end = words
    return recording, parse_segment(start, end=end)


def _file(entry: str, recording: str) -> str:
    """The audio file of an entry of `wav.scp`. A command that only decodes a FLAC file means that file."""
    if not entry:
        raise Unusable(ProblemKind.MISSING_AUDIO, f"{recording} is not in {SOUNDS}")
    if not entry.endswith("|"):
        return entry
    try:
        program, *words = shlex.split(entry[:-1])
    except ValueError:
        program, words = "", []
    files = [word for word in words if not word.startswith("-")]
    if os.path.basename(program) != "flac" or len(files) != 1:
        raise Unusable(
            ProblemKind.UNREADABLE_AUDIO, f"{recording} is a command, and none is run: expected an audio file"
        )
    return files[0]


def _known(gender: str) -> dict[str, str]:
    return {"gender": _GENDERS.get(gender, gender)} if gender else {}
