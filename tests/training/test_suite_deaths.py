"""Deaths among the processes of a suite: nobody is left, and the same command goes on."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.points import SAVED, Gate
from tests.process_tree import ProcessTree, started

LABELS = ("one", "two")


@pytest.fixture
def suite(federated_recipe: Path, tmp_path: Path) -> Path:
    """Two runs that would go on for ever."""
    endless = ["federation.steps=100000", "federation.evaluate_every=100000"]
    runs = {
        label: {"recipe": str(federated_recipe), "overrides": [*endless, f"seed={number}"]}
        for number, label in enumerate(LABELS, start=1)
    }
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"about": "two endless runs", "runs": runs}))
    return path


@pytest.fixture
def family(suite: Path, short_stores: Path, tmp_path: Path) -> Iterator[ProcessTree]:
    """The suite, with both runs under way."""
    command = [sys.executable, "-m", "sottovoce", "run", suite, "--stores", short_stores, "--at-once", 2]
    command += ["--out", tmp_path / "out", "--runs", tmp_path / "runs", "--yes"]
    with Gate() as gate, started(command, said=tmp_path / "said", environment=gate.environment(SAVED)) as family:
        for held in [gate.reached(family) for _ in LABELS]:
            held.go()
        yield family


def run_processes(family: ProcessTree) -> list[int]:
    """Those that the runs are in; multiprocessing's own helper is left out."""
    children = map(int, Path(f"/proc/{family.pid}/task/{family.pid}/children").read_text().split())
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.long
def test_killing_the_first_process_ends_all(family: ProcessTree) -> None:
    assert len(run_processes(family)) == 2
    family.send(signal.SIGKILL)
    assert family.end() == -signal.SIGKILL


def test_a_hangup_saves_and_ends_all(family: ProcessTree) -> None:
    family.send(signal.SIGHUP)
    assert family.end() == 130
    assert "and saved: the same command goes on" in family.said.read_text()


@pytest.mark.long
def test_killing_one_runs_process_is_one_line_and_ends_all(family: ProcessTree) -> None:
    os.kill(run_processes(family)[0], signal.SIGKILL)
    assert family.end() == 2
    said = family.said.read_text()
    assert "error: a run's process was killed (out of memory?): the same command goes on" in said
    assert "Traceback" not in said
