"""Metrics and diagnostics of steps and rounds: collected, and written to `metrics.jsonl`, which trackers follow."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.federated.diagnostics import RoundDiagnostics
from sottovoce.federated.round import Round
from sottovoce.models.family import ParameterPlace
from sottovoce.privacy.plan import Plan
from sottovoce.training.following import Followers, follow_run
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.tracking import Tracking

StepRecord = dict[str, Any]

NO_EVENTS = "a release writes no TensorBoard events: their times would tell how many took part"


class StepLog:
    """Loss and gradient norm of every step since the last record; tensors stay on the device until they are asked for.

    `norm_names` are the names that the norms given to `add` go by, and `place` says where each belongs. Norms by tensor
    are summed over all steps until they are asked for. A tensor without a gradient, because layer-drop left its block
    out, counts for nothing in that step.
    """

    def __init__(self, norm_names: list[str], *, place: Callable[[str], ParameterPlace]) -> None:
        self._names, self._place = norm_names, place
        self._window = self._no_steps()
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._reset()

    def _reset(self) -> None:
        self._losses: list[float] = []
        self._gradients: list[float] = []
        self._audio_seconds = 0.0
        self._since = time.monotonic()

    def _no_steps(self) -> Tensor:
        """[3, H], on the host: Σ of norms, Σ of their squares, and in how many steps a tensor had a gradient."""
        return torch.zeros(3, len(self._names), dtype=torch.float64)

    def add(self, loss: Tensor, norm: Tensor, norms: Tensor, *, audio_seconds: float) -> None:
        self._pending.append((loss.detach(), norm, norms))
        self._audio_seconds += audio_seconds

    def check(self, *, step: int) -> None:
        """Stop a run that has diverged. Nothing is saved before this was asked."""
        if self._pending:
            losses, norms, by_tensor = zip(*self._pending, strict=True)
            # One transfer for all steps, and one for their tensors.
            values = torch.stack([*losses, *norms]).tolist()
            self._losses += values[: len(losses)]
            self._gradients += values[len(losses) :]
            for norms_H in torch.stack(by_tensor).double().cpu():  # step by step: the same bits, whenever it is asked
                self._window += torch.stack([norms_H, norms_H.square(), (norms_H > 0).double()])
            self._pending.clear()
        for loss, norm in zip(self._losses, self._gradients, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise InputError(
                    f"training diverged before step {step}: loss={loss}, gradient_norm={norm}; "
                    "the last checkpoint is untouched; try a lower learning rate"
                )

    def state(self) -> dict[str, list[Any]]:
        """What a checkpoint keeps after `check`, so that the next record after a resume covers the same steps."""
        assert not self._pending
        return {"losses": self._losses, "gradients": self._gradients, "window": self._window.tolist()}

    def restore(self, state: Mapping[str, list[Any]]) -> None:
        self._losses, self._gradients = [*state["losses"]], [*state["gradients"]]
        if "window" in state:  # older checkpoints knew of the last step alone
            self._window = torch.tensor(state["window"], dtype=torch.float64)

    def summary(self, *, lr: float, epoch: int) -> dict[str, Any]:
        """The means since the last summary; after `check`."""
        assert not self._pending
        record = {
            "loss": float(torch.tensor(self._losses).mean()),
            "gradient_norm": float(torch.tensor(self._gradients).mean()),
            "lr": lr,
            "epoch": epoch,
            "audio_seconds_per_second": self._audio_seconds / max(time.monotonic() - self._since, 1e-9),
        }
        self._reset()
        return record

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here (evaluating, saving) does not count as training."""
        begin = time.monotonic()
        yield
        self._since += time.monotonic() - begin

    def norms_by_layer(self) -> dict[str, dict[str, Any]]:
        """Mean gradient norms since they were last asked for, and standard deviations over steps; after `check`.

        Per kind of parameter, a list over the layers where it has one; 0 where it never had a gradient.
        """
        assert not self._pending
        (totals, squares, steps), self._window = self._window, self._no_steps()
        means = totals / steps.clamp(min=1)
        deviations = (squares / steps.clamp(min=1) - means.square()).clamp(min=0.0).sqrt()
        of_tensors = {"gradient_norms": means, "gradient_deviations": deviations}
        return {
            name: group_by_kind(self._names, values.tolist(), place=self._place, join=math.hypot)
            for name, values in of_tensors.items()
        }


