"""The folder `secrets/` of a run: files that nobody but its owner may read, and that are never published.

What only later rounds need goes when the run has ended (`forget`); what its owner goes on needing stays there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sottovoce.base.files import remove_leftovers, sync_folder, write_atomically

SECRETS = "secrets"


@contextmanager
def write_secret(path: Path) -> Iterator[IO[bytes]]:
    """`write_atomically`, readable by its owner alone, in a folder that only its owner can open."""
    _closed(path.parent)
    with write_atomically(path, private=True) as file:
        yield file


def move_to_secrets(earlier: Path, path: Path) -> None:
    """Move a file that lay open to `path`, where only its owner can read it."""
    _closed(path.parent)
    earlier.chmod(0o600)
    os.replace(earlier, path)
    sync_folder(path.parent)


def _closed(folder: Path) -> None:
    """A folder that only its owner can open."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def delete_secrets(folder: Path, *names: str) -> None:
    """Remove these files of a folder of secrets, and the folder where nothing else is in it."""
    if not folder.is_dir():
        return
    remove_leftovers(folder, *names)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    sync_folder(folder.parent)
