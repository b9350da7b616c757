"""What a release leaves in its folder: no clock that tells how many took part, and nobody who could be looked up."""

import dataclasses
import json
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tones import identity, speaker

from sottovoce.cli import main
from sottovoce.corpora.corpus import Corpus, RenderedSpeaker
from sottovoce.corpora.problems import ProblemLog
from sottovoce.seeds import name_key
from sottovoce.store import Store, pack

RECIPE = """
about: tones, federated
data: {store: tones}
model: {size: tiny}
federation:
  steps: 2
  cohort_size: 2
  local: {batch_seconds: 4, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3, mode: %s}
  engine: sequential
  evaluate_every: 1
"""
CLOCK = 4_102_444_800.125  # stands still in 2100
HOST = "a-host-with-a-name"
RARE = "an accent of one"


def named(number: int) -> RenderedSpeaker:
    """One of 45 people, nine of whom are tested on; their names and utterances occur nowhere by chance."""
    found = speaker(number, letters=(12, 14), utterances=2)
    spoken = [dataclasses.replace(one, id=f"utterance-{one.id}-of-them") for one in found.utterances]
    facts = {"gender": ("female", "male")[number % 2], "accent": RARE if number == 4 else "a common accent"}
    return dataclasses.replace(found, name=f"corpus-voice-{number:04}", utterances=spoken, metadata=facts)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stores")
    people = sorted((named(number) for number in range(45)), key=lambda one: (one.split, one.name))
    pack(Corpus("tones", "en", people, identity, ProblemLog()), place / "tones", workers=1)
    return place


def made(mode: str, place: Path, stores: Path) -> Path:
    """The folder of a run as the command line leaves it, its report in it, made while the clock stands still."""
    (place / "tones.yaml").write_text(RECIPE % mode)
    out = place / mode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: CLOCK)
        patch.setattr(time, "time_ns", lambda: int(CLOCK * 1e9))
        patch.setattr(socket, "gethostname", lambda: HOST)
        arguments = ["run", place / "tones.yaml", "--stores", stores, "--runs", place, "--out", out]
        patch.setattr(sys, "argv", ["sottovoce", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return out


@pytest.fixture(scope="module")
def release(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("secure", tmp_path_factory.mktemp("release"), stores)


@pytest.fixture(scope="module")
def simulation(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("seeded", tmp_path_factory.mktemp("simulation"), stores)


def files_of(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert {"results.json", "report.html", "report.txt", "metrics.jsonl", "ledger.jsonl"} <= {p.name for p in found}
    return found


def mentions(folder: Path, words: list[bytes]) -> list[tuple[str, bytes]]:
    """Where any of `words` stands in a file's name or content."""
    found = []
    for path in files_of(folder):
        content = str(path.relative_to(folder)).encode() + b"\n" + path.read_bytes()
        found += [(path.name, word) for word in words if word in content]
    return found


# Clocks.


def test_no_clock_is_in_anything_that_a_release_writes(release: Path) -> None:
    whole = int(CLOCK)
    seconds = [str(whole).encode(), struct.pack("<d", CLOCK), struct.pack("<d", float(whole))]
    parts = [*seconds, struct.pack("<q", whole), b"2100-01-0", HOST.encode()]
    assert mentions(release, parts) == []
    assert not (release / "tensorboard").exists()


def test_a_simulation_keeps_its_tensorboard(simulation: Path) -> None:
    """And the search finds a clock where there is one."""
    found = mentions(simulation, [struct.pack("<d", CLOCK)])
    assert found
    assert all("tfevents" in name for name, _ in found)


def test_all_files_of_a_release_have_one_time(release: Path) -> None:
    times = {path.lstat().st_mtime for path in (release, *release.rglob("*"))}
    assert len(times) == 1
    (only,) = times
    assert time.gmtime(only)[:3] == (1980, 1, 1)


def test_showing_a_finished_release_again_leaves_no_time_either(release: Path, stores: Path) -> None:
    assert made("secure", release.parent, stores) == release
    test_all_files_of_a_release_have_one_time(release)


# People.


def people_of(stores: Path) -> list[bytes]:
    """All by which a person can be looked up: names, utterances, texts, accents of one, and keys made from names."""
    store = Store(stores / "tones")
    users = [store.user(row) for row in range(store.user_count)]
    keys = [name_key(user.name) for user in users] + [int(key) for key in store.user_keys]
    utterances = [store.utterance(row) for row in range(int(store.user_utterances[-1]))]
    spelt = [spell for key in keys for spell in (str(key), f"{key:016x}"[:10])]
    told = [user.name for user in users] + [one.id for one in utterances] + [one.text or "" for one in utterances]
    return [word.encode() for word in (*told, *spelt, RARE)] + [key.to_bytes(8, "little") for key in keys]


def test_nobody_can_be_looked_up_in_the_folder_of_a_release(release: Path, stores: Path) -> None:
    assert mentions(release, people_of(stores)) == []


def test_no_path_of_the_machine_is_in_the_folder_of_a_release(release: Path, stores: Path) -> None:
    """A home folder has somebody's name. What a recipe itself names is in its config.yaml; this one names no path."""
    assert mentions(release, [str(release.parent).encode(), str(stores).encode()]) == []


def test_a_simulation_names_its_test_speakers(simulation: Path, stores: Path) -> None:
    """And the search finds people where they are named."""
    names = {word for file, word in mentions(simulation, people_of(stores)) if file == "results.json"}
    tested = {f"corpus-voice-{number:04}".encode() for number in range(4, 45, 5)}
    assert names == {*tested, RARE.encode()}


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_pseudonyms_pair_a_person_before_and_after(release: Path) -> None:
    found = results_of(release)
    after, before = (
        [person["speaker"] for person in test["test"]["per_speaker"]]
        for test in (found["test"], found["start"]["test"])
    )
    assert after == before == [f"speaker {number}" for number in range(1, 10)]


def test_one_persons_numbers_tell_no_count_of_words(release: Path) -> None:
    """A rate of 0.5376782 is 264 of 491 words and nothing else, and tables of a corpus say who has said 491."""
    test = results_of(release)["test"]["test"]
    assert all(person.keys() == {"speaker", "wer"} for person in test["per_speaker"])
    rates = [person["wer"] for person in test["per_speaker"]] + list(test["spread"].values())
    assert all(rate == round(rate, 2) for rate in rates)
    # Two groups of five and four people would give the four away: all nine are one group, which says nothing.
    assert test["groups"] == {}
