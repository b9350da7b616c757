"""SHA-256 of models and files, in forms that do not depend on how a file is laid out. Nothing here needs torch.

weights   for every tensor, in the order of their names: a line of JSON `["name","F32",[shape]]`, then its bytes,
          little-endian and row by row. So a safetensors file and the tensors it was written from have one digest.
content   JSON in one spelling: keys sorted, no spaces, ASCII.
lines     as content, line by line, without what a clock or a meter has measured.
file      the bytes as they are: what `sha256sum` prints.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import ParseError, parse_json

LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
# Of records of rounds: what depends on the machine and its load, so that a run made again has other values.
MEASURED = frozenset(
    ("seconds", "audio_seconds_per_second", "waited_for_data_seconds", "memory_mib", "device_memory_mib")
)

_LANES = (0x1F3D5B79_2468ACE1, 0x5851F42D_4C957F2D)
_CHUNK = 1 << 18


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: its type, its shape, and where its bytes are among the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weights_digest(tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """The digest of float32 `tensors`, equal to that of a safetensors file of them.

    >>> written = b'["b","F32",[2]]\\n' + bytes(8)
    >>> weights_digest({"b": np.zeros(2, "f4")}) == hashlib.sha256(written).hexdigest()
    True
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name], dtype="<f4")
        found.update(_line([name, "F32", list(tensor.shape)]))
        found.update(tensor.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def safetensors_digest(path: Path) -> str:
    """The digest of the tensors in a safetensors file; `InputError` where it is none."""
    found = hashlib.sha256()
    with path.open("rb") as file, _mapped(file, path) as content:
        tensors, start = read_safetensors_header(content, where=path)
        with memoryview(content) as data:
            for name in sorted(tensors):
                tensor = tensors[name]
                found.update(_line([name, tensor.dtype, list(tensor.shape)]))
                found.update(data[start + tensor.start : start + tensor.end])
    return found.hexdigest()


def read_safetensors_header(content: "bytes | mmap.mmap", *, where: Path) -> tuple[dict[str, StoredTensor], int]:
    """What a safetensors file holds, and where its data begins. Refuses gaps, overlaps and names that stand twice."""
    try:
        (size,) = struct.unpack("<Q", content[:8])
        if size > min(LARGEST_HEADER, len(content) - 8):
            raise ValueError("its header is longer than the file")
        pairs = json.loads(content[8 : 8 + size].decode("utf-8"), object_pairs_hook=_once)
        tensors = {
            name: StoredTensor(one["dtype"], tuple(map(int, one["shape"])), *map(int, one["data_offsets"]))
            for name, one in pairs.items()
            if name != "__metadata__"
        }
        at = 0
        for tensor in sorted(tensors.values(), key=lambda one: (one.start, one.end)):
            if tensor.start != at or tensor.end < at:
                raise ValueError("its tensors overlap, or there is something between them")
            at = tensor.end
        if at != len(content) - 8 - size:
            raise ValueError("it is cut short, or something follows its tensors")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as problem:
        raise InputError(f"{where} is damaged: no safetensors file ({problem})") from None
    return tensors, 8 + size


def flat_fingerprint(path: Path, names: Sequence[str], *, alignment: int) -> str:
    """`privacy.fingerprint` of the float32 tensors `names` of a file, laid out flat as `flat.Layout` does."""
    with path.open("rb") as file, _mapped(file, path) as content:
        tensors, start = read_safetensors_header(content, where=path)
        if {*names} != {*tensors} or any(tensor.dtype != "F32" for tensor in tensors.values()):
            raise InputError(f"{path}: holds other tensors than the model that it is said to be")
        parts = []
        for name in names:
            values = np.frombuffer(content[start + tensors[name].start : start + tensors[name].end], dtype="<i4")
            parts += [values, np.zeros(-len(values) % alignment, dtype="<i4")]
    return _fingerprint(np.concatenate(parts))


def _fingerprint(bits: np.ndarray[Any, Any]) -> str:
    sums = [0, 0]
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK].astype(np.int64).view(np.uint64)
        places = np.arange(start + 1, start + 1 + len(chunk), dtype=np.uint64)
        for lane, key in enumerate(_LANES):
            sums[lane] += int(_mix(chunk + _mix(places ^ np.uint64(key))).sum(dtype=np.uint64))
    return f"float32-{len(bits)}-" + "".join(f"{value % 2**64:016x}" for value in sums)


def _mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, Any] = x ^ (x >> np.uint64(31))
    return mixed


def content_digest(content: Any) -> str:
    """The digest of what JSON can hold, however it is spelt.

    >>> content_digest({"b": (1, 2), "a": 0.5}) == content_digest({"a": 0.5, "b": [1, 2]})
    True
    """
    return hashlib.sha256(_spell(content).encode()).hexdigest()


def lines_digest(path: Path) -> str:
    """The digest of a file of JSON lines without what was `MEASURED`; `InputError` where a line is none."""
    found = hashlib.sha256()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = parse_json(line)
            found.update(_line({name: value for name, value in record.items() if name not in MEASURED}))
    except (ParseError, UnicodeDecodeError, AttributeError, ValueError) as problem:
        raise InputError(f"{path} is damaged ({problem})") from None
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(content: Any) -> bytes:
    return (_spell(content) + "\n").encode()


def _spell(content: Any) -> str:
    try:
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InputError(f"what JSON cannot hold has no digest ({problem})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _mapped(file: Any, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (ValueError, OSError) as problem:  # an empty file, or none that can be mapped
        raise InputError(f"{path} is damaged: no safetensors file ({problem})") from None
