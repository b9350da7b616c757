"""One person's folder of recordings: audio files, each with its text beside it under the same name.

    kitchen/lights.wav    kitchen/lights.txt

or one table at its top, as `corpora.tsv` reads it. Without any text it is speech without text.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file
from sottovoce.data.corpora import tsv
from sottovoce.data.corpora.corpus import Clip, Corpus, Problem, ProblemKind, ProblemLog, Speaker, Unusable
from sottovoce.data.corpora.listing import AUDIO_SUFFIXES, natural_key, wrong_layout
from sottovoce.data.corpora.rendering import make_file_corpus

TABLES = (".tsv", ".csv", ".jsonl")
TEXT = ".txt"
_LARGEST_TEXT = 1 << 16  # bytes of one utterance's text
_LAYOUT = "audio files with their texts beside them (lights.wav, lights.txt), or one table of them (.tsv, .csv, .jsonl)"


def read_folder(
    root: str | Path, *, user: str | None = None, language: str = "en", split: str = "train", strict: bool = False
) -> Corpus[Speaker]:
    """The recordings under `root`, all of one person called `user`: the folder's own name unless given.

    A table says itself who they are.
    """
    base = Path(root)
    if not base.is_dir():
        raise wrong_layout(base, corpus="recordings", expected=_LAYOUT)
    tables = sorted(entry for entry in base.iterdir() if entry.suffix in TABLES and not entry.name.startswith("."))
    if len(tables) == 1:
        return tsv.read_tsv(tables[0], language=language, split=split, strict=strict)
    found = list(list_files(base))
    audio = [name for name in found if name.lower().endswith(AUDIO_SUFFIXES)]
    if tables or not audio:
        raise wrong_layout(base, corpus="recordings", expected=_LAYOUT)
    log = ProblemLog(strict=strict)
    texts = {name.removesuffix(TEXT) for name in found if name.endswith(TEXT)}
    speaker = Speaker(user or base.resolve().name, split, _clips(base, audio, texts, log))
    return make_file_corpus("recordings", language=language, speakers=[speaker], folders=[base], log=log)


def list_files(base: Path) -> Iterator[str]:
    """All files below `base`, but for hidden ones, by their paths below it in one order."""
    for folder, below, names in os.walk(base):
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural_key)
        inside = os.path.relpath(folder, base)
        for name in sorted(names, key=natural_key):
            if not name.startswith("."):
                yield os.path.normpath(os.path.join(inside, name))


def _clips(base: Path, audio: list[str], texts: set[str], log: ProblemLog) -> list[Clip]:
    """A recording each, with its text where any has one."""
    clips: dict[str, Clip] = {}
    for name in audio:
        path, stem = str(base / name), os.path.splitext(name)[0]
        try:
            if stem in clips:
                raise Unusable(ProblemKind.DUPLICATE_ROW, stem)
            clips[stem] = Clip(stem, path, _text(base / f"{stem}{TEXT}", known=stem in texts) if texts else None)
        except Unusable as reason:
            log.add(reason.kind, path, reason.detail)
        if not texts:
            log.add(ProblemKind.UNLABELLED, path)
    stems = {os.path.splitext(name)[0] for name in audio}
    log.extend(Problem(ProblemKind.MISSING_AUDIO, str(base / f"{stem}{TEXT}")) for stem in sorted(texts - stems))
    return sorted(clips.values(), key=lambda clip: clip.id)


def _text(path: Path, *, known: bool) -> str:
    if not known:
        raise Unusable(ProblemKind.MISSING_TEXT, f"expected {path.name} beside it")
    try:
        check_file(path)
        with open(path, "rb") as file:
            content = file.read(_LARGEST_TEXT + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, InputError):
        raise Unusable(ProblemKind.MISSING_TEXT, f"{path.name} cannot be read as UTF-8") from None
    if len(content) > _LARGEST_TEXT:
        raise Unusable(ProblemKind.MISSING_TEXT, f"{path.name} has more than {_LARGEST_TEXT:,} bytes")
    if not text.strip():
        raise Unusable(ProblemKind.MISSING_TEXT, f"{path.name} is empty")
    return " ".join(text.split())
