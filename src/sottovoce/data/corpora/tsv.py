"""A plain manifest: a TSV, CSV or JSONL file with a user and an audio path in every row.

Nothing but the tables is read here, so a million rows are listed in seconds; missing or broken audio is found when
it is rendered.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Clip, Corpus, Metadata, ProblemKind, ProblemLog, Speaker, Unusable
from sottovoce.data.corpora.listing import NO_METADATA, check_paths_inside, resolve_audio_root, resolve_inside
from sottovoce.data.corpora.rendering import LONGEST_SECONDS, make_file_corpus
from sottovoce.data.corpora.tables import column_position, open_table

CLIPS = "clips"
# What is known of the person, and the names that its column has had in Common Voice.
_PERSONAL = {"gender": ("gender",), "age": ("age",), "accent": ("accents", "accent")}
_GENDERS = {"female_feminine": "female", "male_masculine": "male"}  # Common Voice's words from release 17 on
_OTHER_TEXT_NAMES = ("text", "transcript", "transcription")
_NEMO_CALLS_IT = "_manifest"  # train_manifest.json
_SPLIT_LIKE = re.compile(r"(train|dev|test|val|valid|validation|validated|eval)([-_.].*)?")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column holds what; Common Voice's names by default. `text=None`: no transcripts.

    Where a row has a `start`, it is a part of its file, `duration` seconds long.
    """

    user: str = "client_id"
    path: str = "path"
    text: str | None = "sentence"
    split: str | None = None
    start: str | None = None
    duration: str | None = None


# NeMo's manifests are JSON lines.
NEMO = Columns(user="speaker", path="audio_filepath", text="text", start="offset", duration="duration")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One table, the folders in which its audio may lie, and the split of its rows unless a column names it."""

    table: Path
    audio: Sequence[str]
    split: str
    id_prefix: str = ""


def read_tsv(
    manifests: str | Path | Sequence[str | Path],
    *,
    columns: Columns | None = None,
    language: str = "en",
    split: str | None = None,
    audio_root: str | Path | None = None,
    strict: bool = False,
) -> Corpus[Speaker]:
    """One or several manifests, with their clips beside them or under `clips/`; or all in the one `audio_root`.

    The split of a row is its split column, else `split`, else the file's name where that sounds like one
    (train.tsv), else "train". Without a text column the corpus is unlabelled.
    """
    log = ProblemLog(strict=strict)
    paths = [Path(manifests)] if isinstance(manifests, str | Path) else [Path(path) for path in manifests]
    if not paths:
        raise InputError("manifests=[] names no file; expected at least one .tsv, .csv or .jsonl")
    folders = [os.path.abspath(path.parent) for path in paths]
    common = os.path.commonpath(folders)
    root = resolve_audio_root(audio_root)
    listed = [
        Manifest(
            table=path,
            audio=(root or folder, os.path.join(root or folder, CLIPS)),
            split=split or infer_split(path.stem.removesuffix(_NEMO_CALLS_IT) if path.suffix == ".json" else path.stem),
            id_prefix="" if root is not None or folder == common else os.path.relpath(folder, common) + "/",
        )
        for path, folder in zip(paths, folders, strict=True)
    ]
    speakers = list_speakers(listed, columns=columns or Columns(), log=log)
    check_paths_inside(speakers, listed[0].audio[0], log)
    name = os.path.basename(common) or "tsv"
    audio = {folder for manifest in listed for folder in manifest.audio}
    return make_file_corpus(name, language=language, speakers=speakers, folders=audio, log=log)


def infer_split(name: str) -> str:
    """The split that a file or folder of this name holds: `name` itself where it sounds like one.

    >>> infer_split("test_clean"), infer_split("people")
    ('test_clean', 'train')
    """
    return name if _SPLIT_LIKE.fullmatch(name) else "train"


def list_speakers(manifests: Iterable[Manifest], *, columns: Columns, log: ProblemLog) -> list[Speaker]:
    """Everybody in `manifests`. Of several rows for one recording the first counts, and the others are logged."""
    found: dict[tuple[str, str], _Rows] = {}
    seen: set[str] = set()
    for manifest in manifests:
        _list_manifest(manifest, columns=columns, found=found, seen=seen, log=log)
    return [
        Speaker(name, split, sorted(rows.clips, key=lambda clip: clip.id), _personal_metadata(rows.personal))
        for (split, name), rows in found.items()
    ]


@dataclass(slots=True)
class _Rows:
    """What the tables say of one speaker."""

    clips: list[Clip] = field(default_factory=list)
    personal: list[tuple[str, ...]] = field(default_factory=list)


def _list_manifest(
    manifest: Manifest, *, columns: Columns, found: dict[tuple[str, str], _Rows], seen: set[str], log: ProblemLog
) -> None:
    header, rows = open_table(manifest.table, log)
    at = _find_columns(header, columns, table=manifest.table)
    locate = _locator(manifest.audio)
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}
    for number, cells in rows:
        try:
            user = _required(cells, at.user, columns.user)
            split = manifest.split if at.split is None else _required(cells, at.split, str(columns.split))
            # Before the clip: a user with no usable clip is counted too.
            of_user = found.get((split, user)) or found.setdefault((split, user), _Rows())
            name = resolve_inside(_required(cells, at.path, columns.path), folder=manifest.audio[0])
            clip = _clip(cells, at, id=manifest.id_prefix + _stem(name), path=locate(name))
            if clip.id in seen:
                raise Unusable(ProblemKind.DUPLICATE_ROW, clip.id)
        except Unusable as reason:
            log.add(reason.kind, f"{manifest.table}:{number}", reason.detail)
            continue
        seen.add(clip.id)
        of_user.clips.append(clip)
        personal = tuple(_cell(cells, position) for position in at.personal)
        if any(personal):
            of_user.personal.append(shared.setdefault(personal, personal))


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where the columns stand in one table; None: it has no such column."""

    user: int
    path: int
    text: int | None
    split: int | None
    chapter: int | None
    start: int | None
    duration: int | None
    personal: tuple[int | None, ...]


