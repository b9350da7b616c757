"""What a simulation writes down of norms: every engine's are the same, and the mean's is of what had no noise yet."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import CPU, Small, small

from sottovoce.federated.engines import Engine, SequentialEngine, SharedEngine, StackedEngine, Trained
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.privacy.settings import Mode

EVERYBODY = range(9)
ONE_STEP: dict[str, Any] = {"cohort_size": 9, "local": {"local_steps": 1, "clip_gradients": 0.1}}
# Unequal numbers of steps, so that some are done before others of their stack.
UNEQUAL: dict[str, Any] = {"cohort_size": 9, "local": {"local_epochs": 2, "batch_utterances": 2}}
SECURE = {"mode": Mode.SECURE, "root_seed": None, "noise_multiplier": 1.0}
CLOSE = 1e-4  # float32: gradients of a few hundred products, each off by 6e-8 of itself

pytestmark = pytest.mark.usefixtures("one_thread")


def engines(ours: Small, *, one_step: bool) -> Iterator[tuple[str, Engine]]:
    yield "sequential", SequentialEngine(ours.context, ours.layout, device=CPU)
    yield "stacked", StackedEngine(ours.context, ours.layout, device=CPU, size=4)
    yield "workers", WorkersEngine(ours.context, ours.layout, workers=2)
    if one_step:
        yield "shared", SharedEngine(ours.context, ours.layout, device=CPU, summed=False)
        yield "shared, several at once", SharedEngine(ours.context, ours.layout, device=CPU, summed=False, size=4)


def norms_of(engine: Engine, ours: Small) -> dict[int, float]:
    found: dict[int, float] = {}
    with closing(engine):
        for trained in engine.train(ours.server.parameters_P, EVERYBODY, step=0):
            assert isinstance(trained, Trained), trained
            assert trained.gradient_norms is not None
            found |= dict(zip(trained.clients, trained.gradient_norms.reshape(-1).tolist(), strict=True))
    return found


def test_the_norm_of_a_local_gradient_is_the_twins_before_local_clipping(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", **ONE_STEP)
    theta, expected = ours.model(), {}
    for client in EVERYBODY:
        (gradient,) = ours.gradients(client, step=0)
        expected[client] = math.sqrt(sum(float((layer**2).sum()) for layer in gradient(theta).values()))
    assert min(expected.values()) > 0.1, "local clipping has something to do"
    for name, engine in engines(ours, one_step=True):
        assert norms_of(engine, ours) == pytest.approx(expected, rel=CLOSE), name


def test_engines_agree_where_clients_have_unequal_numbers_of_steps(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", **UNEQUAL)
    (_, first), *others = engines(ours, one_step=False)
    expected = norms_of(first, ours)
    for name, engine in others:
        assert norms_of(engine, ours) == pytest.approx(expected, rel=CLOSE), name


def test_a_round_tells_mean_and_spread_of_its_clients_gradients(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9)
    norms = [*norms_of(SequentialEngine(ours.context, ours.layout, device=CPU), ours).values()]
    found = ours.figures(0).as_json(ours.plan)
    assert found["cohort"] == len(norms)
    assert found["gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-6)
    assert found["gradient_norm_std"] == pytest.approx(np.std(norms), rel=1e-4)


def test_clients_of_whom_only_a_sum_is_computed_have_no_gradient_to_tell_of(tones: Path, tmp_path: Path) -> None:
    local = {"local_steps": 1, "clip_gradients": math.inf}
    ours = small(tones, tmp_path / "ledger.jsonl", cohort_size=9, local=local, privacy={"clip_bound": math.inf})
    ours.engine = SharedEngine(ours.context, ours.layout, device=CPU, summed=True)
    found = ours.figures(0).as_json(ours.plan)
    assert "gradient_norm" not in found
    assert found["pseudo_gradient_norm"] > 0  # type: ignore[operator]


def test_the_mean_before_noise_is_that_of_the_same_round_without(tones: Path, tmp_path: Path) -> None:
    quiet = small(tones, tmp_path / "quiet.jsonl").round(0)
    ours = small(tones, tmp_path / "noisy.jsonl", privacy={"noise_multiplier": 3.0})
    noisy = ours.round(0)
    assert quiet.private is not None
    assert noisy.private is not None
    known = quiet.private.as_json(ours.plan)["pseudo_gradient_norm"]
    assert known == pytest.approx(float(torch.linalg.vector_norm(quiet.server.norms_H)), rel=1e-6)
    assert noisy.private.as_json(ours.plan)["pseudo_gradient_norm"] == known
    assert float(torch.linalg.vector_norm(noisy.server.norms_H)) > 2 * known  # type: ignore[operator]


def test_a_release_has_nothing_of_it(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", privacy=SECURE)
    assert ours.round(0).private is None
