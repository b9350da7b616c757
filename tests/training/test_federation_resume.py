"""Killed at any instant, a simulation ends with the same bits and a release pays for every attempt."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.commands import command, finished
from tests.points import CHARGED, SAVED, Gate, Point
from tests.training import forked

from sottovoce.base.seeds import stream
from sottovoce.privacy.ledger import verify
from sottovoce.training import checkpoint

KILLS = 10
STEPS = 12
# A checkpoint follows every second round. The first kill loses one round that was charged; the second begins where the
# first one did and loses two, when the checkpoint that would have covered them is about to be written.
BETWEEN_CHARGE_AND_CHECKPOINT = (CHARGED, replace(SAVED, at="call"))
BY_THE_CLOCK = {"seconds", "audio_seconds_per_second", "waited_for_data_seconds", "memory_mib", "device_memory_mib"}


def records(file: Path) -> list[dict[str, Any]]:
    """All but what the clock decides."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in BY_THE_CLOCK} for line in lines]


def kill_often(
    arguments: list[object], tmp_path: Path, *, calls: int, seed_name: str, times: int = KILLS
) -> list[Path]:
    """Kill runs of `arguments` as many `times` in all; the folders of all runs, now finished.

    Twice between a charge and the checkpoint that would cover it, just after the charge and when a checkpoint is begun;
    then wherever chance says. A run that is finished before its moment comes is done, and another is begun.
    """
    moments = stream(1, "kill -9", seed_name).integers(1, calls, size=200).tolist()
    points = [*BETWEEN_CHARGE_AND_CHECKPOINT, *(Point(nth=moment, at="call") for moment in moments)]
    folders, kills = [tmp_path / "broken-0"], 0
    for number, point in enumerate(points):
        ended = forked.run([*arguments, "--out", folders[-1], "--resume"], kill_at=point)
        if ended.code == -signal.SIGKILL:
            kills += 1
        else:
            assert number >= len(BETWEEN_CHARGE_AND_CHECKPOINT), "a named point never came"
            assert ended.code == 0, ended.err
            folders.append(tmp_path / f"broken-{len(folders)}")
        if kills == times:
            break
    assert kills == times
    ended = forked.run([*arguments, "--out", folders[-1], "--resume"])
    assert ended.code == 0, ended.err
    return folders


def test_a_simulation_killed_ten_times_ends_with_the_same_bits_and_charges_each_step_once(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    arguments = ["run", narrow_recipe, "--stores", short_stores]
    whole = tmp_path / "whole"
    ended = forked.run([*arguments, "--out", whole], counts=True)
    assert ended.code == 0, ended.err

    for broken in kill_often(arguments, tmp_path, calls=ended.calls, seed_name="seeded"):
        for file in ("model.safetensors", "optimiser.safetensors"):
            expected, found = (run / "checkpoints/latest" / file for run in (whole, broken))
            assert found.read_bytes() == expected.read_bytes(), (broken, file)
        assert (broken / "model").readlink() == (whole / "model").readlink()
        assert (broken / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
        for file in ("metrics.jsonl", "diagnostics.jsonl"):
            assert records(broken / file) == records(whole / file)
        assert (broken / "results.json").read_text() == (whole / "results.json").read_text()
        report = verify(broken / "ledger.jsonl")
        assert (report.steps, report.attempts) == (STEPS, STEPS)


def test_a_release_killed_ten_times_charges_every_attempt_and_repeats_neither_cohort_nor_noise(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    arguments = ["run", narrow_recipe, "--stores", short_stores, "federation.privacy.mode=secure"]
    ended = forked.run([*arguments, "--out", tmp_path / "whole"], counts=True)
    assert ended.code == 0, ended.err
    folders = kill_often(arguments, tmp_path, calls=ended.calls, seed_name="secure")

    repeated = 0
    models = []
    for run in (tmp_path / "whole", *folders):
        found, complaints = checkpoint.load_latest_checkpoint(run / "checkpoints")
        assert not complaints
        assert found is not None
        report = verify(run / "ledger.jsonl")
        assert report.steps == STEPS
        repeated += report.attempts - report.steps
        intents = [r for r in ledger(run) if r["kind"] == "intent"]
        # Each attempt at a step counts, and its ε is on the ledger before the next.
        spent = [intent["epsilon"] for intent in intents]
        assert spent == sorted(set(spent))
        assert len({intent["cohort"] for intent in intents}) == len(intents) == report.attempts
        for step in range(STEPS):
            attempts = [intent["attempt"] for intent in intents if intent["step"] == step]
            assert attempts == [*range(1, len(attempts) + 1)]
        # Checkpoints lie before even steps: what an odd one starts from was released by the attempt before it.
        released = [intent["parameters"] for intent in intents if intent["step"] % 2]
        assert len(set(released)) == len(released)
        models.append((run / "checkpoints/latest/model.safetensors").read_bytes())
    assert repeated >= len(BETWEEN_CHARGE_AND_CHECKPOINT)
    assert len(set(models)) == len(models)


def ledger(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines())
    return [line.get("record", line) for line in lines]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_round_saves_and_says_how_to_go_on(
    number: signal.Signals, narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ["run", narrow_recipe, "--stores", short_stores, "--out", out]
    arguments += ["--yes", "--json", "federation.steps=100000", "federation.evaluate_every=100000"]
    with Gate() as gate, forked.start(arguments, hold_at=(SAVED, gate)) as running:
        held = gate.reached(running)
        os.kill(held.pid, number)
        held.go()
        ended = running.end()
    assert ended.code == 130, ended.err
    found, _ = checkpoint.load_latest_checkpoint(out / "checkpoints")
    assert found is not None
    assert json.loads(ended.out) == {"ended": {"step": found.step, "reason": "interrupted"}}
    assert f"stopped after step {found.step:,} and saved: the same command with --resume goes on" in ended.err
    report = verify(out / "ledger.jsonl")
    assert (report.steps, report.committed_step) == (found.step, found.step - 1)
    assert [record["step"] for record in records(out / "metrics.jsonl")] == [*range(found.step + 1)]
    assert not (out / "results.json").exists()


@pytest.mark.long
def test_the_same_bits_in_processes_that_hash_differently(
    narrow_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    """Two machines' worth: nothing may hang on the order of a set or on the address of an object."""
    changes = ["federation.steps=2", "federation.evaluate_every=2"]
    with ExitStack() as ends:
        running = []
        for number in (1, 2):
            arguments = [sys.executable, "-m", "sottovoce", "run", narrow_recipe, *changes]
            arguments += ["--stores", short_stores, "--out", tmp_path / f"run-{number}"]
            environment = {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"}
            running.append(ends.enter_context(command(arguments, environment=environment)))
        for process in running:
            code, _, err = finished(process)
            assert code == 0, err
    for file in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimiser.safetensors", "ledger.jsonl"):
        assert (tmp_path / "run-1" / file).read_bytes() == (tmp_path / "run-2" / file).read_bytes()
