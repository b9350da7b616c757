"""Writing so that a reader sees the old content or the new, whatever happens in between; and reading it back."""

import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from sottovoce.base.errors import InputError
from sottovoce.base.parsing import ParseError, parse_json

_SEAL = "seal"
_NAMED = 12  # folders that one line names
# Names that `tempfile` makes. Whoever writes one holds a lock on it: so a dead process's can be removed.
_TEMPORARY = re.compile(r"\.(?P<target>.+)\.[a-z0-9_]{8}", re.DOTALL)


@contextmanager
def write_atomically(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A binary file that takes `path`'s place, flushed to disk, when the block ends without an exception.

    An `OSError` names `path`. What a killed process left of writing it is removed. A `private` file is its owner's.
    """
    with name_in_errors(path):
        remove_leftovers(path.parent, path.name)
        temporary, file = _temporary_for(path)
        with file:
            try:
                yield file
                sync_file(file)
                if not private:
                    os.chmod(temporary, 0o666 & ~_umask())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        sync_folder(path.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A new path beside `folder`: what is made there takes its name, whole, when the block ends without an error."""
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} is there already: expected the name of a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            made = Path(temporary) / folder.name
            yield made
            made.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror or error})") from None


@contextmanager
def write_folder_atomically(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the name of `folder`, which must be new, when the block ends without an exception."""
    with new_folder(folder) as made:
        made.mkdir()
        yield made


def list_folders_holding(folder: Path, file: str) -> str:
    """The folders in `folder` that hold `file`, for a line that asks for one of them; empty where there is none."""
    if not folder.is_dir():
        return ""
    found = sorted(str(below) for below in folder.iterdir() if (below / file).is_file())
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def remove_leftovers(folder: Path, *targets: str) -> None:
    """Remove what processes that are no more have left of writing the files `targets` of `folder`."""
    for name in os.listdir(folder):
        if (found := _TEMPORARY.fullmatch(name)) is not None and found["target"] in targets:
            _remove_unless_held(folder / name)


def _remove_unless_held(left: Path) -> None:
    with suppress(OSError):  # it is held, gone meanwhile, or somebody else's
        handle = os.open(left, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
        finally:
            os.close(handle)


def _temporary_for(path: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside `path`, held by this process."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with suppress(OSError):  # where files cannot be held, nothing is swept either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return Path(name), os.fdopen(handle, "wb")
        os.close(handle)  # swept before it was held


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Within, an `OSError` that names no file, or a temporary one in `path`'s place, names `path`.

    A full disk shows when an open file is written or flushed, and such errors do not say which."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else _TEMPORARY.fullmatch(Path(os.fsdecode(error.filename)).name)
        if error.errno is None or not (error.filename is None or (named and named["target"] == path.name)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def write_json(path: Path, content: Any, *, private: bool = False) -> None:
    """`content` as readable JSON, atomically; a `private` file is its owner's."""
    with write_atomically(path, private=private) as file:
        file.write(encode_utf8(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"))


def encode_utf8(text: str) -> bytes:
    """`text` to be written. The name of a file need not be UTF-8: what it has instead becomes an escape of JSON's.

    >>> encode_utf8(json.dumps("caf\\udce9", ensure_ascii=False))
    b'"caf\\\\udce9"'
    """
    return text.encode(errors="backslashreplace")


def read_json(path: Path, *, is_unique: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; `InputError` where there is none, or with `is_unique` where it names a key twice."""
    try:
        content = parse_json(read_file(path), is_unique=is_unique)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except ParseError as error:
        raise InputError(f"{path} is damaged ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged (it holds no JSON object)")
    return content


def read_bounded(path: Path, *, most: int, what: str) -> bytes:
    """The content of a file that anybody may have made: nothing is read that `what` cannot be."""
    try:
        return read_file(path, most=most, what=what)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None


LARGEST = 1 << 29  # bytes of a file that is read whole, and is neither sound nor a model


def read_file(path: Path, *, most: int = LARGEST, what: str = "such a file can be") -> bytes:
    """The content of a regular file of at most so many bytes, `InputError` for others; `OSError` as by `open`."""
    check_file(path)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise InputError(f"{path} is larger than {what}: expected at most {most:,} bytes")
        return file.read()


LONGEST_LINE = 1 << 24  # characters of a line in any table


def read_lines(file: IO[str], *, path: Path | str) -> Iterator[str]:
    """The lines of an open text, as they are read; `InputError` for one that no table has."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise InputError(f"{path}: a line of more than {LONGEST_LINE:,} characters: it is no table")
        yield line


def check_file(path: Path | str) -> None:
    """Refuse what is there and is no file: a device has no end, and a pipe that nobody writes to none either.

    Whoever opens it says what else is wrong, such as that there is nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    for kind, is_one in _NO_FILES.items():
        if is_one(mode):
            raise InputError(f"{path} is a {kind}, expected a file")


_NO_FILES = {
    "named pipe": stat.S_ISFIFO,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "socket": stat.S_ISSOCK,
}


def add_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with its digest, for `check_digest`: JSON with one letter changed is often JSON still."""
    return {**content, _SEAL: _digest_of(content)}


def check_digest(content: Mapping[str, Any], *, where: Path) -> dict[str, Any]:
    """What was sealed; `InputError` where it was changed since. What never was (by older releases) comes as it is."""
    opened = {name: value for name, value in content.items() if name != _SEAL}
    if content.get(_SEAL, _digest_of(opened)) != _digest_of(opened):
        raise InputError(f"{where} is damaged: it was changed after it was written")
    return opened


def _digest_of(content: Mapping[str, Any]) -> str:
    # By way of JSON, so that it is the same for what was written and what is read back.
    plain = json.loads(json.dumps(content))
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def sync_file(file: IO[bytes]) -> None:
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
