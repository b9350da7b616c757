"""Runs of a suite side by side: interrupts. (Deaths: test_suite_deaths.py; what they say: tests/cli/test_run.py.)"""

import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml
from tests.commands import command, finished
from tests.points import SAVED, Gate

LABELS = ("one", "two")


@pytest.fixture
def suite(federated_recipe: Path, tmp_path: Path) -> Path:
    """Two runs that would go on for ever."""
    long = ["federation.steps=100000", "federation.evaluate_every=100000"]
    runs = {
        label: {"recipe": str(federated_recipe), "overrides": [*long, f"seed={number}"]}
        for number, label in enumerate(LABELS, start=1)
    }
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"about": "two long runs", "runs": runs}))
    return path


def started(suite: Path, stores: Path, out: Path, gate: Gate) -> AbstractContextManager[subprocess.Popen[str]]:
    """All of them are held at their first checkpoint."""
    arguments = [sys.executable, "-m", "sottovoce", "run", suite, "--stores", stores, "--out", out, "--at-once", "2"]
    arguments += ["--runs", out / "seeds", "--yes"]
    environment = {"OMP_NUM_THREADS": "1", **gate.environment(SAVED)}
    return command(arguments, environment=environment, stdout=subprocess.DEVNULL)


@pytest.mark.long
def test_an_interrupt_of_the_first_process_alone_stops_and_saves_all(
    suite: Path, short_stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "both"
    with Gate() as gate, started(suite, short_stores, out, gate) as running:
        held = [gate.reached(running) for _ in LABELS]
        running.send_signal(signal.SIGINT)
        for child in held:
            child.go()
        code, _, err = finished(running)
    assert code == 130, err
    assert "and saved: the same command goes on" in err
    assert "Traceback" not in err
    for label in LABELS:
        assert (out / label / "checkpoints/latest").exists()
        assert not (out / label / "results.json").exists()


def test_a_suite_interrupted_before_its_runs_does_not_look_finished(
    suite: Path, recipe_file: Path, short_stores: Path, tmp_path: Path
) -> None:
    seed = tmp_path / "seed.yaml"
    written = recipe_file.read_text().replace("steps: 12", "steps: 100000").replace("every: 5", "every: 100000")
    seed.write_text(written.replace("store: tones", "store: tones, part: seed, seed_part: {fraction: 0.3}"))
    content = yaml.safe_load(suite.read_text())
    for run in content["runs"].values():
        run["overrides"].append(f"federation.seed_model={seed}")
        run["overrides"] += ["data.people_seed=1", "data.part=federation", "data.seed_part.fraction=0.3"]
    suite.write_text(yaml.safe_dump(content))
    out = tmp_path / "both"
    with Gate() as gate, started(suite, short_stores, out, gate) as running:
        held = gate.reached(running)
        running.send_signal(signal.SIGTERM)
        held.go()
        code, _, err = finished(running)
    assert code == 130, err
    assert "stopped after 0 of 2 runs: the same command goes on" in err
    assert not (out / "report.html").exists()
