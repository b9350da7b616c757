"""A node's folder of recordings becomes a store of its own once, and again where it has changed."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.network.local_cluster import NUMBERS
from tests.tones import speaker, write_recordings

from sottovoce.base.errors import InputError
from sottovoce.data.store import Store
from sottovoce.network.node import speech
from sottovoce.network.node.speech import open_node_store

ANNA = speaker(NUMBERS[0], letters=(2, 3), utterances=3)


class Packing:
    """Packs, and counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self._pack = 0, speech.pack_corpus
        monkeypatch.setattr(speech, "pack_corpus", self)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.times += 1
        self._pack(*arguments, workers=1, **named)


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Packing:
    return Packing(monkeypatch)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    write_recordings(tmp_path / "mine", ANNA)
    return tmp_path / "mine"


def test_a_folder_is_prepared_once_and_again_when_it_has_changed(
    recorded: Path, tmp_path: Path, packing: Packing
) -> None:
    def opened(**changed: str) -> Store:
        asked = {"user": ANNA.name, "language": "en"} | changed
        return open_node_store(recorded, home=tmp_path / "home", **asked)  # type: ignore[arg-type]

    first = opened()
    assert [first.user(row).name for row in first.splits["train"]] == [ANNA.name]
    texts = [first.utterance(row).text for row in range(first.utterance_count)]
    assert texts == [said.text for said in ANNA.utterances]
    assert (opened().digest, packing.times) == (first.digest, 1)
    text = recorded / f"{ANNA.utterances[0].id}.txt"
    text.write_text("abc")
    os.utime(text, ns=(1, 1))  # whatever the clock's own steps are
    changed = opened()
    assert (changed.utterance(0).text, packing.times) == ("abc", 2)
    text.unlink()
    assert (opened().utterance_count, packing.times) == (len(texts) - 1, 3)
    assert (opened(user="somebody else").utterance_count, packing.times) == (len(texts) - 1, 4)


def test_it_is_nobody_elses_to_read(recorded: Path, tmp_path: Path) -> None:
    open_node_store(recorded, home=tmp_path / "home", user=None, language="en")
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_a_store_is_taken_as_it_is(tmp_path: Path, cluster_stores: Path, packing: Packing) -> None:
    found = open_node_store(cluster_stores / ANNA.name, home=tmp_path / "home", user=None, language="en")
    assert (found.path, packing.times) == (cluster_stores / ANNA.name, 0)
    assert not (tmp_path / "home").exists()


def test_what_is_neither_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for data, said in ((tmp_path / "empty", "does not hold recordings"), (tmp_path / "nothing", "no store at")):
        with pytest.raises(InputError, match=said):
            open_node_store(data, home=tmp_path / "home", user=None, language="en")
    assert not (tmp_path / "home").exists()
