"""Writing so that a reader sees the old content or the new, whatever happens in between."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes `path`'s place, flushed to disk, when the block ends without an exception."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            sync(file)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """`content` as readable JSON, atomically."""
    with written_atomically(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def sync(file: IO[bytes]) -> None:
    """Flush `file` through to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames inside `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    # mkstemp makes files private; a result should have the rights an ordinary open() would have given it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
