"""What a release leaves in its folder: no clock that tells how many took part, and nobody who could be looked up."""

import base64
import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.published import (
    CLOCK,
    RARE,
    clocks,
    differences,
    every,
    machine,
    named,
    packed,
    people_of,
    person,
    same_sums,
    search,
    still_clock,
)

from sottovoce.base.seeds import name_key
from sottovoce.cli import main
from sottovoce.data.store import Store

RECIPE = """
about: tones, federated
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 2
  cohort_size: 2
  local: {batch_seconds: 4, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3, mode: %s}
  engine: sequential
  evaluate_every: 1
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("stores"), map(person, range(45)))


def made(mode: str, place: Path, stores: Path, *changes: str) -> Path:
    """The folder of a run as the command line leaves it, its report in it, made while the clock stands still."""
    (place / "tones.yaml").write_text(RECIPE % mode)
    out = place / mode
    arguments = ["run", place / "tones.yaml", *changes, "--stores", stores, "--runs", place, "--out", out]
    with still_clock(), pytest.MonkeyPatch.context() as patch:
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


# Clocks.


def test_no_clock_is_in_anything_that_a_release_writes(release: Path) -> None:
    assert clocks(release, begun=CLOCK, ended=CLOCK) == []
    assert search(release, machine(release.parent)) == []
    assert not (release / "tensorboard").exists()


def test_a_simulation_keeps_its_tensorboard(simulation: Path) -> None:
    """And the search finds a clock where there is one."""
    found = clocks(simulation, begun=CLOCK, ended=CLOCK)
    in_content = [one for one in found if "modification" not in one.what]
    assert {one.what for one in in_content} == {"a time in binary (<f8)", f"the time {int(CLOCK)}"}
    assert all("tfevents" in one.file for one in in_content)
    assert len(found) > len(in_content)


def test_all_files_of_a_release_have_one_time(release: Path) -> None:
    times = {path.lstat().st_mtime for path in (release, *release.rglob("*"))}
    assert len(times) == 1
    (only,) = times
    assert time.gmtime(only)[:3] == (1980, 1, 1)


def test_showing_a_finished_release_again_leaves_no_time_either(release: Path, stores: Path) -> None:
    assert made("secure", release.parent, stores) == release
    test_all_files_of_a_release_have_one_time(release)


# People.


def test_nobody_can_be_looked_up_in_the_folder_of_a_release(release: Path, stores: Path) -> None:
    assert search(release, people_of(Store(stores / "tones"), more=[RARE])) == []


def test_no_path_of_the_machine_is_in_the_folder_of_a_release(release: Path, stores: Path) -> None:
    """A home folder has somebody's name. What a recipe itself names is in its config.yaml; this one names no path."""
    assert search(release, machine(release.parent, stores)) == []


