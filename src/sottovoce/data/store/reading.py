"""Reading a prepared corpus: open in O(1), read any one user without touching another."""

import mmap
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_digest, read_file
from sottovoce.base.parsing import ParseError, parse_json
from sottovoce.base.seeds import name_key
from sottovoce.data.corpora.corpus import SAMPLE_RATE, AudioFile
from sottovoce.data.corpora.flac import FileChanged, check_samples, check_unchanged, read_span
from sottovoce.data.store import layout
from sottovoce.data.text.spelling import Spelling

_BLOCK_BYTES = 1 << 20
Number = np.int64 | np.uint64 | np.bool_


@dataclass(frozen=True, slots=True)
class StoreUser:
    """One user of a store: `utterances` are the rows of their speech, `in_time` if in the order it was spoken."""

    row: int
    name: str
    split: str
    metadata: Mapping[str, str]
    utterances: range
    seconds: float
    in_time: bool = False


@dataclass(frozen=True, slots=True)
class Utterance:
    """One utterance; `text` is None where the corpus has none. Its samples are read when they are asked for."""

    row: int
    id: str
    text: str | None
    raw_text: str | None
    metadata: Mapping[str, str]
    seconds: float
    _store: "Store" = field(repr=False, compare=False)

    @property
    def samples(self) -> NDArray[np.int16]:
        return self._store.samples(self.row)


