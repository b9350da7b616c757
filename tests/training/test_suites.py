"""Runs of a suite side by side: interrupts and deaths. (What they compute and say: tests/cli/test_run.py.)"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

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


def start(suite: Path, stores: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sottovoce", "run", suite, "--stores", stores, "--out", out, "--at-once", "2"]
    command += ["--runs", out / "seeds"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Where tests run in the background SIGINT is ignored, and so it would be in what they start.
    return subprocess.Popen(
        [*map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for_checkpoints(running: subprocess.Popen[str], out: Path, runs: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while len([*out.glob(f"{runs}/checkpoints/latest")]) < count:
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_of_the_first_process_alone_stops_and_saves_all(
    suite: Path, short_stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "both"
    running = start(suite, short_stores, out)
    wait_for_checkpoints(running, out, "*", len(LABELS))
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert "and saved: the same command goes on" in err
    assert "Traceback" not in err
    for label in LABELS:
        assert (out / label / "checkpoints/latest").exists()
        assert not (out / label / "results.json").exists()


def test_a_suite_interrupted_before_its_runs_does_not_look_finished(
    suite: Path, recipe_file: Path, short_stores: Path, tmp_path: Path
) -> None:
    seed = tmp_path / "seed.yaml"
    seed.write_text(recipe_file.read_text().replace("steps: 12", "steps: 100000").replace("every: 5", "every: 100000"))
    content = yaml.safe_load(suite.read_text())
    for run in content["runs"].values():
        run["overrides"].append(f"federation.seed_model={seed}")
        run["overrides"].append("data.people_seed=1")
    suite.write_text(yaml.safe_dump(content))
    out = tmp_path / "both"
    running = start(suite, short_stores, out)
    wait_for_checkpoints(running, out, "seeds/*", 1)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert "stopped after 0 of 2 runs: the same command goes on" in err
    assert not (out / "report.html").exists()


def test_no_process_outlives_the_first_one(suite: Path, short_stores: Path, tmp_path: Path) -> None:
    out = tmp_path / "both"
    running = start(suite, short_stores, out)
    wait_for_checkpoints(running, out, "*", len(LABELS))
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 2
    running.kill()
    running.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
