"""MLflow over HTTP: what a server has after runs that were resumed, after it was away, and of a release."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.training.mlflow_server import MlflowServer, serve_mlflow
from tests.training.tracked import begin_folder, numbers

from sottovoce.config import load_recipe
from sottovoce.training import following
from sottovoce.training.records import open_metrics_writer
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_folder import ONE_TIME, RunFolder
from sottovoce.training.tracking import Tracking

RELEASE = [
    "federation.steps=2",
    "federation.evaluate_every=2",
    "federation.privacy.adaptive=null",
    "federation.privacy.mode=secure",
]
TRACKING = Tracking(("mlflow",))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    """It is asked once for each thing: how long a client tries again is its own."""
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    for name in ("EXPERIMENT_ID", "EXPERIMENT_NAME", "TRACKING_TOKEN", "SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(following, "WAIT_SECONDS", None)  # however slow the machine is
    with serve_mlflow() as found:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", found.address)
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return begin_folder(tmp_path / "runs" / "mine")


def test_each_step_is_sent_once_over_two_processes_and_nothing_is_printed(
    server: MlflowServer, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for after, steps in ((-1, (0, 1, 2)), (1, (2, 3))):
        with open_metrics_writer(folder, after_step=after, tracking=TRACKING) as writer:
            for step in steps:
                writer.write({"step": step, "lr": 0.5 + step})
            writer.cover(1 if after < 0 else 3)
    (kept,) = server.runs.values()
    assert (kept.info["run_name"], kept.info["status"]) == ("mine", "KILLED")
    assert {one["key"]: one["value"] for one in kept.params} == {"about": "tones", "seed": "1"}
    assert kept.by_step() == {step: {"step": step, "lr": 0.5 + step} for step in range(4)}
    assert capsys.readouterr().out == ""  # which --json has for itself


def test_what_a_server_missed_while_it_was_away_is_sent_when_it_is_back(
    server: MlflowServer, folder: RunFolder
) -> None:
    said: list[str] = []
    server.is_away = True
    with open_metrics_writer(folder, after_step=-1, tracking=TRACKING, say=said.append) as writer:
        for step in range(3):
            writer.write({"step": step, "lr": 0.5})
            writer.cover(step)
    assert server.runs == {}
    assert [line.partition(":")[0] for line in said] == ["mlflow", "mlflow"]  # one failure, and what is not sent
    assert "3 steps are not sent" in said[-1]
    server.is_away = False
    with open_metrics_writer(folder, after_step=2, tracking=TRACKING, say=said.append) as writer:
        writer.write({"step": 3, "lr": 0.5})
        writer.cover(3)
    (kept,) = server.runs.values()
    assert sorted(kept.by_step()) == [0, 1, 2, 3]
    assert len(said) == 2


def test_a_server_that_goes_and_comes_back_in_one_process_has_each_step_once(
    server: MlflowServer, folder: RunFolder
) -> None:
    said: list[str] = []
    with open_metrics_writer(folder, after_step=-1, tracking=TRACKING, say=said.append) as writer:
        writer.write({"step": 0, "lr": 0.5})
        writer.cover(0)
    with open_metrics_writer(folder, after_step=0, tracking=TRACKING, say=said.append) as writer:
        server.is_away = True
        writer.write({"step": 1, "lr": 0.5})
        writer.cover(1)
        server.missed.wait()
        server.is_away = False
        writer.write({"step": 2, "lr": 0.5})
        writer.cover(2)
    (kept,) = server.runs.values()
    assert sorted(kept.by_step()) == [0, 1, 2]
    (line,) = said
    assert "tries again at its next checkpoints" in line


def test_a_release_is_sent_once_with_one_time_also_after_a_server_was_away(
    server: MlflowServer, federated_recipe: Path, short_stores: Path, tmp_path: Path
) -> None:
    around = RunContext(tmp_path, short_stores, torch.device("cpu"), tracking=TRACKING)
    recipe = load_recipe(str(federated_recipe), RELEASE)
    server.is_away = True
    outcome = run_recipe(recipe, out=tmp_path / "mine", resume=False, context=around)
    assert server.runs == {}
    server.is_away = False
    for _ in range(2):
        run_recipe(recipe, out=tmp_path / "mine", resume=True, context=around)
    (kept,) = server.runs.values()
    assert kept.by_step() == numbers(outcome.folder)
    assert kept.params == []
    assert kept.tags == []
    assert kept.info["user_id"] == "unknown"
    times = {int(kept.info["start_time"]), int(kept.info["end_time"])}
    assert times | {int(one["timestamp"]) for one in kept.metrics} == {1000 * ONE_TIME}
    assert json.loads((outcome.folder / "trackers.json").read_text())["mlflow"]["step"] == 2
