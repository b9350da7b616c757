"""UserLibri: LibriSpeech's test speech by user, `audio_data/<split>/speaker-<S>-book-<B>/`.

A user is one speaker reading one book, as Breiner et al. (2022) group them; the metadata names the speaker.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sottovoce.data.corpora.corpus import Corpus, ProblemKind, ProblemLog, Speaker
from sottovoce.data.corpora.librispeech import list_transcribed_clips
from sottovoce.data.corpora.listing import choose_splits, list_subfolders, wrong_layout
from sottovoce.data.corpora.rendering import make_file_corpus

_USER = re.compile(r"speaker-(?P<speaker>.+)-book-(?P<book>.+)")
_LAYOUT = "audio_data/<split>/speaker-<S>-book-<B>/, as in UserLibri/audio_data/test-clean/speaker-121-book-1041/"


def read_userlibri(
    root: str | Path, *, splits: Sequence[str] | None = None, language: str = "en", strict: bool = False
) -> Corpus[Speaker]:
    """UserLibri under `root`: the folder `audio_data`, the one that holds it, or that one's parent."""
    log = ProblemLog(strict=strict)
    base = _audio_data(Path(root))
    folders = {split: base / split for split in choose_splits(_splits_in(base), splits, where=base)}
    speakers = [
        Speaker(user, split, list_transcribed_clips([path], log), match.groupdict())
        for split, folder in folders.items()
        for user, path, match in _users_in(folder)
    ]
    _report_absent_users(base / "metadata.tsv", folders, log)
    return make_file_corpus("userlibri", language=language, speakers=speakers, folders=folders.values(), log=log)


def _audio_data(root: Path) -> Path:
    if root.is_dir():
        for base in (root, root / "audio_data", *sorted(root.glob("*/audio_data"))):
            if base.is_dir() and _splits_in(base):
                return base
    raise wrong_layout(root, corpus="UserLibri", expected=_LAYOUT)


def _splits_in(folder: Path) -> list[str]:
    return [entry.name for entry in list_subfolders(folder) if next(_users_in(Path(entry.path)), None)]


def _users_in(folder: Path) -> Iterator[tuple[str, str, re.Match[str]]]:
    for entry in list_subfolders(folder):
        if match := _USER.fullmatch(entry.name):
            yield entry.name, entry.path, match


def _report_absent_users(metadata: Path, folders: dict[str, Path], log: ProblemLog) -> None:
    """Users that metadata.tsv lists for a split we read, but that have no folder there."""
    if not metadata.is_file():
        return
    for line in metadata.read_text(encoding="utf-8-sig", errors="replace").splitlines()[1:]:
        user, _, rest = line.partition("\t")
        split = rest.partition("\t")[0]  # "clean" for the folder "test-clean"
        folder = next((path for name, path in folders.items() if name.endswith(split)), None)
        if split and folder is not None and not (folder / user).is_dir():
            log.add(ProblemKind.MISSING_AUDIO, folder / user, "listed in metadata.tsv")
