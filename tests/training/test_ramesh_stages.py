"""The stages of `ramesh2023/…` on Libri-Light, LibriSpeech and MLS as they lie on disk, which no smoke run has."""

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from tests.data.corpora import trees

from sottovoce.config import load_recipe
from sottovoce.data.corpora import librilight, librispeech, mls
from sottovoce.data.store import Store, pack_corpus
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import build_training_population

ROOM = "ramesh2023/"
FRENCH = 5  # speakers to train on: one has labels
SMALL = ["model.size=tiny"]
ROUNDS = [*SMALL, "federation.cohort_size=2", "federation.steps=50", "federation.local.batch_utterances=2"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpora, made = tmp_path_factory.mktemp("corpora"), tmp_path_factory.mktemp("stores")
    trees.librilight(corpora / "librilight", trees.noise)
    large = librilight.read_librilight(corpora / "librilight", splits=["large"], point=True)
    pack_corpus(large, made / "librilight-large", workers=1)
    for number, split in enumerate(("dev-other", "test-clean", "test-other"), 300):
        folder = corpora / f"LibriSpeech/{split}/{number}/1"
        folder.mkdir(parents=True)
        soundfile.write(folder / f"{number}-1-0000.flac", trees.noise(number, 1)[0], trees.RATE, subtype="PCM_16")
        (folder / f"{number}-1.trans.txt").write_text(f"{number}-1-0000 SOME WORDS\n")
    pack_corpus(librispeech.read_librispeech(corpora / "LibriSpeech"), made / "librispeech", workers=1)
    for split, people in {"train": range(FRENCH), "dev": [50], "test": [60]}.items():
        said = {f"{who}_9_{i:06}": (f"b_{i}", 0.0, "un livre") for who in people for i in range(2)}
        sounds = {id: sound for i, id in enumerate(said) for sound in trees.noise(100 + i, 1)}
        trees.write_mls_split(corpora / "mls_french" / split, said, sounds, suffix="flac")
    (corpora / "mls_french/metainfo.txt").write_text(
        "SPEAKER | GENDER | PARTITION | MINUTES | BOOK ID | TITLE | CHAPTER\n"
    )
    pack_corpus(mls.read_mls(corpora / "mls_french"), made / "mls-french", workers=1)
    return made


def test_three_stages_from_libri_light_to_french(stores: Path, tmp_path: Path) -> None:
    said: list[str] = []
    around = RunContext(runs=tmp_path, stores=stores, device=torch.device("cpu"), say=said.append)

    def run(name: str, changes: list[str]) -> tuple[str, dict[str, Any]]:
        out = tmp_path / name.replace("/", "-")
        run_recipe(load_recipe(ROOM + name, changes), out=out, resume=False, context=around)
        results: dict[str, Any] = json.loads((out / "results.json").read_text())
        return str(out), results

    encoder, results = run("pretraining/fl48-52k", ROUNDS)
    assert results["ended"]["reason"] == "dry"
    encoder, results = run("pretraining/fr-fl48-52k", [*ROUNDS, f"federation.seed_model={encoder}"])
    assert results["ended"]["reason"] == "dry"
    assert not [line for line in said if "nobody knows in which order" in line]
    fine = ["central.steps=1", "central.schedule={name: constant, lr: 1e-3}", "tokens={kind: characters}"]
    _, results = run("table3/continued-fl48-52k", [*SMALL, *fine, f"central.start_from={encoder}"])
    assert [*results["test"]] == ["dev", "test"]


def test_labels_and_continued_pre_training_are_other_people(stores: Path) -> None:
    """Of the same seed, though their recipes know nothing of each other."""
    store = Store(stores / "mls-french")
    people = []
    for name in ("table3/continued-fl48-52k", "pretraining/fr-fl48-52k", "pretraining/fr-central-52k"):
        people.append(
            {store.user(row).name for row in build_training_population(load_recipe(ROOM + name), store).user_rows()}
        )
    labelled, *unlabelled = people
    assert len(labelled) == 1
    assert unlabelled == [{str(who) for who in range(FRENCH)} - labelled] * 2
