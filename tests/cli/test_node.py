"""`sottovoce node`: it acts on the home of a node that has joined, and refuses every other path and makes nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sottovoce.network.node.home import LEDGER, LEFT, MARK, PAUSED
from sottovoce.network.node.ledger import NodeLedger
from sottovoce.privacy.chain import ChainWriter

Command = Callable[..., Any]
EVERY = pytest.mark.parametrize("command", ["leave", "pause", "resume", "show"])


def join_from(home: Path) -> None:
    """What `join` leaves of a yes."""
    ledger = NodeLedger(home)
    ledger.accept(bytes(32))
    ledger.close()


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def missing(home: Path) -> None:
    pass


def a_file(home: Path) -> None:
    home.write_text("speech")


def empty(home: Path) -> None:
    home.mkdir()


def other_things(home: Path) -> None:
    home.mkdir()
    (home / "letter.txt").write_text("dear anna")


def a_run(home: Path) -> None:
    """A run's folder has a ledger of the same name."""
    home.mkdir()
    (home / "config.yaml").write_text("about: a run\n")
    writer = ChainWriter(home / LEDGER)
    writer.append({"plan": {"steps": 3}})
    writer.close()


def a_run_not_begun(home: Path) -> None:
    home.mkdir()
    (home / "config.yaml").write_text("about: a run\n")
    (home / LEDGER).touch()


def a_key(home: Path) -> None:
    """The folder above: the home is inside it."""
    join_from(home / "home")


def a_dangling_link(home: Path) -> None:
    home.symlink_to(home.with_name("nowhere"))


def a_link_to_itself(home: Path) -> None:
    home.symlink_to(home)


def a_ledger_that_is_a_folder(home: Path) -> None:
    (home / LEDGER).mkdir(parents=True)


def damaged(home: Path) -> None:
    """A home of an older release, without the mark, whose ledger nobody can read."""
    home.mkdir()
    (home / LEDGER).write_bytes(b"\xff\xfe not a ledger\n")


def damaged_throughout(home: Path) -> None:
    damaged(home)
    (home / MARK).write_text("{")


def another_version(home: Path) -> None:
    join_from(home)
    (home / MARK).write_text(json.dumps(json.loads((home / MARK).read_text()) | {"version": 2}))


def anothers_mark(home: Path) -> None:
    """A file of the same name by another program."""
    home.mkdir()
    (home / MARK).write_text('{"format": "something else", "version": 1}')


@EVERY
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (missing, "no node has joined from here"),
        (a_file, "is a file"),
        (empty, "no node has joined from here"),
        (other_things, "no node has joined from here"),
        (a_run, "no node has joined from here"),
        (a_run_not_begun, "no node has joined from here"),
        (a_key, "expected {home}/home"),
        (a_dangling_link, "no node has joined from here"),
        (a_link_to_itself, "no node has joined from here"),
        (a_ledger_that_is_a_folder, "no node has joined from here"),
        (damaged, "changed after it was written"),
        (damaged_throughout, "changed after it was written"),
        (another_version, "another release of sottovoce (version 2"),
        (anothers_mark, "no node has joined from here"),
    ],
)
def test_what_is_no_home_is_refused_in_one_line_and_nothing_is_made(
    sottovoce: Command, tmp_path: Path, command: str, make: Callable[[Path], None], problem: str
) -> None:
    home = tmp_path / "home"
    make(home)
    before = everything_in(tmp_path)
    ended = sottovoce("node", command, home)
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("error: ")
    assert problem.format(home=home) in ended.err
    assert everything_in(tmp_path) == before


@EVERY
def test_a_mistyped_folder_above_is_not_made_either(sottovoce: Command, tmp_path: Path, command: str) -> None:
    assert sottovoce("node", command, tmp_path / "keys" / "ana" / "home").code == 2
    assert everything_in(tmp_path) == {}


@EVERY
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_home_that_may_not_be_read_or_written(sottovoce: Command, tmp_path: Path, command: str, mode: int) -> None:
    home = tmp_path / "home"
    join_from(home)
    home.chmod(mode)
    try:
        ended = sottovoce("node", command, home)
    finally:
        home.chmod(0o700)
    assert ended.code == (0 if (command, mode) == ("show", 0o500) else 2)
    assert "Traceback" not in ended.err


def write_old(home: Path) -> None:
    """As older releases left it."""
    join_from(home)
    (home / MARK).unlink()


def write_old_before_any_yes(home: Path) -> None:
    NodeLedger(home).close()
    (home / MARK).unlink()
    (home / "speech").mkdir()


def write_linked(home: Path) -> None:
    join_from(home.with_name("moved"))
    home.symlink_to(home.with_name("moved"))


def write_with_a_damaged_mark(home: Path) -> None:
    """Its ledger is whole: nobody has to mend a file before they may leave."""
    join_from(home)
    (home / MARK).write_text("{")


@pytest.mark.parametrize(
    "make", [join_from, write_old, write_old_before_any_yes, write_linked, write_with_a_damaged_mark]
)
def test_a_home_is_known_by_what_joining_wrote_there(
    sottovoce: Command, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    home = tmp_path / "home"
    make(home)
    assert sottovoce("node", "show", home).out.startswith(f"{home}: taking part\n")
    assert sottovoce("node", "pause", home).code == 0
    assert (home / PAUSED).exists()
    assert sottovoce("node", "resume", home).code == 0
    assert not (home / PAUSED).exists()
    assert sottovoce("node", "leave", home).code == 0
    assert (home / LEFT).exists()
    assert sottovoce("node", "show", home).out.startswith(f"{home}: left for good\n")


def test_who_has_left_neither_pauses_nor_goes_on(sottovoce: Command, tmp_path: Path) -> None:
    home = tmp_path / "home"
    join_from(home)
    for _ in range(2):  # leaving twice is leaving
        assert sottovoce("node", "leave", home).code == 0
    for command in ("pause", "resume"):
        ended = sottovoce("node", command, home)
        assert (ended.code, "has left for good" in ended.err) == (2, True)
    assert not (home / PAUSED).exists()


def test_its_owner_is_heard_while_a_node_runs(sottovoce: Command, tmp_path: Path) -> None:
    """The ledger is held by the node; who pauses or leaves does not wait for it."""
    home = tmp_path / "home"
    running = NodeLedger(home)
    try:
        assert sottovoce("node", "show", home).code == 0
        assert sottovoce("node", "pause", home).code == 0
        assert sottovoce("node", "leave", home).code == 0
        assert running.has_left
    finally:
        running.close()


def test_an_old_home_gets_its_mark_when_its_node_joins_again(tmp_path: Path) -> None:
    write_old(tmp_path / "home")
    join_from(tmp_path / "home")
    assert (tmp_path / "home" / MARK).exists()
