"""Clients in bfloat16 on a processor: as near to the slow twin as its eight bits allow, the same bits every time.

What is added up (weights, updates, losses, the cohort's sum) stays in float32.
"""

import itertools
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import CPU, Small, as_model, small, update_of
from tests.reference_round import minus, norm

from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Engine, SequentialEngine, StackedEngine, Trained
from sottovoce.federated.engines import engine as engine_module
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.models.transformer.family import BFLOAT16_WIDTH
from sottovoce.optimisers.weights import Weights

EVERYBODY = range(9)
WIDE: dict[str, Any] = {"width": BFLOAT16_WIDTH, "heads": 4, "positions": "sinusoidal"}

# A number in bfloat16 has 8 significant bits: rounding moves it by at most 2⁻⁹ of itself. On its way from the input to
# a gradient it is rounded behind each operation: four times in the front and the output, ten times in each of two
# blocks (two norms, q·k·v, weights, mixture, output, hidden, ReLU, two sums), and twice as often on the way back, where
# each product has two gradients. Roundings to the nearest have either sign, so that their squares add up: to so much
# for one standard deviation, at most. No client is allowed four of them.
UNIT = 2.0**-9
ROUNDINGS = 3 * (4 + 2 * 10)
ALLOWED = 4 * math.sqrt(ROUNDINGS) * UNIT  # 0.066


def wide(store: Path, ledger: Path, **local: Any) -> Small:
    return small(store, ledger, model=WIDE, local={"lr": 0.05} | local, cohort_size=9)


def updates_of(engine: Engine, ours: Small, *, step: int = 0) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for trained in engine.train(ours.server.parameters_P, EVERYBODY, step=step):
        assert isinstance(trained, Trained)
        found[trained.clients[0]] = trained.update.clone()
    return [found[index] for index in EVERYBODY]


def in_bfloat16(ours: Small) -> SequentialEngine:
    return SequentialEngine(ours.context, ours.layout, device=CPU, dtype=torch.bfloat16)


def distances(ours: Small) -> list[float]:
    """How far each client's update is from the twin's, of its length."""
    expected = [update_of(ours, index) for index in EVERYBODY]
    found = [as_model(ours.layout, update_P) for update_P in updates_of(in_bfloat16(ours), ours)]
    return [norm(minus(own, twin)) / norm(twin) for own, twin in zip(found, expected, strict=True)]


@pytest.mark.parametrize("local", [{"local_steps": 1}, {"local_steps": 2}, {"local_steps": None, "local_epochs": 1}])
def test_every_update_is_the_twins_up_to_eight_bits(local: dict[str, Any], tones: Path, tmp_path: Path) -> None:
    assert max(distances(wide(tones, tmp_path / "ledger.jsonl", **local))) < ALLOWED


def step_missing(patch: pytest.MonkeyPatch) -> None:
    whole = engine_module.load_client

    def one_less(*given: Any, **named: Any) -> Any:
        own = whole(*given, **named)
        return replace(own, lines=own.lines[:-1], draws=own.draws[:-1])

    patch.setattr(engine_module, "load_client", one_less)


def rate_off_by_a_tenth(patch: pytest.MonkeyPatch) -> None:
    whole = Weights.step
    patch.setattr(Weights, "step", lambda self, *, lr, max_norm: whole(self, lr=1.1 * lr, max_norm=max_norm))


@pytest.mark.parametrize("fault", [step_missing, rate_off_by_a_tenth])
def test_a_fault_is_no_rounding(
    fault: Callable[[pytest.MonkeyPatch], None], tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = wide(tones, tmp_path / "ledger.jsonl")
    fault(monkeypatch)
    assert min(distances(ours)) > ALLOWED


@pytest.mark.usefixtures("one_thread")  # as in a worker
def test_bits_are_the_same_every_time_and_in_worker_processes(tones: Path, tmp_path: Path) -> None:
    ours = wide(tones, tmp_path / "ledger.jsonl")
    first, again = (updates_of(in_bfloat16(ours), ours, step=1) for _ in range(2))
    with closing(WorkersEngine(ours.context, ours.layout, workers=2, dtype=torch.bfloat16)) as engine:
        elsewhere = updates_of(engine, ours, step=1)
    for one, *others in zip(first, again, elsewhere, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_stacked_clients_are_as_near_to_the_twin(tones: Path, tmp_path: Path) -> None:
    ours = wide(tones, tmp_path / "ledger.jsonl")
    stacked = ours.context.family.stacking.stacked
    engine = StackedEngine(ours.context, ours.layout, device=CPU, dtype=torch.bfloat16, stacked=stacked, size=3)
    for index, trained in itertools.chain.from_iterable(
        zip(found.clients, found.update, strict=True)
        for found in engine.train(ours.server.parameters_P, EVERYBODY, step=0)
        if isinstance(found, Trained)
    ):
        expected = update_of(ours, index)
        assert norm(minus(as_model(ours.layout, trained), expected)) / norm(expected) < ALLOWED


def test_weights_losses_and_sums_stay_in_float32(tones: Path, tmp_path: Path) -> None:
    ours = wide(tones, tmp_path / "ledger.jsonl")
    engine = in_bfloat16(ours)
    (trained,) = engine.train(ours.server.parameters_P, [0], step=0)
    assert isinstance(trained, Trained)
    assert {p.dtype for p in engine.weights.working.values()} == {torch.bfloat16}
    for kept in (engine.weights.master, trained.update, trained.losses, trained.gradient_norms):
        assert kept is not None
        assert kept.dtype == torch.float32
    summed = LocalClients(engine).sum(ours.server.parameters_P, np.arange(9), plan=ours.plan, step=0)
    assert summed.total.dtype == torch.float32
