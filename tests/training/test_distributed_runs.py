"""Federated runs in several processes: whoever is lost, whenever, all begin again from the last checkpoint."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.points import CHARGED, SAVED, Gate, Point, Watch, hold
from tests.ranks import in_processes, processes, result
from tests.training.launched import Kills, calls, launch
from tests.training.running import run_here

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.models.recogniser import load_recogniser
from sottovoce.privacy.ledger import verify
from sottovoce.training import checkpoint
from sottovoce.training.run_context import Outcome

STEPS = 12
TAKES_PART = Point("sottovoce.federated.ranks:ClientsOverRanks.take_part", at="call")
IN_ROUNDS = ((0, CHARGED), (1, replace(TAKES_PART, nth=2)))
BY_THE_CLOCK = {"seconds", "audio_seconds_per_second", "waited_for_data_seconds", "memory_mib", "device_memory_mib"}


def records(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in BY_THE_CLOCK} for line in lines]


def kills_of(log: Path, *, name: str) -> Kills:
    """Two in rounds that are charged but not yet in a checkpoint, one of each rank; then anywhere, either rank."""
    chance = stream(1, "lost ranks", name)
    ranks = chance.permutation([0, 1]).tolist()
    anywhere = [(rank, Point(nth=int(chance.integers(1, calls(log, rank=rank))), at="call")) for rank in ranks]
    return dict(enumerate([*IN_ROUNDS, *anywhere]))


def lost(log: Path, kills: Kills) -> int:
    """How many of the kills took place; one whose moment never came has left a count."""
    return sum(
        (log / f"said-{attempt}-{rank}.txt").exists() and not (log / f"calls-{attempt}-{rank}").exists()
        for attempt, (rank, _) in kills.items()
    )


@pytest.mark.long
def test_a_simulation_that_loses_ranks_ends_with_the_same_bits_and_charges_each_step_once(
    federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    arguments = ["run", federated_recipe, "--stores", short_stores]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    launch([*arguments, "--out", whole], processes=2, log=tmp_path / "log-whole")
    kills = kills_of(tmp_path / "log-whole", name="seeded")
    launch([*arguments, "--out", broken], processes=2, log=tmp_path / "log-broken", kills=kills)
    assert lost(tmp_path / "log-broken", kills) >= len(IN_ROUNDS)

    for file in ("model.safetensors", "optimiser.safetensors"):
        expected, found = (run / "checkpoints/latest" / file for run in (whole, broken))
        assert found.read_bytes() == expected.read_bytes()
    for file in ("ledger.jsonl", "results.json"):
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    for file in ("metrics.jsonl", "diagnostics.jsonl"):
        assert records(broken / file) == records(whole / file)
    report = verify(broken / "ledger.jsonl")
    assert (report.steps, report.attempts) == (STEPS, STEPS)


def test_a_release_that_loses_ranks_charges_every_attempt(
    federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    arguments = ["run", federated_recipe, "--stores", short_stores, "federation.privacy.mode=secure"]
    arguments += ["federation.evaluate_every=12", "federation.checkpoint_every=12"]
    kills = {0: (1, replace(TAKES_PART, nth=6))}
    launch([*arguments, "--out", tmp_path / "broken"], processes=2, log=tmp_path / "log", kills=kills)

    report = verify(tmp_path / "broken/ledger.jsonl")
    assert report.steps == STEPS
    assert report.attempts == STEPS + 6, "six rounds were paid for when the sixth was lost with its cohort"
    lines = [json.loads(line) for line in (tmp_path / "broken/ledger.jsonl").read_text().splitlines()]
    intents = [line["record"] for line in lines if line["record"]["kind"] == "intent"]
    assert len({intent["cohort"] for intent in intents}) == report.attempts
    spent = [intent["epsilon"] for intent in intents]
    assert spent == sorted(set(spent))


def test_two_processes_train_the_seed_too_and_find_what_one_finds(
    federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    seed = tmp_path / "seed.yaml"
    seed.write_text(
        "about: seed\ndata: {store: tones, part: seed, seed_part: {fraction: 0.3}}\nmodel: {size: tiny}\n"
        "central: {steps: 2, batch_seconds: 4, optimiser: {name: sgd}, schedule: {name: constant, lr: 0.1}}\n"
    )
    changes = [f"federation.seed_model={seed}", "data.part=federation", "data.seed_part.fraction=0.3"]
    changes += ["federation.steps=2", "federation.evaluate_every=2", "federation.cohort_size=3"]
    two, other = in_processes(2, run_here, federated_recipe, changes, short_stores, tmp_path / "two")
    assert other.results is None
    one = run_here(federated_recipe, changes, short_stores, tmp_path / "one")  # the seed is there
    for outcome in (one, two):
        assert outcome.results is not None
    assert two.results["test"] == one.results["test"]
    assert two.results["start"] == one.results["start"]
    found = [load_recogniser(tmp_path / name / "model").parameters for name in ("one", "two")]
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_an_interrupt_of_one_process_stops_all_and_the_same_number_goes_on(
    federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    out, endless = tmp_path / "run", ["federation.steps=100000", "federation.evaluate_every=100000"]
    with Gate() as gate, processes(2, held_run, gate.address, federated_recipe, endless, short_stores, out) as started:
        first, second = started
        held = gate.reached(first, second)  # the first one writes, and the other waits for it in the next round
        os.kill(second.pid, signal.SIGTERM)
        held.go()
        outcomes = [result(running) for running in started]
    found, _ = checkpoint.load_latest_checkpoint(out / "checkpoints")
    assert found is not None
    assert [outcome.stopped_at for outcome in outcomes] == [found.step, None]
    report = verify(out / "ledger.jsonl")
    assert (report.steps, report.committed_step) == (found.step, found.step - 1)
    with pytest.raises(InputError, match="number of processes was 2 when the run began and is 1 now"):
        run_here(federated_recipe, endless, short_stores, out, resume=True)


def test_processes_share_the_work_of_a_dev_loss(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> None:
    changes = ["federation.steps=1", "federation.measure=loss"]
    alone = run_here(federated_recipe, changes, short_stores, tmp_path / "alone")
    both = in_processes(2, run_here, federated_recipe, changes, short_stores, tmp_path / "both")
    starts = [records(outcome.folder / "metrics.jsonl")[0] for outcome in (alone, both[0])]
    # Padding hangs on who shares a batch, and with it the last bits of float32.
    assert starts[1]["dev_loss"] == pytest.approx(starts[0]["dev_loss"], rel=1e-5)


def held_run(address: str, *arguments: Any) -> Outcome:
    with Watch(SAVED, lambda: hold(address)):
        return run_here(*arguments)


def test_a_release_may_go_on_with_another_number_of_processes(
    federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """Its sums are exact: they do not depend on who adds them up."""
    out, changes = tmp_path / "run", ["federation.privacy.mode=secure", "federation.evaluate_every=12"]
    interrupted = in_processes(2, interrupted_run, federated_recipe, changes, short_stores, out)
    assert interrupted[0].stopped_at is not None
    assert interrupted[0].stopped_at < STEPS
    outcome = run_here(federated_recipe, changes, short_stores, out, resume=True)
    assert outcome.results is not None
    assert verify(out / "ledger.jsonl").attempts == STEPS


def interrupted_run(*arguments: Any) -> Outcome:
    """Asks itself to stop before the first round is summed."""
    from sottovoce.federated.ranks import ClientsOverRanks

    whole = ClientsOverRanks.take_part

    def take_part(*order: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        whole(*order, **named)

    ClientsOverRanks.take_part = take_part  # type: ignore[method-assign]
    return run_here(*arguments)
