"""A file appears whole or not at all, and what killed writers leave is swept, whereas living ones are left in peace."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from sottovoce.base.files import write_atomically, write_json

FORKS = multiprocessing.get_context("forkserver")


def die_before_the_rename(path: Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    write_json(path, "new")


def left_by_a_killed_writer(path: Path) -> str:
    before = {*os.listdir(path.parent)}
    process = FORKS.Process(target=die_before_the_rename, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = {*os.listdir(path.parent)} - before
    assert left.startswith(f".{path.name}.")
    return left


def test_what_a_killed_writer_left_is_swept_when_the_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a[b]*.json"
    write_json(path, "old")
    left_by_a_killed_writer(path)
    other = left_by_a_killed_writer(tmp_path / "other.json")
    mine = (f".{path.name}.backup", ".notes.json.template", f"{path.name}.abcdefgh")
    for name in mine:
        (tmp_path / name).touch()
    assert path.read_text() == '"old"\n'
    write_json(path, "newer")
    assert path.read_text() == '"newer"\n'
    assert {*os.listdir(tmp_path)} == {path.name, other, *mine}


def test_two_writers_do_not_take_one_anothers_file_away(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with write_atomically(path) as slow:
        slow.write(b"slow")
        write_json(path, "quick")
    assert path.read_bytes() == b"slow"
    assert os.listdir(tmp_path) == ["a.json"]


def test_files_have_the_rights_that_an_ordinary_one_would_have(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    write_json(tmp_path / "ours", 1)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write_json(tmp_path / "none/a.json", 1)
    assert str(tmp_path / "none") in raised.value.filename
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as raised_by_rename:
        write_json(tmp_path / "folder", 1)
    assert raised_by_rename.value.filename == str(tmp_path / "folder")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json'$"):
        write_json(tmp_path / "a.json", 1)
    with pytest.raises(FileNotFoundError, match="somewhere else"), write_atomically(tmp_path / "a.json"):
        raise FileNotFoundError(errno.ENOENT, "gone", "somewhere else")
    assert os.listdir(tmp_path) == ["folder"]
