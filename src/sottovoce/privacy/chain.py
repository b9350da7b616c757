"""Append-only lines of JSON, each sealed by a hash of itself and of all before it.

A line is `{"hash":…,"record":…}` in canonical JSON, its hash SHA-256 over the previous hash and the record. So a
changed, missing, added or moved line breaks the chain from there on. The chain alone cannot show a file cut after a
whole line, or rewritten from the start: for that its length and last hash are kept elsewhere (`Mark`).
"""

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from sottovoce.base.errors import InputError
from sottovoce.base.files import name_in_errors, read_file, sync_folder
from sottovoce.base.parsing import parse_json

Record = dict[str, Any]
_GENESIS = "0" * 64


@dataclass(frozen=True)
class Mark:
    """How far a file had come: its number of lines and the hash of the last."""

    length: int
    head: str


@dataclass(frozen=True)
class Chain:
    """What a file holds. `size` bytes are whole lines; `torn` more follow, of a write that never finished."""

    records: tuple[Record, ...]
    hashes: tuple[str, ...]
    size: int
    torn: int

    @property
    def mark(self) -> Mark:
        return Mark(len(self.records), self.hashes[-1] if self.hashes else _GENESIS)


def read_chain(path: Path) -> Chain:
    """The whole file, every hash checked. A last line without its end is counted as torn; all else is refused."""
    return _parse(read_file(path), path)


def _parse(data: bytes, path: Path) -> Chain:
    size = data.rfind(b"\n") + 1
    records: list[Record] = []
    hashes: list[str] = []
    for number, line in enumerate(data[:size].splitlines(keepends=True), start=1):
        try:
            record = parse_json(line)["record"]
            sealed, digest = seal(record, after=hashes[-1] if hashes else _GENESIS)
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise InputError(f"{path} line {number} is not a record: it was changed after it was written") from problem
        if sealed != line or not isinstance(record, dict):
            raise InputError(
                f"{path} line {number} does not follow from the lines before it: it was changed, moved, added or "
                "removed after it was written"
            )
        records.append(record)
        hashes.append(digest)
    return Chain(tuple(records), tuple(hashes), size, len(data) - size)


def seal(record: Record, *, after: str) -> tuple[bytes, str]:
    """The line of a record, and its hash."""
    digest = hashlib.sha256(f"{after}\n{_spell(record)}".encode()).hexdigest()
    return f"{_spell({'hash': digest, 'record': record})}\n".encode(), digest


def _spell(value: Record) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@final
class ChainWriter:
    """Adds lines to a chain. When `append` returns, the line is on the disk; when it raises, it is not in the file.

    There is one writer at a time, or one would write over the lines of another. `chain` is what the file held.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or starts it; a torn end stays until `cut_torn_end`."""
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(path)
            self.chain = _parse(_read_all(self._file), path)
            sync_folder(path.parent)  # a new file survives a power cut only once its folder is on the disk too
        except BaseException:
            os.close(self._file)
            raise
        self._size, self.mark = self.chain.size, self.chain.mark

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise InputError(f"{path} is open in another run: expected one writer at a time") from held

    def cut_torn_end(self) -> None:
        if self.chain.torn:
            os.ftruncate(self._file, self.chain.size)
            os.fsync(self._file)

    def append(self, record: Record) -> Mark:
        line, digest = seal(record, after=self.mark.head)
        try:
            with name_in_errors(self._path):
                written = 0
                while written < len(line):
                    written += os.pwrite(self._file, line[written:], self._size + written)
                os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._size)  # a full disk must not leave half a line for the next one to follow
            raise
        self._size += len(line)
        self.mark = Mark(self.mark.length + 1, digest)
        return self.mark

    def close(self) -> None:
        """Lets go of the file; a closed writer stays closed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _read_all(file: int) -> bytes:
    parts = iter(lambda: os.read(file, 1 << 20), b"")
    return b"".join(parts)
