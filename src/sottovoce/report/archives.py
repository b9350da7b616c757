"""Run folders in an archive: many small files as one, read like folders.

results/clipping.zip         a suite: one folder a run
results/clipping.zip/dim     one of them, wherever a run folder may be named
"""

import atexit
import shutil
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path, PurePosixPath

from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically

ZIP = ".zip"
# The same files give the same archive: zip's own beginning of time.
_BEGINNING = (1980, 1, 1, 0, 0, 0)
# Runs are kept without models: a larger archive is none of ours, and would fill the disk.
MOST_BYTES, MOST_FILES = 2**28, 50_000
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_typed: dict[str, str] = {}  # where an archive is unpacked, and what the user called it


def open_path(path: Path) -> Path:
    """`path` itself, or where it is an archive or lies in one, the folder that it means, unpacked for this process."""
    for place in (path, *path.parents):
        if place.suffix == ZIP and place.is_file():
            state = place.stat()
            folder = _unpack_once(place.resolve(), (state.st_ino, state.st_size, state.st_mtime_ns))
            _typed[str(folder)] = str(place)
            return folder / path.relative_to(place)
    return path


def restore_archive_names(words: str) -> str:
    """`words` with the names of archives in place of the folders they were unpacked to."""
    for folder, archive in _typed.items():
        words = words.replace(folder, archive)
    return words


def zip_folder(folder: Path, archive: Path) -> None:
    """Everything below `folder` as `archive`, in place of one that is there; the same bytes for the same files."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    with write_atomically(archive) as file, zipfile.ZipFile(file, "w") as packed:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name, date_time=_BEGINNING)
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # as Unix would, wherever it is made
            packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


def unzip(archive: Path, folder: Path) -> None:
    """The files of `archive` into `folder`, once all their names and sizes are checked."""
    try:
        with zipfile.ZipFile(archive) as packed:
            _check([(entry.filename, entry.file_size) for entry in packed.infolist()])
            if other := [entry.filename for entry in packed.infolist() if entry.compress_type not in _PACKINGS]:
                # Others would be unpacked with memory that the archive asks for: 4 GiB by LZMA.
                raise ValueError(f"expected files stored or deflated, found {other[0]!r} packed otherwise")
            packed.extractall(folder)
    except _DAMAGED as problem:
        raise InputError(f"{archive}: cannot be unpacked: {' '.join(str(problem).split())}") from None


def _check(files: list[tuple[str, int]]) -> None:
    """Sizes are those that the archive states; reading stops there, whatever more there is."""
    if len(files) > MOST_FILES or sum(size for _, size in files) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_FILES:,} files and {MOST_BYTES:,} bytes, as runs without models have")
    for name, _ in files:
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            raise ValueError(f"expected files below one folder, found {name!r}")


@cache
def _unpack_once(archive: Path, state: tuple[int, int, int]) -> Path:
    """The content of `archive` as it is in this `state`. Its folder has the archive's own path, from which runs get
    their labels, and is gone when the process ends."""
    scratch = tempfile.mkdtemp(prefix="sottovoce-archive-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    folder = Path(scratch, *archive.with_suffix("").parts[1:])
    folder.mkdir(parents=True)
    unzip(archive, folder)
    return folder
