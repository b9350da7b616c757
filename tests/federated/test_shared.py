"""One local step: a round is one central step on the weighted mean gradient, and a cohort can be one large batch.

Everything is compared in float64, over all registered families; `small` has the tolerances.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.federated.small import CPU, EXACT, MADE_FROM_NOTHING, UNIT, Small, as_model, furthest, rounding, small
from tests.federated.test_stacked import relative, updates_of
from tests.ranks import in_processes
from tests.reference_round import Model, plus, times

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.base.processes import process_group
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.augment import NarrowBandSettings, SpecAugmentSettings
from sottovoce.data.audio.time_domain import DroppedChunks, DroppedFrequencies
from sottovoce.federated.client import Proximal
from sottovoce.federated.client_stream import StreamPositions, StreamSettings
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import JointlyTrained, SequentialEngine, SharedEngine
from sottovoce.federated.engines.shared import NOT_FINITE
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.flat.layout import Layout
from sottovoce.models.family import find_family
from sottovoce.models.trainable import parse_part, split_parameters
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Weighting

EVERYBODY = np.arange(9)
FREE: dict[str, Any] = {"weighting": "utterances", "clip_bound": math.inf, "noise_multiplier": 0.0}
# FedSGD as Ramesh et al. have it, with everything on that chance decides, and people with unequal amounts.
FEDSGD: dict[str, Any] = {
    "local": {
        "lr": 1.0,
        "local_steps": 1,
        "batch_utterances": 3,
        "batch_seconds": 3.4,
        "clip_gradients": math.inf,
        "spec_augment": SpecAugmentSettings(),
        "narrow_band": NarrowBandSettings(),
        "speeds": (0.95, 1.05),
        "dropped_frequencies": DroppedFrequencies(),
        "dropped_chunks": DroppedChunks(shortest_seconds=0.005, longest_seconds=0.01),
        "time_line": StreamSettings(),
    },
    "privacy": FREE,
    "cohort_size": 9,
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    return None


@pytest.fixture(params=MADE_FROM_NOTHING)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def shared_engine(ours: Small, *, dtype: torch.dtype = torch.float64, size: int | None = 4) -> SharedEngine:
    summed = not ours.plan.bounds_updates and math.isinf(ours.context.local.clip_gradients)
    return SharedEngine(
        ours.context,
        ours.layout,
        device=CPU,
        dtype=dtype,
        summed=summed,
        size=size,
    )


# A round is an Adam step.


class Interval:
    """Adam's step in float64 on a gradient that is known up to `off`: where each parameter may come to lie."""

    def __init__(self, *, lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> None:
        self.lr, self.b1, self.b2, self.eps, self.count = lr, b1, b2, eps, 0
        self.m: Model = {}
        self.v: Model = {}
        self.m_off: Model = {}
        self.v_off: Model = {}

    def step(self, theta: Model, gradient: Model, off: Model) -> tuple[Model, Model]:
        self.count += 1
        low, high = {}, {}
        for name, g in gradient.items():
            zero = np.zeros_like(g)
            b1, b2, d = self.b1, self.b2, off[name]
            # Each moment is rounded three times as it moves.
            m = self.m[name] = b1 * self.m.get(name, zero) + (1 - b1) * g
            v = self.v[name] = b2 * self.v.get(name, zero) + (1 - b2) * g**2
            unit = 4 * UNIT[torch.float32]
            dm = self.m_off[name] = b1 * self.m_off.get(name, zero) + (1 - b1) * d + unit * np.abs(m)
            dv = self.v_off[name] = b2 * self.v_off.get(name, zero) + (1 - b2) * (2 * np.abs(g) * d + d**2) + unit * v
            bias1, bias2 = 1 - b1**self.count, 1 - b2**self.count
            ends = [
                (m + a * dm) / bias1 / (np.sqrt(np.maximum(v + b * dv, 0) / bias2) + self.eps)
                for a in (-1, 1)
                for b in (-1, 1)
            ]
            # Root, sum, quotient and product are rounded, and θ before and after the step.
            slack = self.lr * 8 * UNIT[torch.float32] * np.maximum(np.abs(ends[0]), np.abs(ends[-1]))
            slack += 2 * UNIT[torch.float32] * np.abs(theta[name])
            low[name] = theta[name] - self.lr * np.max(ends, axis=0) - slack
            high[name] = theta[name] - self.lr * np.min(ends, axis=0) + slack
        return low, high


def mean_gradient(ours: Small, *, step: int) -> tuple[Model, Model]:
    """Σ (n_k/n)·g_k at the server's model, and how far float32 sums of it may be off."""
    theta, utterances, gradients = ours.model(), [], []
    for index in range(9):
        speech = ours.context.speech(ours.context.population.client(index))
        positions = ours.context.stream_parts(speech)
        if step < len(positions):
            utterances.append(len(positions[step][0].rows))
            (gradient,) = ours.gradients(index, step=step, position=step)
            gradients.append(gradient(theta))
    assert len(set(utterances)) > 1, "all clients have equal weights"
    mean = times(theta, 0.0)
    size = times(theta, 0.0)
    for count, gradient in zip(utterances, gradients, strict=True):
        weighted = times(gradient, count / sum(utterances))
        mean, size = plus(mean, weighted), plus(size, {name: np.abs(g) for name, g in weighted.items()})
    # Nine sums, a weight, a rescaling and a quotient each in float32. In float64 θ − (θ − g), and gradients that are
    # computed in another order: those of a tensor are sums of about as large numbers, whatever comes of them.
    wide = {
        name: 2 * UNIT[torch.float64] * np.abs(theta[name]) + rounding(torch.float64) * size[name].max()
        for name in size
    }
    return mean, {name: 16 * UNIT[torch.float32] * size[name] + wide[name] for name in size}


@pytest.mark.parametrize("engine", ["sequential", "shared"])
def test_a_round_equals_one_central_adam_step(engine: str, family: str, tones: Path, tmp_path: Path) -> None:
    """FedAvg of single steps with lr 1 and weights n_k/n: the server's Adam cannot tell it from central training."""
    server = {"optimiser": {"name": "adam"}, "schedule": {"name": "constant", "lr": 1e-5}}
    ours = small(tones, tmp_path / "ledger.jsonl", family=family, dtype=torch.float64, server=server, **FEDSGD)
    if engine == "shared":
        ours.engine = shared_engine(ours)
    central, positions = Interval(lr=1e-5), StreamPositions(9)
    for step in range(2):
        low, high = central.step(ours.model(), *mean_gradient(ours, step=step))
        before = ours.model()
        ours.round(step, positions=positions)
        after = ours.model()
        assert max(np.abs(after[name] - before[name]).max() for name in after) > 0.5e-5, "it has hardly moved"
        for name in after:
            assert (low[name] <= after[name]).all(), (step, name)
            assert (after[name] <= high[name]).all(), (step, name)
            # The interval is far narrower than the step, for the ordinary parameter.
            assert np.median(high[name] - low[name]) < 0.1e-5 + 4 * UNIT[torch.float32] * np.abs(before[name]).max()


# The same as one client after another.


@pytest.mark.parametrize("clip_gradients", [math.inf, 0.5])
def test_each_update_is_that_of_a_client_trained_alone(
    clip_gradients: float, family: str, tones: Path, tmp_path: Path
) -> None:
    case = FEDSGD | {"local": FEDSGD["local"] | {"lr": 0.3, "clip_gradients": clip_gradients, "proximal": None}}
    privacy = {"noise_multiplier": 0.7, "clip_bound": 0.2}
    ours = small(tones, tmp_path / "ledger.jsonl", family=family, dtype=torch.float64, **case | {"privacy": privacy})
    found = updates_of(shared_engine(ours), ours)
    assert max(relative(found, updates_of(ours.engine, ours)).values()) < EXACT


@pytest.mark.parametrize("weighting", ["uniform", "utterances", "seconds"])
def test_one_batch_sums_to_what_single_updates_do(weighting: str, family: str, tones: Path, tmp_path: Path) -> None:
    privacy = FREE | {"weighting": weighting}
    known = {own.name for own in fields(find_family(family).Options)}
    case = FEDSGD | {"privacy": privacy, "model": {"dropout": 0.2} if "dropout" in known else {}}
    ours = small(tones, tmp_path / "ledger.jsonl", family=family, dtype=torch.float64, **case)
    engine = shared_engine(ours)
    assert all(isinstance(part, JointlyTrained) for part in engine.train(ours.server.parameters_P, [0, 1], step=0))
    server_P, start = ours.server.parameters_P, ours.model()
    ends = []
    for clients in (LocalClients(engine), LocalClients(ours.engine)):
        summed = clients.sum(server_P, EVERYBODY, plan=ours.plan, step=1)
        ends.append(as_model(ours.layout, server_P - summed.total / summed.denominator))
        assert summed.diagnostics is not None
        assert not summed.diagnostics.dropped
        summed.diagnostics.settle()
        assert summed.diagnostics.loss is not None
        assert summed.diagnostics.loss[2] == 9
    assert furthest(ends[0], ends[1], start) < 1


def sum_over_ranks(store: Path, folder: Path) -> NDArray[Any] | None:
    torch.set_num_threads(1)
    with process_group(CPU) as processes:
        ours = small(store, folder / f"{processes.rank}.jsonl", dtype=torch.float64, **FEDSGD)
        clients = ClientsOverRanks(shared_engine(ours), processes, seconds=ours.context.population.seconds)
        if processes.is_first:
            summed = clients.sum(ours.server.parameters_P, EVERYBODY, plan=ours.plan, step=1)
            return (summed.total / summed.denominator).numpy()
        order = processes.broadcast_object(None)
        assert isinstance(order, RoundOrder)
        clients.take_part(order, ours.server.parameters_P, plan=ours.plan)
        return None


def test_ranks_add_up_their_batches(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "here.jsonl", dtype=torch.float64, **FEDSGD)
    server_P = ours.server.parameters_P
    here = LocalClients(ours.engine).sum(server_P, EVERYBODY, plan=ours.plan, step=1)
    found = torch.from_numpy(in_processes(2, sum_over_ranks, tones, tmp_path)[0])
    models = [as_model(ours.layout, server_P - mean_P) for mean_P in (here.total / here.denominator, found)]
    assert furthest(models[1], models[0], ours.model()) < 1


@pytest.mark.parametrize("summed", [True, False], ids=["one batch", "each"])
def test_a_part_is_trained_as_alone(summed: bool, tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, **FEDSGD)
    parameters = dict(ours.layout.views(ours.server.parameters_P))
    options: dict[str, Any] = {
        "is_lora_target": ours.context.family.transfer.is_lora_target,
        "generator": torch_stream(3, "low rank"),
    }
    part = split_parameters(parse_part("lora(r=2), blocks.00.mlp.*"), parameters, **options)
    layout, context = Layout.of(part.initial), replace(ours.context, frozen=part.frozen)
    plan, server_P = Plan(ours.plan.settings, layout), layout.flatten(part.initial)
    common: dict[str, Any] = {"device": CPU, "dtype": torch.float64}
    sums = []
    for engine in (
        SequentialEngine(context, layout, **common),
        SharedEngine(context, layout, summed=summed, size=4, **common),
    ):
        found = LocalClients(engine).sum(server_P, EVERYBODY, plan=plan, step=1)
        sums.append(as_model(layout, server_P - found.total / found.denominator))
    assert furthest(sums[1], sums[0], as_model(layout, server_P)) < 1


# What goes wrong.


@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_client_whose_numbers_are_not_finite_spoils_nobody_else(
    size: int, tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, **FEDSGD)
    engine = shared_engine(ours, size=size)
    server_P, others = ours.server.parameters_P, EVERYBODY[EVERYBODY != 5]
    expected = LocalClients(engine).sum(server_P, others, plan=ours.plan, step=1)
    losses = engine._losses

    def spoilt(members: Any, parameters: Any) -> torch.Tensor:
        mine = torch.tensor([math.nan if member.client.index == 5 else 1.0 for member in members])
        return losses(members, parameters) * mine

    monkeypatch.setattr(engine, "_losses", spoilt)
    found = LocalClients(engine).sum(server_P, EVERYBODY, plan=ours.plan, step=1)
    assert found.diagnostics is not None
    assert found.diagnostics.dropped == {NOT_FINITE: 1}
    # It weighs as it does where it is trained alone: its update counts as zero, its utterances as said.
    scale = found.denominator / expected.denominator
    assert scale > 1
    models = [as_model(ours.layout, server_P - one.total / expected.denominator) for one in (expected, found)]
    assert furthest(models[1], models[0], ours.model()) < 1


def test_who_cannot_be_read_is_dropped_and_the_others_go_on(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, **FEDSGD)
    engine = shared_engine(ours)
    positions = np.where(EVERYBODY == 3, 99, 0)
    found = LocalClients(engine).sum(ours.server.parameters_P, EVERYBODY, plan=ours.plan, step=1, positions=positions)
    assert found.diagnostics is not None
    assert found.diagnostics.dropped.total() == 1


def test_a_sum_that_nobody_clipped_is_no_private_plans(tones: Path, tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 0.7, "clip_bound": 0.2}
    ours = small(tones, tmp_path / "ledger.jsonl", **FEDSGD | {"privacy": privacy})
    engine = SharedEngine(ours.context, ours.layout, device=CPU, summed=True)
    with pytest.raises(InvariantError, match="a sum of updates that nobody has clipped"):
        LocalClients(engine).sum(ours.server.parameters_P, EVERYBODY, plan=ours.plan, step=0)


REFUSED: dict[str, tuple[dict[str, Any], Weighting, str]] = {
    "two steps": ({"local_steps": 2, "time_line": None}, Weighting.UNIFORM, "expected local_steps=1"),
    "an epoch": (
        {"local_epochs": 1, "local_steps": None, "time_line": None},
        Weighting.UNIFORM,
        "local_epochs=1: after one local step clients' weights differ",
    ),
    "momentum": ({"optimiser": {"name": "sgd", "momentum": 0.9}}, Weighting.UNIFORM, "expected sgd, whose step is"),
    "weights by loss": ({}, Weighting.LOSS, "no client has a model to be weighed by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_gradient_is_refused(name: str, tones: Path, tmp_path: Path) -> None:
    local, weighting, words = REFUSED[name]
    ours = small(tones, tmp_path / "ledger.jsonl", **FEDSGD | {"local": FEDSGD["local"] | local})
    with pytest.raises(InputError, match=words):
        SharedEngine(replace(ours.context, weighting=weighting), ours.layout, device=CPU, summed=True)


def test_statistics_are_no_gradients(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", family="crdnn", **FEDSGD | {"model": {"norm": "batch"}})
    with pytest.raises(InputError, match="family=crdnn keep statistics here"):
        SharedEngine(ours.context, ours.layout, device=CPU, summed=True)


def test_a_proximal_term_pulls_at_nothing_in_the_first_step(tones: Path, tmp_path: Path) -> None:
    local = FEDSGD["local"] | {"proximal": Proximal(mu=0.5)}
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, **FEDSGD | {"local": local})
    alone = SequentialEngine(ours.context, ours.layout, device=CPU, dtype=torch.float64)
    plain = small(tones, tmp_path / "plain.jsonl", dtype=torch.float64, **FEDSGD)
    assert max(relative(updates_of(alone, ours), updates_of(plain.engine, plain)).values()) < EXACT
