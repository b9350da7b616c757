"""Runs from a pretrained model: killed and resumed, repeated, over workers and over ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.points import CHARGED, SAVED
from tests.pretrained import write_pretrained
from tests.ranks import in_processes
from tests.training import forked
from tests.training.running import run_here

from sottovoce.models.recogniser import load_recogniser

pytest.importorskip("transformers", reason="the extra hf is not installed")

PART = "checkpoints/latest/part.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained")
    write_pretrained(place, "moonshine")
    return place


def test_workers_and_a_second_time_give_the_same_bits(place: Path, tmp_path: Path, one_thread: None) -> None:
    """A worker has one thread."""
    for name, engine in (("one", "sequential"), ("again", "sequential"), ("workers", "workers")):
        run_here(place / "federated.yaml", [f"federation.engine={engine}"], place / "stores", tmp_path / name)
        assert json.loads((tmp_path / name / "engine.json").read_text())["engine"] == engine
    for name in ("again", "workers"):
        assert (tmp_path / name / PART).read_bytes() == (tmp_path / "one" / PART).read_bytes()


@pytest.mark.long
def test_a_simulation_that_is_killed_ends_with_the_same_bits(place: Path, tmp_path: Path) -> None:
    """Killed after a charge, and again before the checkpoint that would cover it."""
    arguments = ["run", place / "federated.yaml", "--stores", place / "stores"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ended = forked.run([*arguments, "--out", whole])
    assert ended.code == 0, ended.err
    for point in (CHARGED, replace(SAVED, at="call")):
        assert forked.run([*arguments, "--out", broken, "--resume"], kill_at=point).code < 0
    ended = forked.run([*arguments, "--out", broken, "--resume"])
    assert ended.code == 0, ended.err
    for file in (PART, "frozen.safetensors", "ledger.jsonl", "results.json", "inputs.json"):
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.parametrize("kind", ["moonshine", pytest.param("wav2vec2", marks=pytest.mark.long)])
def test_two_ranks_find_what_one_finds(kind: str, tmp_path: Path) -> None:
    write_pretrained(tmp_path, kind)
    recipe, stores = tmp_path / "federated.yaml", tmp_path / "stores"
    two, other = in_processes(2, run_here, recipe, [], stores, tmp_path / "two")
    assert other.results is None
    one = run_here(recipe, [], stores, tmp_path / "one")
    assert one.results is not None
    assert two.results is not None
    assert two.results["start"] == one.results["start"]
    found = [load_recogniser(tmp_path / name / "model").parameters for name in ("one", "two")]
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)