class Store:
    """A prepared corpus, packed by user and memory-mapped.

    `splits` maps names to rows of users; `user_count`, `utterance_count`, `language` and `digest` say what is in it.

    >>> store = Store("stores/crowd")                    # doctest: +SKIP
    >>> user = store.user(store.splits["train"][0])      # doctest: +SKIP
    >>> [store.utterance(row).text for row in user.utterances]      # doctest: +SKIP
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        header = _read_header(self.path)
        while True:
            try:
                return self._open(header)
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise InputError(f"no store at {self.path}: {layout.HEADER} is damaged ({error!r})") from None
            except (InputError, FileNotFoundError):
                # A `prepare` that ended just now has replaced the generation that we read of.
                header, stale = _read_header(self.path), header
                if header["generation"] == stale["generation"]:
                    raise

    def _open(self, header: dict[str, Any]) -> None:
        self.header: Mapping[str, Any] = header
        self.name: str = header["name"]
        self.language: str = header["language"]
        self.spelling: str = header.get("spelling", Spelling.OURS.value)  # by whose rules its texts are spelled
        self.digest: str = header["digest"]
        self.user_count: int = header["users"]
        self.utterance_count: int = header["utterances"]
        self.splits: dict[str, range] = {name: range(*rows) for name, rows in header["splits"].items()}
        self._split_starts = [rows.start for rows in self.splits.values()]
        self._split_names = list(self.splits)

        folder = self.path / header["generation"]
        for name, size in header["sizes"].items():
            _check_size(folder / name, size)
        users, utterances = self.user_count, self.utterance_count

        def column(name: str, length: int, dtype: type[Number] = np.int64) -> Any:
            return load_column(folder / name, dtype, length)

        self.audio_offsets: NDArray[np.int64] = column(layout.AUDIO_OFFSETS, utterances + 1)
        self.user_utterances: NDArray[np.int64] = column(layout.USER_UTTERANCES, users + 1)
        self.user_keys: NDArray[np.uint64] = column(layout.USER_KEYS, users, np.uint64)
        self.users_in_time: NDArray[np.bool_] = np.broadcast_to(np.False_, users)
        if layout.USERS_IN_TIME in header["sizes"]:
            self.users_in_time = column(layout.USERS_IN_TIME, users, np.bool_)
        self._user_order: NDArray[np.int64] = column(layout.USER_ORDER, users)
        self._utterance_offsets: NDArray[np.int64] = column(layout.UTTERANCE_OFFSETS, utterances + 1)
        self._user_offsets: NDArray[np.int64] = column(layout.USER_OFFSETS, users + 1)
        self.points: bool = header["version"] == layout.POINTING_VERSION
        if self.points:
            self._pointed = PointedAudio(folder, utterances=self.utterance_count, files=header["files"])
        else:
            self._samples: NDArray[np.int16] = np.frombuffer(map_file(folder / layout.AUDIO), dtype="<i2")
        self._utterances = map_file(folder / layout.UTTERANCES)
        self._users = map_file(folder / layout.USERS)

    def check(self, *, audio: bool = False) -> None:
        """Read what `prepare` wrote and compare: `InputError` for a file that was changed since.

        Names, texts and offsets are a small part of a store and checked wherever a run begins; the samples, which may
        be a whole disk, only with `audio`. Stores of releases that kept no checksums need only make sense.
        """
        for name, offsets, end in (
            (layout.AUDIO_OFFSETS, self.audio_offsets, None if self.points else len(self._samples)),
            (layout.USER_UTTERANCES, self.user_utterances, self.utterance_count),
            (layout.UTTERANCE_OFFSETS, self._utterance_offsets, len(self._utterances)),
            (layout.USER_OFFSETS, self._user_offsets, len(self._users)),
        ):
            end = int(offsets[-1]) if end is None else end
            if offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
                raise InputError(f"store {self.path} is damaged: {name} does not rise to {end:,}; prepare it again")
        if not ((self._user_order >= 0) & (self._user_order < self.user_count)).all():
            raise InputError(f"store {self.path} is damaged: {layout.USER_ORDER} names no users; prepare it again")
        for name, written in self.header.get("checksums", {}).items():
            path = self.path / self.header["generation"] / name
            if (audio or name != layout.AUDIO) and _checksum(path) != written:
                raise InputError(f"store is damaged: {path} was changed after it was written; prepare it again")
        if audio and self.points:
            self._pointed.check()

    def __reduce__(self) -> tuple[Callable[[Path, str], "Store"], tuple[Path, str]]:
        return (_reopened, (self.path, self.digest))  # another process maps the same files anew and shares their pages

    @property
    def seconds(self) -> float:
        """Seconds of speech in the whole store."""
        return int(self.audio_offsets[-1]) / SAMPLE_RATE

    def user(self, row: int) -> StoreUser:
        """The user in `row`, without their samples."""
        found = load_record(self._users, self._user_offsets, row)
        first, last = int(self.user_utterances[row]), int(self.user_utterances[row + 1])
        return StoreUser(
            row=row,
            name=found["name"],
            split=self._split_names[bisect_right(self._split_starts, row) - 1],
            metadata=found.get("metadata", {}),
            utterances=range(first, last),
            seconds=int(self.audio_offsets[last] - self.audio_offsets[first]) / SAMPLE_RATE,
            in_time=bool(self.users_in_time[row]),
        )

    def samples(self, row: int, *, start: int = 0, count: int | None = None) -> NDArray[np.int16]:
        """The samples of the utterance in `row`: a view, nothing is copied; or decoded, if the store points.

        With `start` and `count` so many of them, from there on; they must be there.
        """
        first, end = int(self.audio_offsets[row]) + start, int(self.audio_offsets[row + 1])
        if count is not None:
            end = min(end, first + count)
        if self.points:
            return self._pointed.samples(row, end - first, start=start)
        return self._samples[first:end]

    def utterance(self, row: int) -> Utterance:
        """The utterance in `row`, with its text."""
        found = load_record(self._utterances, self._utterance_offsets, row)
        text = found.get("text")
        return Utterance(
            row=row,
            id=found["id"],
            text=text,
            raw_text=found.get("raw_text", text),
            metadata=found.get("metadata", {}),
            seconds=int(self.audio_offsets[row + 1] - self.audio_offsets[row]) / SAMPLE_RATE,
            _store=self,
        )

    def find(self, name: str, *, split: str | None = None) -> StoreUser:
        """The user called `name` (in `split`, where one name occurs in several)."""
        key = np.uint64(name_key(name))
        place = int(np.searchsorted(self.user_keys, key, sorter=self._user_order))
        while place < self.user_count and self.user_keys[row := int(self._user_order[place])] == key:
            user = self.user(row)
            if user.name == name and split in (None, user.split):
                return user
            place += 1
        raise InputError(f"no user name={name!r}" + (f" in split={split!r}" if split else "") + f" in {self.path}")


def _reopened(path: Path, digest: str) -> Store:
    store = Store(path)
    if store.digest != digest:
        raise InputError(f"store {path} was prepared anew while it was in use: digest={store.digest}, was {digest}")
    return store


def _read_header(path: Path) -> dict[str, Any]:
    file = path / layout.HEADER
    try:
        header: dict[str, Any] = parse_json(read_file(file))
    except FileNotFoundError:
        found = "nothing is there" if not path.exists() else f"{path} has no {layout.HEADER}"
        raise InputError(f"no store at {path}: {found}; `sottovoce prepare … --out {path}` makes one") from None
    except NotADirectoryError:
        raise InputError(
            f"no store at {path}: it is a file, expected the folder that `sottovoce prepare` made"
        ) from None
    except (ParseError, OSError) as error:
        raise InputError(f"no store at {path}: {file} is not readable ({error})") from None
    if not isinstance(header, dict) or header.get("format") != layout.FORMAT:
        raise InputError(f"no store at {path}: {file} was not written by `sottovoce prepare`")
    if header.get("version") not in (layout.VERSION, layout.POINTING_VERSION):
        raise InputError(
            f"store {path} has format version={header.get('version')}, this release reads {layout.VERSION} and "
            f"{layout.POINTING_VERSION}: prepare it again"
        )
    if (rate := header.get("sample_rate")) != SAMPLE_RATE:
        raise InputError(f"store {path}: sample_rate={rate}, expected {SAMPLE_RATE}; prepare it anew")
    return check_digest(header, where=file)


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise InputError(f"store is damaged: {path} {state}, expected {size:,} bytes; prepare it again")


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found


def load_column(path: Path, dtype: type[Number], length: int) -> Any:
    try:
        # A plain array over the mapping: np.memmap's own subclass costs microseconds at each index.
        column = np.asarray(np.load(path, mmap_mode="r"))
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged header reaches Python's own parser, which raises many things
        raise InputError(f"store is damaged: {path} is no table ({type(error).__name__}); prepare it again") from None
    if column.dtype != dtype or column.shape != (length,):
        raise InputError(f"store is damaged: {path} is not the table that its header describes; prepare it again")
    return column


def map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def load_record(records: mmap.mmap, offsets: NDArray[np.int64], row: int) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(records[offsets[row] : offsets[row + 1]])
    except ValueError as error:
        raise InputError(f"record {row} of the store is damaged ({error})") from None
    if not (isinstance(record, dict) and record.keys() & {"id", "name", "path"}):
        raise InputError(f"record {row} of the store is damaged (expected an object with an id, a name or a path)")
    return record


class PointedAudio:
    """Decodes the utterances of a store that points into files, and refuses a file that has changed."""

    def __init__(self, folder: Path, *, utterances: int, files: int) -> None:
        self._root = folder / layout.AUDIO_LINK
        self._files_of: NDArray[np.int64] = load_column(folder / layout.UTTERANCE_FILES, np.int64, utterances)
        self._starts: NDArray[np.int64] = load_column(folder / layout.UTTERANCE_STARTS, np.int64, utterances)
        self._records = map_file(folder / layout.FILES)
        self._offsets: NDArray[np.int64] = load_column(folder / layout.FILE_OFFSETS, np.int64, files + 1)
        self._unchanged: dict[int, tuple[int, int]] = {}  # what the system said of a file when we found it unchanged

    def samples(self, row: int, length: int, *, start: int = 0) -> NDArray[np.int16]:
        number = int(self._files_of[row])
        file = self._file(number)
        path = str(self._root / file.path)
        try:
            status = os.stat(path)
            seen = (status.st_mtime_ns, status.st_ino)
            if self._unchanged.get(number) != seen:
                check_unchanged(path, file)
                self._unchanged[number] = seen
            return read_span(path, int(self._starts[row]) + start, length)
        except (FileChanged, OSError) as reason:
            self._refuse(path, reason)

    def check(self) -> None:
        """Decode every file."""
        for number in range(len(self._offsets) - 1):
            file = self._file(number)
            path = str(self._root / file.path)
            try:
                check_unchanged(path, file)
                check_samples(path)
            except (FileChanged, OSError) as reason:
                self._refuse(path, reason)

    def _file(self, number: int) -> AudioFile:
        return AudioFile(**load_record(self._records, self._offsets, number))

    def _refuse(self, path: str, reason: FileChanged | OSError) -> NoReturn:
        if not self._root.exists():
            raise InputError(
                f"the store points into {os.readlink(self._root)}, and nothing is there: "
                f"where it was moved, `ln -sfn NEW {self._root}`"
            ) from None
        what = reason.strerror if isinstance(reason, OSError) else f"it was changed after `prepare`: {reason}"
        raise InputError(f"the store points into {path}, which is not as it was ({what}); prepare it again") from None
