"""Whoever a release looks at besides its clients is none of them: by name, and by their recordings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tones import FEW_WORDS, identity, pack_tones, speaker
from tests.training.running import run_here

from sottovoce import load_recipe
from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker
from sottovoce.data.population import Population, PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.training import disjointness
from sottovoce.training.disjointness import find_shared_recording
from sottovoce.training.preflight import Stage, check_stages
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import list_split_rows

SHORT = ["federation.steps=1", "federation.evaluate_every=1", "federation.privacy.adaptive=null"]
SECURE = "federation.privacy.mode=secure"
SEED = """
about: a seed
data: {store: double}
model: {size: tiny, dropout: 0.1, layer_drop: 0.2}
central: {steps: 1, batch_seconds: 4, optimiser: {name: sgd}, schedule: {name: constant, lr: 0.1}}
"""
HEARD = "is a client's too, sample for sample, whatever its speaker's name"


def packed(place: Path, people: list[RenderedSpeaker]) -> None:
    pack_corpus(
        Corpus("tones", "en", sorted(people, key=lambda one: (one.split, one.name)), identity, ProblemLog()), place
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients' store, and another in which one client's recordings are somebody else's, in every split."""
    folder = tmp_path_factory.mktemp("stores")
    pack_tones(folder / "tones", **FEW_WORDS)
    others = [speaker(number, **FEW_WORDS) for number in range(20, 30)]
    theirs = [replace(speaker(0, **FEW_WORDS), name="somebody", split=split) for split in ("train", "dev", "test")]
    packed(folder / "double", [*others, *theirs])
    packed(folder / "others", others)
    return folder


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (["data.dev=double:dev"], "data.dev: utterance 0-0"),
        (["data.test=[test, double:test]"], "data.test double:test: utterance 0-0"),
        (["federation.seed_model=seed.yaml"], "double: utterance|seed.*: utterance 0-0"),
    ],
)
def test_a_client_s_recordings_under_another_name_are_refused(
    changes: list[str],
    where: str,
    federated_recipe: Path,
    stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed.yaml").write_text(SEED)
    with pytest.raises(InputError, match=f"({where}).* {HEARD}"):
        run_here(federated_recipe, [*SHORT, SECURE, *changes], stores, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    recipe = load_recipe(str(federated_recipe), [*SHORT, SECURE, *changes])
    around = RunContext(runs=tmp_path / "runs", stores=stores, device=torch.device("cpu"))
    with pytest.raises(InputError, match=HEARD):  # and before anything long begins
        check_stages([Stage("run", recipe, tmp_path / "run")], around)


def test_a_release_may_be_judged_on_others_and_a_simulation_is_compared_by_name(
    federated_recipe: Path, stores: Path, tmp_path: Path
) -> None:
    others = ["data.dev=others:dev", "data.test=[others:test]"]
    assert run_here(federated_recipe, [*SHORT, SECURE, *others], stores, tmp_path / "release").results is not None
    double = ["data.dev=double:dev"]
    assert run_here(federated_recipe, [*SHORT, *double], stores, tmp_path / "simulation").results is not None


def clients_of(stores: Path) -> Population:
    return build_population(Store(stores / "tones"), PopulationSettings(split="train"), seed=1)


def test_what_was_compared_is_not_compared_again(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disjointness, "_disjoint", set())
    clients, others, double = clients_of(stores), Store(stores / "others"), Store(stores / "double")
    looked: list[int] = []
    glimpse = disjointness._digest_excerpt
    monkeypatch.setattr(
        disjointness, "_digest_excerpt", lambda store, row: (looked.append(row), glimpse(store, row))[1]
    )
    for _ in range(2):
        assert find_shared_recording(clients, others, list_split_rows(others, "dev")) is None
        heard = find_shared_recording(clients, double, list_split_rows(double, "dev"))
        assert heard is not None
        assert double.utterance(heard).id.startswith("0-")  # found every time
    assert find_shared_recording(clients, others, list_split_rows(others, "test")) is None
    once = len(looked)
    assert find_shared_recording(clients, others, list_split_rows(others, "dev")) is None
    assert len(looked) == once


def test_little_is_read_of_recordings_that_are_not_the_same(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those of another length nothing, of the others 256 samples."""
    monkeypatch.setattr(disjointness, "_disjoint", set())
    clients, others = clients_of(stores), Store(stores / "others")
    read: list[int] = []
    samples = Store.samples
    monkeypatch.setattr(
        Store, "samples", lambda own, row, **part: (read.append(len(samples(own, row, **part))), samples(own, row))[1]
    )
    rows = list_split_rows(others, "train")
    assert find_shared_recording(clients, others, rows) is None
    lengths, theirs = (
        set(np.diff(store.audio_offsets)[chosen].tolist())
        for store, chosen in ((others, rows), (Store(stores / "tones"), clients.utterance_rows()))
    )
    assert lengths & theirs
    assert read
    assert {*read} == {disjointness.EXCERPT_SAMPLES}


def test_silence_is_nobodys(tmp_path: Path) -> None:
    """Two people who have not said a word have the same recording, and are two people."""
    silent = np.zeros(1000, dtype=np.int16)
    people = [speaker(0, **FEW_WORDS), speaker(3, **FEW_WORDS)]
    quiet = [replace(one, utterances=[replace(one.utterances[0], samples=silent)]) for one in people]
    packed(tmp_path / "tones", quiet)
    store = Store(tmp_path / "tones")
    clients = build_population(store, PopulationSettings(split="train"), seed=1)
    assert find_shared_recording(clients, store, list_split_rows(store, "dev")) is None
