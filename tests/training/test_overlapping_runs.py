"""Runs whose rounds overlap: killed anywhere they go on from the same models, and pay for no more than others."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.points import CHARGED, SAVED, Point
from tests.ranks import in_processes
from tests.training import forked
from tests.training.test_distributed_runs import run_here

from sottovoce import InputError, Simulation, load_recipe
from sottovoce.config import as_yaml
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import verify
from sottovoce.training.checkpoint import RECENT, load_latest_checkpoint, save_checkpoint
from sottovoce.training.run_context import Outcome

STEPS, STALENESS = 8, 3
OVERLAPPING = f"federation.staleness={STALENESS}"
SHORT = [f"federation.steps={STEPS}", f"federation.evaluate_every={STEPS}", "federation.privacy.adaptive=null"]
BLT = "federation.privacy.mechanism={kind: blt, buffers: 2, cycle: 5}"
ADDED = Point("sottovoce.privacy.plan:Plan.add_noise", nth=2)
KEPT = Point("sottovoce.federated.staleness:RecentModels.keep", nth=2)
SAVING = replace(SAVED, at="call")


def killed_often(arguments: list[object], *points: Point) -> None:
    """A checkpoint follows every second round: each of these kills loses what came after the last."""
    for point in points:
        ended = forked.run([*arguments, "--resume"], kill_at=point)
        assert ended.code == -signal.SIGKILL, ended.err
    ended = forked.run([*arguments, "--resume"])
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("more", [pytest.param([], id="independent"), pytest.param([BLT], id="correlated")])
def test_a_simulation_killed_anywhere_ends_with_the_same_bits(
    more: list[str], narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """With an average of models and moments of LAMB beside the earlier models."""
    arguments = ["run", narrow_recipe, *SHORT, OVERLAPPING, *more, "--stores", short_stores, "--out"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    killed_often([*arguments, whole])
    killed_often([*arguments, broken], replace(CHARGED, nth=2), ADDED, KEPT, SAVING)
    for file in ("model.safetensors", "optimiser.safetensors"):
        expected, found = (run / "checkpoints/latest" / file for run in (whole, broken))
        assert found.read_bytes() == expected.read_bytes()
    for file in ("ledger.jsonl", "results.json"):
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    found, _ = load_latest_checkpoint(broken / "checkpoints")
    assert found is not None
    assert len(found.optimiser[RECENT]) == STALENESS
    assert verify(broken / "ledger.jsonl").attempts == STEPS


@pytest.mark.long
def test_a_release_killed_anywhere_pays_for_every_attempt(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ["run", narrow_recipe, *SHORT, OVERLAPPING, "federation.privacy.mode=secure"]
    killed_often([*arguments, "--stores", short_stores, "--out", out], CHARGED, replace(CHARGED, nth=2), KEPT, SAVING)
    report = verify(out / "ledger.jsonl")
    assert report.steps == STEPS
    assert report.attempts >= STEPS + 4
    intents = [record for record in read_chain(out / "ledger.jsonl").records if record["kind"] == "intent"]
    assert len({intent["cohort"] for intent in intents}) == report.attempts


def test_events_and_epsilon_are_those_of_the_same_rounds_without(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("without", "with")]
    for folder, more in zip(folders, ([], [OVERLAPPING]), strict=True):
        run_here(narrow_recipe, [*SHORT, *more], short_stores, folder)
    without, overlapping = (read_chain(folder / "ledger.jsonl").records for folder in folders)
    charged = [
        [{name: record[name] for name in ("step", "attempt", "event", "cohort", "epsilon")} for record in records]
        for records in ([r for r in all_of if r["kind"] == "intent"] for all_of in (without, overlapping))
    ]
    assert charged[0] == charged[1]
    assert without[0]["plan"] == overlapping[0]["plan"]
    assert verify(folders[0] / "ledger.jsonl").spent == verify(folders[1] / "ledger.jsonl").spent
    models = [load_recogniser(folder / "checkpoints/latest").parameters for folder in folders]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])


def one_thread_run(*arguments: Any) -> Outcome:
    torch.set_num_threads(1)
    return run_here(*arguments)


@pytest.mark.long
def test_engines_and_ranks_come_to_the_same(narrow_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    """Cohorts of two at most, whose sum has the same bits whoever adds it up; a stack rounds in its own way."""
    capped = ["federation.cohort_size=2", "federation.privacy.sampling=fixed_size"]
    ways = {"sequential": (1, "sequential"), "workers": (1, "workers"), "ranks": (2, "sequential")}
    models: dict[str, Mapping[str, torch.Tensor]] = {}
    for name, (count, engine) in {**ways, "stacked": (1, "stacked")}.items():
        changes = [*SHORT, *capped, OVERLAPPING, "federation.workers=2", f"federation.engine={engine}"]
        found = in_processes(count, one_thread_run, narrow_recipe, changes, short_stores, tmp_path / name)[0]
        models[name] = load_recogniser(found.folder / "checkpoints/latest").parameters
    for name, expected in models["sequential"].items():
        assert torch.equal(models["workers"][name], expected)
        assert torch.equal(models["ranks"][name], expected)
        torch.testing.assert_close(models["stacked"][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_rounds_in_the_hand_are_those_of_a_run(narrow_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    changes = [*SHORT, OVERLAPPING, "federation.engine=sequential", "federation.server.ema=null"]
    run_here(narrow_recipe, changes, short_stores, tmp_path / "run")
    last = load_recogniser(tmp_path / "run/checkpoints/latest").parameters
    simulation = Simulation(load_recipe(str(narrow_recipe), changes), stores=short_stores, runs=tmp_path / "runs")
    assert len([*simulation.rounds()]) == STEPS
    assert all(torch.equal(simulation.model.parameters[name], tensor) for name, tensor in last.items())


# What a checkpoint must hold.


def half_done(narrow_recipe: Path, short_stores: Path, tmp_path: Path) -> list[object]:
    arguments = ["run", narrow_recipe, *SHORT, OVERLAPPING, "--stores", short_stores, "--out", tmp_path / "run"]
    ended = forked.run(arguments, kill_at=replace(CHARGED, nth=6))
    assert ended.code == -signal.SIGKILL, ended.err
    return [*arguments, "--resume"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("gone", "the checkpoint has no earlier models: it was saved without staleness"),
        ("fewer", "the checkpoint has 2 earlier models, expected 3"),
        ("others", "is not what the ledger knows of it: the model before step 1 is "),
    ],
)
def test_earlier_models_that_are_not_those_of_the_run_are_refused(
    change: str, words: str, narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """Clients would train from a model that was never released, with the noise of rounds that are charged already."""
    arguments = half_done(narrow_recipe, short_stores, tmp_path)
    found, _ = load_latest_checkpoint(tmp_path / "run/checkpoints")
    assert found is not None
    tensors = dict(found.optimiser)
    recent_NP = tensors.pop(RECENT)
    if change == "fewer":
        tensors[RECENT] = recent_NP[1:].clone()
    if change == "others":
        tensors[RECENT] = recent_NP * torch.tensor([1.001, 1.0, 1.0])[:, None]
    state = {name: value for name, value in found.state.items() if name != "files"}
    save_checkpoint(tmp_path / "run/checkpoints", replace(found, optimiser=tensors, state=state))
    ended = forked.run(arguments)
    assert ended.code == 2
    assert words in " ".join(ended.err.split())


# Recipes.


def test_a_recipe_without_is_written_as_it_always_was(narrow_recipe: Path) -> None:
    assert "staleness" not in as_yaml(load_recipe(str(narrow_recipe), []))
    assert "staleness: 3" in as_yaml(load_recipe(str(narrow_recipe), [OVERLAPPING, *SHORT]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["federation.privacy.adaptive={target_quantile: 0.5}"], "with privacy.adaptive: a cohort"),
        (
            ["federation.estimate_bound={clients: 2}", "federation.local.local_steps=2"],
            "with estimate_bound: the bound",
        ),
        (["federation.trainable=lora(r=2, factors=alternate)"], "with LoRA's factors=alternate or project: an update"),
        (["federation.trainable=lora(r=2, factors=project)"], "with LoRA's factors=alternate or project: an update"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    changes: list[str], words: str, narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        run_here(narrow_recipe, [*SHORT, OVERLAPPING, *changes], short_stores, tmp_path / "run")
    assert str(refused.value).startswith(f"federation.staleness=3 {words}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("staleness", ["0", "-1", "101", "1.5"])
def test_no_number_of_rounds_is_refused_where_the_recipe_is_read(staleness: str, narrow_recipe: Path) -> None:
    with pytest.raises(InputError, match=r"federation\.staleness"):
        load_recipe(str(narrow_recipe), [f"federation.staleness={staleness}"])
