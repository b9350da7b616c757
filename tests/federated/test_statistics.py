"""Running statistics as coordinates of the update: moved by what was seen, and clipped and noised like the rest."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.federated.small import CPU, small
from tests.federated.test_stacked import updates_of

from sottovoce.federated.engines import SequentialEngine
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.flat.layout import Layout
from sottovoce.optimisers import build_optimiser
from sottovoce.optimisers.weights import Weights

BATCH_NORM = {"norm": "batch", "dropout": 0.0}


@pytest.mark.parametrize("optimiser", [{"name": "sgd"}, {"name": "adam", "weight_decay": 0.5}])
def test_no_optimiser_no_rate_and_no_norm_touches_statistics(optimiser: dict[str, object]) -> None:
    tensors = {"w": torch.ones(2), "mean": torch.ones(3)}
    weights = Weights(
        Layout.of(tensors), build_optimiser(**optimiser), device=CPU, dtype=torch.float32, statistics={"mean", "frozen"}
    )
    weights.load(tensors)
    weights.set_gradients([torch.tensor([3.0, 4.0]), torch.tensor([0.25, 0.5, -1000.0])])
    norm, _ = weights.step(lr=0.125, max_norm=1.0)
    assert norm == 5.0
    assert weights.masters["mean"].tolist() == [0.75, 0.5, 1001.0]
    assert (weights.masters["w"] < 1).all()


def test_the_copy_to_compute_with_has_them_too() -> None:
    tensors = {"w": torch.ones(2), "mean": torch.ones(3)}
    weights = Weights(Layout.of(tensors), build_optimiser("sgd"), device=CPU, dtype=torch.bfloat16, statistics={"mean"})
    weights.load(tensors)
    weights.set_gradients([None, torch.full((3,), 0.5, dtype=torch.bfloat16)])
    weights.step(lr=1.0, max_norm=1.0)
    assert weights.working["mean"].tolist() == [0.5, 0.5, 0.5]


def test_an_update_holds_what_was_seen_whatever_the_learning_rate(tones: Path, tmp_path: Path) -> None:
    found = []
    for lr in (0.3, 0.003):
        local = {"local_steps": 1, "lr": lr}
        ours = small(tones, tmp_path / f"{lr}.jsonl", family="crdnn", model=BATCH_NORM, local=local)
        found.append(ours.layout.views(updates_of(ours.engine, ours, clients=[4])[4]))
    large, little = found
    for name in ("dnn.0.norm.mean", "dnn.0.norm.variance", "dnn.1.norm.mean"):
        assert torch.equal(large[name], little[name])
        assert large[name].any()
    torch.testing.assert_close(large["output.weight"], 100 * little["output.weight"], rtol=1e-2, atol=1e-6)


@pytest.mark.usefixtures("one_thread")  # as in a worker
def test_workers_move_statistics_as_the_sequential_engine_does(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", family="crdnn", model=BATCH_NORM)
    expected = updates_of(ours.engine, ours)
    with closing(WorkersEngine(ours.context, ours.layout, workers=2)) as engine:
        found = updates_of(engine, ours)
    assert all(torch.equal(found[client], expected[client]) for client in expected)
    assert isinstance(ours.engine, SequentialEngine)


def test_a_round_clips_and_steps_them_like_the_rest(tones: Path, tmp_path: Path) -> None:
    """No coordinate travels beside the update: a bound of nearly nothing leaves every tensor where it was."""
    ours = small(tones, tmp_path / "ledger.jsonl", family="crdnn", model=BATCH_NORM, privacy={"clip_bound": 1e-6})
    before = ours.server.parameters_P.clone()
    ours.round(0)
    away = ours.server.parameters_P - before
    assert 0 < float(away.norm()) <= 1e-6 * (1 + 2**-10)