def _find_columns(header: Sequence[str], columns: Columns, *, table: Path) -> _Positions:
    def known(*names: str) -> int | None:
        return next((header.index(name) for name in names if name in header), None)

    start = None if columns.start is None else known(columns.start)
    return _Positions(
        user=column_position(header, columns.user, role="user", path=table, option="--user-column"),
        # Only a table of one's own has paths under any name.
        path=column_position(
            header,
            columns.path,
            role="audio path",
            path=table,
            option="--path-column" if columns.path == Columns.path else None,
        ),
        text=_text_position(header, columns, table=table),
        split=None if columns.split is None else column_position(header, columns.split, role="split", path=table),
        chapter=known("chapter"),
        start=start,
        duration=None if start is None else column_position(header, str(columns.duration), role="duration", path=table),
        personal=tuple(known(*names) for names in _PERSONAL.values()),
    )


def _text_position(header: Sequence[str], columns: Columns, *, table: Path) -> int | None:
    """The text column. A table without one is unlabelled, but never because its name was not guessed."""
    if columns.text is None:
        return None
    if columns.text == Columns.text and columns.text not in header:
        other = next((name for name in _OTHER_TEXT_NAMES if name in header), None)
        if other is None:
            return None
        raise InputError(
            f"{table}: no column {columns.text!r} for the text, but one called {other!r}: "
            "name the one meant with --text-column"
        )
    return column_position(header, columns.text, role="text", path=table, option="--text-column")


def _clip(cells: Sequence[str], at: _Positions, *, id: str, path: str) -> Clip:
    text = None if at.text is None else cells[at.text]
    if text is not None and not text.strip():
        raise Unusable(ProblemKind.MISSING_TEXT, id)
    chapter = _cell(cells, at.chapter)
    metadata = {"chapter": chapter} if chapter else NO_METADATA
    if not (start := _cell(cells, at.start)):
        return Clip(id, path, text, metadata)
    seconds = parse_segment(start, duration=_cell(cells, at.duration))
    return Clip(f"{id}-{round(1000 * seconds[0]):08}", path, text, metadata, seconds)


def parse_segment(start: str, *, duration: str = "", end: str = "") -> tuple[float, float]:
    """From where to where a part of a file lies, in seconds; `Unusable` where these are no such numbers."""
    try:
        begins = float(start)
        ends = float(end) if end else begins + float(duration)
    except ValueError:
        begins, ends = math.nan, math.nan
    if not 0 <= begins < ends <= LONGEST_SECONDS:
        raise Unusable(
            ProblemKind.MALFORMED_ROW, f"a segment from {start} s" + (f" to {end} s" if end else f", {duration} s")
        )
    return begins, ends


def _cell(cells: Sequence[str], position: int | None) -> str:
    return "" if position is None else cells[position].strip()


def _required(cells: Sequence[str], position: int, column: str) -> str:
    cell = cells[position].strip()
    if not cell:
        raise Unusable(ProblemKind.EMPTY_ROW, f"no {column}")
    return cell


def _stem(name: str) -> str:
    return os.path.splitext(name.removeprefix(CLIPS + "/"))[0]


def _locator(folders: Sequence[str]) -> Callable[[str], str]:
    """Finds which of `folders` a file lies in, asking the disk once for every subfolder that holds one."""
    known: dict[str, str] = {}

    def locate(name: str) -> str:
        subfolder = os.path.dirname(name)
        folder = known.get(subfolder)
        if folder is None:
            folder = next((folder for folder in folders if os.path.lexists(f"{folder}/{name}")), None)
            if folder is None:
                return f"{folders[0]}/{name}"  # reported as missing when it is read
            known[subfolder] = folder
        return f"{folder}/{name}"

    return locate


def _personal_metadata(rows: Sequence[tuple[str, ...]]) -> Metadata:
    """For each fact the value that most rows give; of two given equally often the first in the alphabet."""
    if not rows:
        return NO_METADATA
    metadata = {}
    for fact, values in zip(_PERSONAL, zip(*rows, strict=True), strict=True):
        counts = Counter(value for value in values if value)
        if counts:
            metadata[fact] = min(counts, key=lambda value: (-counts[value], value))
    if "gender" in metadata:
        metadata["gender"] = _GENDERS.get(metadata["gender"], metadata["gender"])
    return metadata
