"""Mozilla Common Voice, any release from 6.1 on: `<language>/{train,dev,test,validated,…}.tsv` and `clips/`."""

import os
from collections.abc import Sequence
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, Speaker
from sottovoce.data.corpora.listing import wrong_layout
from sottovoce.data.corpora.rendering import make_file_corpus
from sottovoce.data.corpora.tables import open_table
from sottovoce.data.corpora.tsv import CLIPS, Columns, Manifest, list_speakers
from sottovoce.data.text.spelling import Spelling

_STANDARD_SPLITS = ("train", "dev", "test")
_FALLBACK_SPLIT = "validated"  # every usable clip, of which the standard splits are a part
_LAYOUT = "<language>/{train,dev,test,validated}.tsv beside <language>/clips/, as in cv-corpus-17.0-2024-03-15/en/"


def read_commonvoice(
    root: str | Path,
    *,
    splits: Sequence[str] | None = None,
    language: str | None = None,
    spelling: Spelling = Spelling.OURS,
    as_released: bool = False,
    strict: bool = False,
) -> Corpus[Speaker]:
    """One language of Common Voice; `root` is its folder, or the release's if that holds `language` or just one.

    The splits are train, dev and test, as far as they are there, else validated. A user is a `client_id`. `spelling`
    says by whose rules texts are spelled; by those of the papers' codes nobody is left out for a digit. `as_released`
    is short for those of Pelikan et al. (2025).
    """
    if as_released and spelling not in (Spelling.OURS, Spelling.PELIKAN):
        raise InputError(f"spelling={spelling} with as_released, which is pelikan2025: expected one of them")
    log = ProblemLog(strict=strict)
    folder = _language_folder(Path(root), language)
    tables = [folder / f"{split}.tsv" for split in _chosen_splits(folder, splits)]
    clips = os.path.abspath(folder / CLIPS)
    manifests = [Manifest(table=table, audio=(clips,), split=table.stem) for table in tables]
    speakers = list_speakers(manifests, columns=Columns(), log=log)
    return make_file_corpus(
        "commonvoice",
        language=language or _locale(tables) or folder.name,
        speakers=speakers,
        folders=[clips],
        log=log,
        spelling=Spelling.PELIKAN if as_released else Spelling(spelling),
    )


def _language_folder(root: Path, language: str | None) -> Path:
    if _is_language_folder(root):
        return root
    inside = (
        {entry.name: entry for entry in sorted(root.iterdir()) if _is_language_folder(entry)} if root.is_dir() else {}
    )
    if not inside:
        raise wrong_layout(root, corpus="Common Voice", expected=_LAYOUT)
    if language is None and len(inside) == 1:
        return next(iter(inside.values()))
    if language not in inside:
        raise InputError(f"{root}: language={language!r}; expected one of {', '.join(inside)}")
    return inside[language]


def _is_language_folder(folder: Path) -> bool:
    return (folder / CLIPS).is_dir() and any(folder.glob("*.tsv"))


def _chosen_splits(folder: Path, wanted: Sequence[str] | None) -> Sequence[str]:
    present = sorted(path.stem for path in folder.glob("*.tsv"))
    for split in wanted or ():
        if split not in present:
            raise InputError(f"split={split!r} is not in {folder}: expected one of {', '.join(present)}")
    if wanted is not None:
        return list(dict.fromkeys(wanted))
    standard = [split for split in _STANDARD_SPLITS if split in present]
    if not standard and _FALLBACK_SPLIT not in present:
        raise InputError(f"{folder} has no train, dev, test or validated.tsv: name a split of {', '.join(present)}")
    return standard or [_FALLBACK_SPLIT]


def _locale(tables: Sequence[Path]) -> str | None:
    """The language that the first row names, where the release has that column."""
    for table in tables:
        header, rows = open_table(table, ProblemLog())
        if "locale" in header and (first := next(rows, None)):
            return first[1][header.index("locale")] or None
    return None
