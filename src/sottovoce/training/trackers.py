"""TensorBoard, MLflow and Weights & Biases, each as a few functions. `following.py` calls them.

Where a service lies, who may write there and how it is called there is said as its users know it: by `MLFLOW_…` and
`WANDB_…` variables. Nothing of that is kept here.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.base.importing import import_extra
from sottovoce.training.run_folder import ONE_TIME

StepValues = tuple[int, Mapping[str, float]]

TENSORBOARD = "tensorboard"
PROJECT = "sottovoce"  # the experiment or project, where the user has named none
WAIT_SECONDS = 30.0  # at the end of a run, for what is still being sent


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run. `known` is what the tracker itself calls it, where it has it already.

    `after_step` is the checkpoint that this process goes on from. Of a release there are no `settings`.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    after_step: int
    is_release: bool
    known: str | None = None


@dataclass(frozen=True)
class Tracker:
    """An open tracker: `log` values by step, then `close` with whether the run is finished.

    `sent` is the last step that it has by its own account; None where it has none to give.
    """

    log: Callable[[Sequence[StepValues]], None]
    close: Callable[[bool], None]
    identity: str | None = None
    sent: int | None = None


@dataclass(frozen=True)
class TrackerKind:
    """How a tracker is opened, and the package that it needs.

    A service is sent what a checkpoint covers. A file that can take back what is not covered gets every record at once.
    `refused` is why no release is sent to it.
    """

    open: Callable[[TrackedRun], Tracker]
    package: str
    is_service: bool = True
    refused: str | None = None


def flatten_numbers(record: Mapping[str, Any], *, before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by name; those of a list by their places.

    >>> dict(flatten_numbers({"step": 3, "lr": 0.1, "norms": {"mlp": [1.0, 2.0], "out": 3.0}, "clip_bound": None}))
    {'step': 3, 'lr': 0.1, 'norms/mlp/00': 1.0, 'norms/mlp/01': 2.0, 'norms/out': 3.0}
    """
    for name, value in record.items():
        if isinstance(value, list):
            value = {f"{place:02d}": one for place, one in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flatten_numbers(value, before=f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield before + name, value


# TensorBoard: files beside the run's own.


def open_tensorboard(run: TrackedRun) -> Tracker:
    """Event files in the run's folder; what was written after the checkpoint is taken back."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / TENSORBOARD
    is_new = not any(folder.glob("events.*"))
    writer: Any = SummaryWriter(str(folder), purge_step=None if is_new else run.after_step + 1)

    def log(records: Sequence[StepValues]) -> None:
        for step, values in records:
            for name, value in values.items():
                if name != "step":
                    writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, lambda _: writer.close(), sent=None if is_new else run.after_step)


# MLflow.

_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE, _PARAMETER_LENGTH = 1000, 100, 6000  # the server's own limits
_OTHER_CHARACTERS = re.compile(r"[^\w./ -]")  # than names there may have


def open_mlflow(run: TrackedRun) -> Tracker:
    """A run of the server, database or folder that `MLFLOW_TRACKING_URI` names.

    By the client and not by `mlflow.start_run`, which adds who started what, where, from which commit. The times of a
    release's metrics are all the same.
    """
    mlflow = import_extra("mlflow", extra="mlflow", called="--track mlflow")
    entities = import_extra("mlflow.entities", extra="mlflow", called="--track mlflow")
    # Or else its client prints where a run can be seen, on the standard output that --json has for itself.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    client = mlflow.MlflowClient()

    def now() -> int:
        return 1000 * ONE_TIME if run.is_release else int(1000 * time.time())

    identity = _find_in_mlflow(client, run.known)
    sent = None
    if identity is None:
        experiment = _choose_experiment(client)
        identity = str(client.create_run(experiment, start_time=now(), run_name=run.name).info.run_id)
        settings = [(_allowed(name), str(value)[:_PARAMETER_LENGTH]) for name, value in _flatten(run.settings)]
        for part in _split(settings, _PARAMETERS_AT_ONCE):
            client.log_batch(identity, params=[entities.Param(*one) for one in part])
    else:
        sent = max((int(one.step) for one in client.get_metric_history(identity, "step")), default=-1)
        client.update_run(identity, status="RUNNING")

    def log(records: Sequence[StepValues]) -> None:
        for step, values in records:
            # The step itself comes last: a step is there where its number is.
            ordered = [(name, value) for name, value in values.items() if name != "step"] + [("step", float(step))]
            metrics = [entities.Metric(_allowed(name), float(value), now(), step) for name, value in ordered]
            for part in _split(metrics, _METRICS_AT_ONCE):
                client.log_batch(identity, metrics=part)

    def close(is_finished: bool) -> None:
        client.set_terminated(identity, "FINISHED" if is_finished else "KILLED", end_time=now())

    return Tracker(log, close, identity, sent)


def _find_in_mlflow(client: Any, known: str | None) -> str | None:
    """The run that is there already; None where this server knows of none."""
    if known is None:
        return None
    try:
        client.get_run(known)
    except Exception as error:
        if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return known


def _choose_experiment(client: Any) -> str:
    """By MLflow's own variables; `sottovoce` where they name none."""
    if (number := os.environ.get("MLFLOW_EXPERIMENT_ID")) is not None:
        return number
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


def _allowed(name: str) -> str:
    return _OTHER_CHARACTERS.sub("_", name)[:250]


def _flatten(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """A recipe's settings by their keys, as they are written on the command line."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{before}{name}.")
        else:
            yield before + str(name), value


def _split(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    yield from (items[start : start + most] for start in range(0, len(items), most))


# Weights & Biases.


def open_wandb(run: TrackedRun) -> Tracker:
    """A run of the project that `WANDB_PROJECT` names; offline where `WANDB_MODE` says so.

    What is printed is not captured, and nobody is asked for a key. The rest that it records by itself (host, command
    line, commit, load of the machine) is the user's to turn off, by its own variables.
    """
    wandb = import_extra("wandb", extra="wandb", called="--track wandb")
    wandb.setup(settings=wandb.Settings(show_info=False))  # or else it would ask for a key on the terminal
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", run.name),
        id=run.known,
        resume=None if run.known is None else "allow",
        config=dict(run.settings),
        # Without limits, a process would not end while a server is away.
        settings=wandb.Settings(
            console="off",
            init_timeout=WAIT_SECONDS,
            finish_timeout=WAIT_SECONDS,
            finish_timeout_raises=True,
        ),
    )

    def log(records: Sequence[StepValues]) -> None:
        for step, values in records:
            opened.log({name: value for name, value in values.items() if name != "step"}, step=step, commit=True)

    def close(is_finished: bool) -> None:
        opened.finish(exit_code=0 if is_finished else 1)

    return Tracker(log, close, str(opened.id), int(opened.step) - 1 if opened.resumed else None)


KINDS: Mapping[str, TrackerKind] = {
    TENSORBOARD: TrackerKind(
        open_tensorboard,
        "tensorboard",
        is_service=False,
        refused="its files carry the time of each round, which tells how many took part",
    ),
    "mlflow": TrackerKind(open_mlflow, "mlflow"),
    "wandb": TrackerKind(
        open_wandb,
        "wandb",
        refused="it records times, the host's name and the command line by itself",
    ),
}
