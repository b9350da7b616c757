"""The files of one generation while they are written: rows are appended, and what was written can be taken up again."""

import hashlib
import io
import json
import mmap
import os
import zlib
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.files import encode_utf8, sync_file
from sottovoce.base.seeds import name_key
from sottovoce.data.corpora.corpus import (
    SAMPLE_RATE,
    AudioFile,
    FileSpan,
    Problem,
    ProblemKind,
    RenderedSpeaker,
    RenderedUtterance,
)
from sottovoce.data.store import layout

_PART = ".part"  # a column as far as it was saved: bare numbers, to which more are appended
# What an array calls its numbers, and the number that a column begins with, if any.
_COLUMNS: dict[str, tuple[str, list[int]]] = {
    layout.AUDIO_OFFSETS: ("q", [0]),
    layout.UTTERANCE_OFFSETS: ("q", [0]),
    layout.USER_OFFSETS: ("q", [0]),
    layout.USER_UTTERANCES: ("q", [0]),
    layout.USER_KEYS: ("Q", []),
    layout.USERS_IN_TIME: ("B", []),
}
_POINTING_COLUMNS: dict[str, tuple[str, list[int]]] = {
    layout.FILE_OFFSETS: ("q", [0]),
    layout.UTTERANCE_FILES: ("q", []),
    layout.UTTERANCE_STARTS: ("q", []),
}


