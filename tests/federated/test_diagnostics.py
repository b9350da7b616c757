"""The diagnostics of a cohort are sums: as large for many clients as for few, and the same however it is divided."""

import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import Small, small
from torch import Tensor

from sottovoce.base.processes import ALONE, Processes
from sottovoce.base.seeds import torch_stream
from sottovoce.federated.diagnostics import RoundDiagnostics, merge_diagnostics
from sottovoce.federated.engines import Dropped, Engine, Trained
from sottovoce.federated.ranks import ClientsOverRanks
from sottovoce.federated.weighting import ClientFigures

FEW, MANY = 50, 600
SCALARS = 4 * 8  # bytes that a client may add to what is handed over


@pytest.fixture
def ours(tones: Path, tmp_path: Path) -> Small:
    return small(tones, tmp_path / "ledger.jsonl", privacy={"share": "dim"})


def trained_clients(ours: Small, clients: Sequence[int]) -> Iterator[Trained]:
    """Updates of `clients`, some one by one and some as a stack; every seventh is not finite, nor its loss."""
    for stack in (clients[:3], *([client] for client in clients[3:])):
        update_NP = ours.layout.zeros(len(stack))
        for row_P, client in zip(update_NP, stack, strict=True):
            row_P.normal_(std=0.05, generator=torch_stream(1, "client", client))
            row_P[0] = math.nan if client % 7 == 6 else row_P[0]
        ours.layout.clear_padding(update_NP)
        losses_N = torch.tensor([math.inf if client % 7 == 6 else 1.0 + client / 10 for client in stack])
        figures = [ClientFigures(1, 1.0, None, None, left_out={"too long": client % 2}) for client in stack]
        if len(stack) == 1:
            update_NP, losses_N = update_NP[0], losses_N[0]
        yield Trained(update_NP, tuple(stack), losses_N, tuple(figures), 0.5 * len(stack), gradient_norms=2 * losses_N)


class GivenUpdates(Engine):
    def __init__(self, ours: Small) -> None:
        self._ours = ours

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        return trained_clients(self._ours, cohort)


def test_what_a_process_hands_over_does_not_grow_with_its_clients(ours: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[int] = []

    def gather(self: Processes, value: Any) -> list[Any]:
        handed_over.append(len(pickle.dumps(value)))
        return [value]

    monkeypatch.setattr(Processes, "gather", gather)
    over_ranks = ClientsOverRanks(GivenUpdates(ours), ALONE, seconds=np.ones(MANY))
    for clients in (FEW, MANY):
        over_ranks.sum(ours.server.parameters_P, np.arange(clients), plan=ours.plan, step=0)
    assert handed_over[1] - handed_over[0] <= SCALARS * (MANY - FEW)


def figures_of(ours: Small, clients: Sequence[int]) -> RoundDiagnostics:
    private, total = RoundDiagnostics(cohort=len(clients)), ours.plan.new_total()
    for trained in trained_clients(ours, clients):
        private.add(ours.plan.accumulate(total, trained.update), trained)
    return private.on_host()


def test_figures_are_means_over_the_finite_clients_however_they_are_divided(ours: Small) -> None:
    parts = [figures_of(ours, range(rank, MANY, 3)) for rank in range(3)]
    finite = [client for client in range(MANY) if client % 7 != 6]
    updates = [ours.layout.views(one.update.double()) for c in finite for one in trained_clients(ours, [c])]
    names = ours.plan.clipper.layers.names
    norms_NH = np.array([[float(layer.norm()) for layer in update.values()] for update in updates])
    bounds_H = np.array(ours.plan.clipper.layer_bounds)
    norm_N = np.sqrt((norms_NH**2).sum(axis=1))
    for private in (figures_of(ours, range(MANY)), merge_diagnostics(parts)):
        private.signal_H = torch.zeros(len(names))
        found: Any = private.as_json(ours.plan)
        assert found["updates"] == found["cohort"] == MANY
        assert found["non_finite"] == private.diverged == MANY - len(finite)
        assert found["utterances_left_out"] == {"too long": MANY // 2}
        assert private.audio_seconds == 0.5 * MANY
        assert found["loss"] == pytest.approx(np.mean([1.0 + client / 10 for client in finite]), rel=1e-6)
        gradients = [2.0 + client / 5 for client in finite]
        assert found["gradient_norm"] == pytest.approx(np.mean(gradients), rel=1e-6)
        assert found["gradient_norm_std"] == pytest.approx(np.std(gradients), rel=1e-6)
        assert found["norm"] == pytest.approx(norm_N.mean(), rel=1e-9)
        assert found["norm_std"] == pytest.approx(norm_N.std(), rel=1e-6)
        after_N = np.sqrt((np.minimum(norms_NH, bounds_H) ** 2).sum(axis=1))
        assert found["norm_after"] == pytest.approx(after_N.mean(), rel=1e-6)
        assert found["norm_after_std"] == pytest.approx(after_N.std(), rel=1e-3)
        assert found["clip_fraction"] == (norms_NH > bounds_H).any(axis=1).sum() / MANY
        for name, before, after in zip(names, norms_NH.T, np.minimum(norms_NH, bounds_H).T, strict=True):
            assert found["layers"][name]["norm_before"] == pytest.approx(before.mean(), rel=1e-9)
            assert found["layers"][name]["norm_after"] == pytest.approx(after.mean(), rel=1e-6)
            assert found["layers"][name]["std_before"] == pytest.approx(before.std(), rel=1e-6)
            assert found["layers"][name]["std_after"] == pytest.approx(after.std(), rel=1e-3, abs=1e-9)
        assert private.clipping is not None
        torch.testing.assert_close(private.clipping.layer_norms[1].numpy(), (norms_NH**2).sum(0), rtol=1e-9, atol=0)
