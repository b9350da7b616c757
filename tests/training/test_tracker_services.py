"""MLflow with a database in a file and Weights & Biases offline: what is in them after runs that were resumed."""

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tracked import begin_folder, numbers

from sottovoce.config import load_recipe
from sottovoce.training import following
from sottovoce.training.following import send_finished
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


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, services are waited for."""
    monkeypatch.setattr(following, "WAIT_SECONDS", None)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return begin_folder(tmp_path / "runs" / "mine")


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a database in a file."""
    package = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return package.MlflowClient()


def histories(client: Any, identity: str) -> dict[int, dict[str, float]]:
    """By step; fails where a value is there twice."""
    found: dict[int, dict[str, float]] = {}
    for name in client.get_run(identity).data.metrics:
        for one in client.get_metric_history(identity, name):
            assert name not in found.setdefault(one.step, {})
            found[one.step][name] = one.value
    return found


def test_mlflow_has_each_step_once_over_two_processes(mlflow: Any, folder: RunFolder) -> None:
    for after, steps in ((-1, (0, 1, 2)), (1, (2, 3))):
        with open_metrics_writer(folder, after_step=after, tracking=Tracking(("mlflow",))) as writer:
            for step in steps:
                writer.write({"step": step, "lr": 0.5, "norms": {"mlp (all)": [1.0, float(step)]}})
            writer.cover(1 if after < 0 else 3)
    (kept,) = mlflow.search_runs([mlflow.get_experiment_by_name("sottovoce").experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("mine", "KILLED")
    assert kept.data.params == {"about": "tones", "seed": "1"}
    expected = {s: {"step": s, "lr": 0.5, "norms/mlp _all_/00": 1.0, "norms/mlp _all_/01": s} for s in range(4)}
    assert histories(mlflow, kept.info.run_id) == expected


def test_mlflow_knows_what_it_has_where_the_note_was_lost(mlflow: Any, folder: RunFolder) -> None:
    tracking = Tracking(("mlflow",))
    with open_metrics_writer(folder, after_step=-1, tracking=tracking) as writer:
        for step in range(3):
            writer.write({"step": step, "lr": 0.5})
        writer.cover(2)
    note = folder.path / "trackers.json"
    (identity,) = (one["run"] for one in json.loads(note.read_text()).values())
    note.write_text(json.dumps({"mlflow": {"run": identity, "step": 0}}))
    (folder.path / "results.json").write_text("{}")
    said: list[str] = []
    send_finished(folder.path, tracking, is_release=False, say=said.append)
    assert said == []
    assert sorted(histories(mlflow, identity)) == [0, 1, 2]
    assert mlflow.get_run(identity).info.status == "FINISHED"


def test_mlflow_gets_of_a_release_what_metrics_have_and_one_time(
    mlflow: Any, federated_recipe: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "releases")
    around = RunContext(tmp_path, short_stores, torch.device("cpu"), tracking=Tracking(("mlflow",)))
    recipe = load_recipe(str(federated_recipe), RELEASE)
    outcome = run_recipe(recipe, out=tmp_path / "mine", resume=False, context=around)
    (kept,) = mlflow.search_runs([mlflow.get_experiment_by_name("releases").experiment_id])
    assert histories(mlflow, kept.info.run_id) == numbers(outcome.folder)
    assert kept.data.params == {}
    assert kept.data.tags == {"mlflow.runName": "mine"}
    times = {kept.info.start_time, kept.info.end_time}
    for name in kept.data.metrics:
        times |= {one.timestamp for one in mlflow.get_metric_history(kept.info.run_id, name)}
    assert times == {1000 * ONE_TIME}
    run_recipe(recipe, out=tmp_path / "mine", resume=True, context=around)
    assert len(mlflow.search_runs([kept.info.experiment_id])) == 1


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Weights & Biases writes its files, without a network."""
    package = pytest.importorskip("wandb", reason="needs the extra wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("PROJECT", "NAME", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    yield tmp_path / "wandb"
    package.teardown()  # its process, too


def read_wandb(path: Path) -> Iterator[Any]:
    """The records of one of its files: blocks of 32 KiB, whose pieces say how long they are and if they end one."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield messages.Record.FromString(whole)
            whole = b""


def test_weights_and_biases_has_each_step_once_over_two_processes(offline: Path, folder: RunFolder) -> None:
    said: list[str] = []
    for after, steps in ((-1, (0, 1, 2)), (1, (2, 3))):
        with open_metrics_writer(folder, after_step=after, tracking=Tracking(("wandb",)), say=said.append) as writer:
            for step in steps:
                writer.write({"step": step, "lr": 0.5 + step})
            writer.cover(1 if after < 0 else 3)
    assert said == []
    importlib.import_module("wandb").teardown()  # its process has written all then
    found = [record for path in sorted(offline.glob("offline-run-*/*.wandb")) for record in read_wandb(path)]
    begun = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in begun}) == 1
    assert {(one.project, one.display_name) for one in begun} == {("sottovoce", "mine")}
    rows = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    values = {row.step.num: {(one.key or one.nested_key[0]): one.value_json for one in row.item} for row in rows}
    assert [row.step.num for row in rows] == [0, 1, 2, 3]
    assert [float(values[step]["lr"]) for step in range(4)] == [0.5, 1.5, 2.5, 3.5]
    assert {name for row in values.values() for name in row} == {"lr", "_step", "_timestamp", "_runtime"}