class Writer:
    """Appends rendered speakers to the files of one generation. Pieces of one speaker come one after another.

    `points`: what comes are spans of audio files, which are not copied.
    """

    def __init__(self, folder: Path, *, points: bool = False) -> None:
        self._folder, self._points = folder, points
        self._open_files = ExitStack()
        self._digest = hashlib.blake2b(digest_size=16)
        self._checksums: dict[str, int] = {}  # CRC-32 of each file
        self._user: tuple[str, str] | None = None
        self._metadata: dict[str, str] = {}
        self._in_time = True
        self._file: AudioFile | None = None  # the last one pointed into
        self._splits: dict[str, list[int]] = {}
        kinds = _COLUMNS | (_POINTING_COLUMNS if points else {})
        self._columns = {name: array(kind, first) for name, (kind, first) in kinds.items()}
        self._saved = dict.fromkeys(kinds, 0)  # how many numbers of each column are in its part
        self.empty_speakers: list[Problem] = []

    def __enter__(self) -> "Writer":
        names = (layout.FILES if self._points else layout.AUDIO, layout.UTTERANCES, layout.USERS)
        for name in names:
            (self._folder / name).touch()
        self.files: dict[str, BinaryIO] = {
            name: self._open_files.enter_context((self._folder / name).open("r+b")) for name in names
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    @property
    def user_count(self) -> int:
        return len(self._columns[layout.USER_KEYS])

    @property
    def utterance_count(self) -> int:
        return len(self._columns[layout.AUDIO_OFFSETS]) - 1

    @property
    def sample_count(self) -> int:
        return self._columns[layout.AUDIO_OFFSETS][-1]

    def add(self, speaker: RenderedSpeaker) -> None:
        identity = (speaker.split, speaker.name)
        if identity != self._user:
            assert self._user is None or self._user < identity, f"speakers out of order: {self._user}, {identity}"
            self.end_user()
            self._user, self._metadata, self._in_time = identity, dict(speaker.metadata), True
        self._in_time &= speaker.in_time
        for utterance in speaker.utterances:
            self._add_utterance(utterance)

    def _add_utterance(self, utterance: RenderedUtterance) -> None:
        sound = utterance.samples
        assert len(sound), utterance.id
        assert isinstance(sound, FileSpan) == self._points, utterance.id
        if isinstance(sound, FileSpan):
            self._point(sound)
        else:
            assert sound.dtype == np.int16, sound.dtype
            self._append(layout.AUDIO, sound.astype("<i2", copy=False).tobytes())
        offsets = self._columns[layout.AUDIO_OFFSETS]
        offsets.append(offsets[-1] + len(sound))
        record: dict[str, Any] = {"id": utterance.id}
        if utterance.text is not None:
            record["text"] = utterance.text
        if utterance.raw_text != utterance.text:
            record["raw_text"] = utterance.raw_text
        if utterance.metadata:
            record["metadata"] = dict(utterance.metadata)
        self._append_record(layout.UTTERANCES, layout.UTTERANCE_OFFSETS, record)

    def _point(self, span: FileSpan) -> None:
        """Note where an utterance lies. Those of one file come one after another."""
        assert 0 <= span.start <= span.file.samples - span.length, span
        if span.file != self._file:
            record = {name: getattr(span.file, name) for name in ("path", "bytes", "samples", "ends")}
            self._append_record(layout.FILES, layout.FILE_OFFSETS, record)
            self._file = span.file
        self._columns[layout.UTTERANCE_FILES].append(len(self._columns[layout.FILE_OFFSETS]) - 2)
        self._columns[layout.UTTERANCE_STARTS].append(span.start)

    def end_user(self) -> None:
        """Close the current user; one who brought nothing gets no row."""
        if self._user is None:
            return
        split, name = self._user
        self._user = None
        if self._columns[layout.USER_UTTERANCES][-1] == self.utterance_count:
            self.empty_speakers.append(Problem(ProblemKind.EMPTY_SPEAKER, f"{split}/{name}"))
            return
        row = self.user_count
        self._splits.setdefault(split, [row, row])[1] = row + 1
        self._columns[layout.USER_UTTERANCES].append(self.utterance_count)
        self._columns[layout.USER_KEYS].append(name_key(name))
        self._columns[layout.USERS_IN_TIME].append(self._in_time)
        record: dict[str, Any] = {"name": name}
        if self._metadata:
            record["metadata"] = self._metadata
        self._append_record(layout.USERS, layout.USER_OFFSETS, record)

    def finish(self, name: str, language: str) -> dict[str, Any]:
        """Write the tables, flush everything to disk, and return the header that describes it."""
        columns = {column: np.frombuffer(values, dtype=values.typecode) for column, values in self._columns.items()}
        keys = columns[layout.USER_KEYS]
        columns[layout.USER_ORDER] = np.argsort(keys, kind="stable").astype(np.int64)
        in_time = columns.pop(layout.USERS_IN_TIME).astype(np.bool_)
        if in_time.any():
            columns[layout.USERS_IN_TIME] = in_time
        for file in self.files.values():
            sync_file(file)
        for column, values in columns.items():
            self._write_column(column, values)
        version = layout.POINTING_VERSION if self._points else layout.VERSION
        self._digest.update(json.dumps([version, language, self._splits, SAMPLE_RATE]).encode())
        hashed = [layout.AUDIO_OFFSETS, layout.USER_UTTERANCES]
        hashed += [layout.UTTERANCE_FILES, layout.UTTERANCE_STARTS] if self._points else []
        hashed += [layout.USERS_IN_TIME] if in_time.any() else []  # else it is what it always was
        for column in hashed:
            self._digest.update(columns[column].tobytes())
        return {
            "format": layout.FORMAT,
            "version": version,
            "name": name,
            "language": language,
            "sample_rate": SAMPLE_RATE,
            "users": self.user_count,
            "utterances": self.utterance_count,
            "splits": self._splits,
            **({"files": len(self._columns[layout.FILE_OFFSETS]) - 1} if self._points else {}),
            "digest": self._digest.hexdigest(),
            "sizes": {file: (self._folder / file).stat().st_size for file in sorted([*self.files, *columns])},
            "checksums": dict(sorted(self._checksums.items())),
        }

    def _write_column(self, column: str, values: NDArray[Any]) -> None:
        content = io.BytesIO()
        np.save(content, values)
        # By way of memory, because on a full disk NumPy's own writing raises an error that does not say so.
        self._checksums[column] = zlib.crc32(content.getbuffer())
        with (self._folder / column).open("wb") as file:
            file.write(content.getbuffer())
            sync_file(file)

    def _append_record(self, name: str, offsets: str, record: Mapping[str, Any]) -> None:
        line = encode_utf8(json.dumps(record, ensure_ascii=False) + "\n")
        self._append(name, line)
        self._columns[offsets].append(self._columns[offsets][-1] + len(line))

    def _append(self, name: str, content: bytes) -> None:
        self.files[name].write(content)
        self._digest.update(content)
        self._checksums[name] = zlib.crc32(content, self._checksums.get(name, 0))

    # To go on after a kill.

    def save(self) -> dict[str, Any]:
        """Flush everything to disk; `resume` of what is returned comes back to this state, whatever is added since."""
        for file in self.files.values():
            sync_file(file)
        for column, values in self._columns.items():
            with _part(self._folder, column).open("ab") as file:
                file.write(values[self._saved[column] :].tobytes())
                sync_file(file)
            self._saved[column] = len(values)
        return {
            "sizes": {name: file.tell() for name, file in self.files.items()},
            "columns": self._saved,
            "checksums": self._checksums,
            "splits": self._splits,
            "user": self._user,
            "metadata": self._metadata,
            "in_time": self._in_time,
            "empty_speakers": [problem.where for problem in self.empty_speakers],
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Forget what was written after `saved`, and go on from there. Only what is on disk is read, no corpus."""
        for column, count in saved["columns"].items():
            values = self._columns[column] = array(self._columns[column].typecode)
            os.truncate(_part(self._folder, column), count * values.itemsize)
            values.frombytes(_part(self._folder, column).read_bytes())
        for name, file in self.files.items():
            file.truncate(saved["sizes"][name])
            file.seek(saved["sizes"][name])
        self._saved, self._checksums, self._splits = dict(saved["columns"]), saved["checksums"], saved["splits"]
        split_and_name = saved["user"]
        self._user = None if split_and_name is None else (split_and_name[0], split_and_name[1])
        self._metadata, self._in_time = saved["metadata"], saved["in_time"]
        self.empty_speakers = [Problem(ProblemKind.EMPTY_SPEAKER, where) for where in saved["empty_speakers"]]
        self._digest_again()

    def _digest_again(self) -> None:
        """Hash what is there in the order in which it was written, since the state of a digest cannot be saved."""
        reread = {name: _Reread(file) for name, file in self.files.items()}
        users, ends = reread[layout.USERS], iter(self._columns[layout.USER_UTTERANCES][1:])
        user_ends = next(ends, None)
        last_file = -1
        for row in range(self.utterance_count + 1):
            if row == user_ends:
                self._digest.update(users.next(self._columns[layout.USER_OFFSETS]))
                user_ends = next(ends, None)
            if row == self.utterance_count:
                break
            if not self._points:
                samples = self._columns[layout.AUDIO_OFFSETS]
                self._digest.update(reread[layout.AUDIO].next(samples, unit=2))
            elif (file := self._columns[layout.UTTERANCE_FILES][row]) != last_file:
                line = reread[layout.FILES].next(self._columns[layout.FILE_OFFSETS])
                self._digest.update(line)
                self._file, last_file = AudioFile(**json.loads(line)), file
            self._digest.update(reread[layout.UTTERANCES].next(self._columns[layout.UTTERANCE_OFFSETS]))

    def forget_saved(self) -> None:
        """Remove what only `resume` needs."""
        for column in self._columns:
            _part(self._folder, column).unlink(missing_ok=True)


def can_resume(folder: Path, saved: Mapping[str, Any]) -> bool:
    """Whether all that was written before `saved` is still there."""
    needed = {folder / name: size for name, size in saved["sizes"].items()}
    columns = _COLUMNS | _POINTING_COLUMNS
    needed |= {_part(folder, name): n * array(columns[name][0]).itemsize for name, n in saved["columns"].items()}
    return all(path.is_file() and path.stat().st_size >= size for path, size in needed.items())


class _Reread:
    """One of the files from its beginning, row by row."""

    def __init__(self, file: BinaryIO) -> None:
        self._row = 0
        size = os.fstat(file.fileno()).st_size
        self._content: mmap.mmap | bytes = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""

    def next(self, offsets: "array[int]", *, unit: int = 1) -> bytes:
        first, last = offsets[self._row] * unit, offsets[self._row + 1] * unit
        self._row += 1
        return bytes(self._content[first:last])


def _part(folder: Path, column: str) -> Path:
    return folder / (column + _PART)
