"""Libri-Light and MLS from the command line: prepared, counted without their audio, checked with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.corpora import trees

from sottovoce.data.store import Store, packing

Command = Callable[..., Any]


def test_librilight_is_pointed_into_and_counted_without_its_audio(sottovoce: Command, tmp_path: Path) -> None:
    trees.librilight(tmp_path / "ll", trees.noise)
    out = tmp_path / "store"
    done = sottovoce(
        *("prepare", "librilight", tmp_path / "ll", "--out", out, "--point"),
        *("--cut-seconds", 10, "--split", "large", "--hold-out", "dev=1"),
    )
    assert done.code == 0, done.err
    store = Store(out)
    assert f"2 users, {store.utterance_count:,} utterances" in done.out
    assert sorted(store.splits) == ["dev", "large"]
    assert max(store.utterance(row).seconds for row in range(store.utterance_count)) <= 10
    assert sottovoce("stats", out, "--check").code == 0

    damaged = next((tmp_path / "ll/large").rglob("*.flac"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    figures = json.loads(sottovoce("stats", out, "--json").out)
    assert figures["hours"] == pytest.approx(store.seconds / 3600)
    done = sottovoce("stats", out, "--check")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{damaged.name}, which is not as it was" in done.err


def test_mls_with_the_parts_that_are_named(sottovoce: Command, tmp_path: Path) -> None:
    trees.mls(tmp_path / "mls_french", trees.noise)
    done = sottovoce(
        *("prepare", "mls", tmp_path / "mls_french", "--out", tmp_path / "store"),
        *("--split", "train-9hr", "--split", "dev", "--json"),
    )
    report = json.loads(done.out)
    assert (report["language"], report["utterances"], report["splits"]) == (
        "fr",
        3,
        {"dev": [0, 1], "train-9hr": [1, 2]},
    )


def test_an_interrupt_that_keeps_something_says_so_and_how_to_go_on(
    sottovoce: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.librilight(tmp_path / "ll", trees.noise)
    monkeypatch.setattr(packing, "TASKS_PER_SAVE", 2)
    arguments = ["prepare", "librilight", tmp_path / "ll", "--out", tmp_path / "store", "--workers", 1]
    finish = packing.Writer.finish

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packing.Writer, "finish", interrupted)
    done = sottovoce(*arguments)
    assert done.code == 130
    assert done.err == f"interrupted: the same command goes on from {tmp_path / 'store'}\n"
    monkeypatch.setattr(packing.Writer, "finish", finish)
    done = sottovoce(*arguments)
    assert f"{tmp_path / 'store'}: going on after 8 of 8 pieces of work\n" in done.err
    assert Store(tmp_path / "store").user_count == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["librilight", "nowhere"], "error: nowhere does not hold Libri-Light: expected <subset>/<speaker>/<book>/"),
        (["librilight", ".", "--cut-seconds", "nan"], "error: --cut-seconds nan: expected a number"),
        (["mls", "."], "error: . does not hold MLS: expected {train,dev,test}/"),
    ],
)
def test_mistakes_are_one_line(
    sottovoce: Command, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = sottovoce("prepare", *arguments, "--out", "x")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith(message)