def test_a_personal_part_changes_and_adds_no_byte_of_the_release_it_belongs_to(
    release: Path, stores: Path, tmp_path: Path
) -> None:
    before, times = dict(every(release)), [path.lstat().st_mtime for path in release.rglob("*")]
    asked = ["--data", stores / "tones", "--user", "corpus-voice-0000", "--out", tmp_path / "part"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sottovoce", "personalise", *map(str, (release, *asked, "--steps", 1))])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    assert dict(every(release)) == before
    assert [path.lstat().st_mtime for path in release.rglob("*")] == times
    part = json.loads((tmp_path / "part/personal.json").read_text())
    assert search(release, {part["base"].encode(): "a part's model", part["tensors"].encode(): "a part"}) == []


def test_a_simulation_names_its_test_speakers(simulation: Path, stores: Path) -> None:
    """And the search finds people where they are named."""
    people = people_of(Store(stores / "tones"), more=[RARE])
    names = {one.what for one in search(simulation, people) if one.file == "results.json"}
    tested = {f"corpus-voice-{number:04}" for number in range(4, 45, 5)}
    assert names == {*tested, RARE}


def test_the_search_finds_what_is_spelt_otherwise(simulation: Path) -> None:
    """A name in hex, in base64 wherever it begins, escaped, hashed with no key; each of them put there by hand."""
    name = "corpus-voïce-0001"
    plain = name.encode()
    spelt = [plain.hex().encode(), json.dumps(name).encode(), name.encode("utf-16-le"), str(name_key(name)).encode()]
    spelt += [base64.b64encode(begun + plain + b" and more") for begun in (b"", b"a", b"ab")]
    spelt += [hashlib.sha256(plain).digest(), base64.b64encode(hashlib.blake2b(plain, digest_size=16).digest())]
    for written in spelt:
        (simulation / "left.bin").write_bytes(b"something " + written + b" something")
        assert {one.file for one in search(simulation, named([name]))} == {"left.bin"}, written
    (simulation / "left.bin").unlink()


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


# Every kind of release. A new one is a line here: what a recipe changes for it.

KINDS = {
    "independent": [],
    "adaptive": ["federation.privacy.adaptive={target_quantile: 0.5, count_noise_std: 10.0}"],
    "banded": ["federation.privacy.mechanism={kind: banded, bands: 3, cycle: 4}", "federation.steps=5"],
    "blt": ["federation.privacy.mechanism={kind: blt, buffers: 2, cycle: 4}", "federation.steps=5"],
    "silos": ["federation.clients={rule: silo, silos: 4}", "federation.cohort_size=4"],
    "low rank": ["federation.trainable=lora(r=2, alpha=4)"],
    "a part": ["federation.trainable=blocks.1, output"],
    "client_wer": ["federation.client_wer={words: 10, noise_multiplier: 20}", "federation.clients.holdout=0.5"],
    "server pass": ["federation.server_pass={data: public, steps: 1, batch_seconds: 4, lr: 0.01}"],
    "16 bits": ["federation.model_bits=16"],
}
IN_CI = {"banded", "silos"}  # of these kinds; the others are like them, and long


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stores with the same dev, test and public people, and other clients: as many, other names, texts and lengths."""
    judged = [person(number) for number in (*range(3, 10, 5), *range(4, 10, 5))]
    public = [dataclasses.replace(person(number), split="public") for number in (30, 31)]
    first = [person(number, utterances=4) for number in (0, 1, 2, 5, 6, 7, 10, 11)]
    others = [person(number, utterances=2 + number % 3, of=0) for number in range(1000, 1008)]
    first_at, other_at = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("other")
    return packed(first_at, [*judged, *public, *first]), packed(other_at, [*judged, *public, *others])


def exported(run: Path, *options: str) -> Path:
    """The run's model with its guarantee, as the command line writes them while the clock stands still."""
    out = run.with_name(f"{run.name}-exported{len(options)}")
    with still_clock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sottovoce", "export", str(run), "--out", str(out), *options])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return out


FAMILIES = {
    "ctc_transformer": [],
    "crdnn": ["model={family: crdnn, size: tiny}"],
    "transducer": ["model={family: transducer, size: tiny}"],
    "low rank": ["federation.trainable=lora(r=2, alpha=4)"],
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "family",
    [pytest.param(k, marks=() if k in ("ctc_transformer", "low rank") else pytest.mark.long) for k in FAMILIES],
)
def test_an_export_of_a_release_holds_nothing_private(family: str, stores: Path, tmp_path: Path) -> None:
    run = made("secure", tmp_path, stores, *FAMILIES[family])
    people = people_of(Store(stores / "tones"), more=[RARE]) | machine(tmp_path, stores)
    for options in ((), ("--merged",)):
        folder = exported(run, *options)
        assert search(folder, people) == []
        assert clocks(folder, begun=CLOCK, ended=CLOCK) == []
        assert not {"diagnostics.jsonl", "results.json", "environment.json", "inputs.json"} & {*os.listdir(folder)}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in IN_CI else pytest.mark.long) for k in KINDS])
def test_no_kind_of_release_tells_anything_but_its_noised_sums(
    kind: str, both: tuple[Path, Path], tmp_path: Path
) -> None:
    folders = []
    for stores in both:
        place = tmp_path / stores.name
        place.mkdir()
        with same_sums():
            folders.append(made("secure", place, stores, *KINDS[kind]))
        assert search(folders[-1], people_of(Store(stores / "tones"), more=[RARE]) | machine(place, stores)) == []
        assert clocks(folders[-1], begun=CLOCK, ended=CLOCK) == []
    assert differences(*folders) == []
    assert differences(*map(exported, folders)) == []