def group_by_kind(
    names: Sequence[str],
    values: Sequence[float],
    *,
    place: Callable[[str], ParameterPlace],
    join: Callable[[float, float], float],
) -> dict[str, Any]:
    """Values of single tensors per kind of parameter: a list over the layers where it has one, else one number.

    A kind may have several tensors in a layer (a norm's weight and bias): `join` makes one number of theirs. A layer
    that is not trained has not moved: 0 keeps its place.

    >>> place = {"a": ParameterPlace("mlp", 2), "b": ParameterPlace("output")}.__getitem__
    >>> group_by_kind(["a", "b"], [3.0, 4.0], place=place, join=max)
    {'mlp': [0.0, 0.0, 3.0], 'output': 4.0}
    """
    grouped: dict[str, dict[int | None, float]] = {}
    for name, value in zip(names, values, strict=True):
        kind, layer = place(name)
        of_kind = grouped.setdefault(kind, {})
        of_kind[layer] = join(of_kind[layer], value) if layer in of_kind else value
    return {kind: _by_layer(found) or found[None] for kind, found in grouped.items()}


def _by_layer(found: Mapping[int | None, float]) -> list[float]:
    last = max((layer for layer in found if layer is not None), default=-1)
    return [found.get(layer, 0.0) for layer in range(last + 1)]


@contextmanager
def open_metrics_writer(
    run: RunFolder, *, after_step: int, tracking: Tracking | None = None, say: Callable[[str], None] = lambda _: None
) -> Iterator["MetricsWriter"]:
    """Writes on from `after_step`: what was measured later is forgotten, since those steps will be made again.

    Without `tracking` no tracker follows: they record times.
    """
    run.metrics.cut(after_step=after_step)
    run.diagnostics.cut(after_step=after_step)
    with follow_run(run.path, tracking, after_step=after_step, say=say) as followers:
        yield MetricsWriter(run, followers)


class MetricsWriter:
    """Where records go: `metrics.jsonl`, which trackers follow."""

    def __init__(self, run: RunFolder, followers: Followers) -> None:
        self._run, self._followers = run, followers

    def write(self, record: Mapping[str, Any]) -> None:
        """One record; it has a `step`."""
        self._run.metrics.add(record)
        self._followers.written(record["step"])

    def cover(self, step: int) -> None:
        """A checkpoint has it all, up to `step`."""
        self._followers.saved(step)

    def finish(self) -> None:
        """No process goes on with this run."""
        self._followers.is_finished = True


# What is written down of a round: metrics, which are public, and diagnostics, which are a simulation's only.


def build_round_metrics(done: Round, step: int, *, plan: Plan, place: Callable[[str], ParameterPlace]) -> StepRecord:
    """All of it came after the noise, or was known before the run. `plan` is the one that the round was made with."""
    names, server = plan.layout.names, done.server
    record: StepRecord = {
        "step": step + 1,
        "lr": server.lr,
        "epsilon": done.epsilon,
        "noise_std": done.noise_std,
        "clip_bound": None if math.isinf(plan.clip_bound) else plan.clip_bound,
        "server_norms": group_by_kind(names, server.norms_H.tolist(), place=place, join=math.hypot),
    }
    if server.trust_ratios_H is not None:
        ratios = server.trust_ratios_H.tolist()
        record["trust_ratios"] = group_by_kind(names, ratios, place=place, join=lambda a, b: (a + b) / 2)
    return {**record, **done.figures}


def build_round_diagnostics(done: Round, step: int, *, plan: Plan) -> StepRecord | None:
    """By-products of people's data, which no ε covers; None where nobody may see them."""
    if done.private is None:
        return None
    return {"step": step + 1, "accounted": False, **done.private.as_json(plan, step=step)}


class PendingRecords:
    """Records of rounds that no commit covers yet."""

    def __init__(self) -> None:
        self._metrics: list[StepRecord] = []
        self._diagnostics: list[StepRecord] = []

    def add(self, metrics: StepRecord, diagnostics: StepRecord | None) -> None:
        self._metrics.append(metrics)
        if diagnostics is not None:
            self._diagnostics.append(diagnostics)

    def add_to_last(self, found: StepRecord) -> None:
        """What else is known of the last round."""
        self._metrics[-1] |= found

    def add_to_diagnostics(self, found: StepRecord) -> None:
        """What else is known of the last round, and is a simulation's only."""
        self._diagnostics[-1] |= found

    def time(self, seconds: float, private: RoundDiagnostics | None) -> None:
        """How long the last round took. How long depends on who was in it: a simulation's only."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._metrics[-1]["seconds"] = round(seconds, 4)
        if private is not None:
            self._metrics[-1] |= {
                "audio_seconds_per_second": round(private.audio_seconds / max(seconds, 1e-9), 1),
                "waited_for_data_seconds": round(private.waited_seconds, 4),
            }
        self._metrics[-1]["memory_mib"] = round(memory, 1)
        if torch.cuda.is_available():
            self._metrics[-1]["device_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def take(self) -> tuple[list[StepRecord], list[StepRecord]]:
        taken = self._metrics, self._diagnostics
        self._metrics, self._diagnostics = [], []
        return taken
