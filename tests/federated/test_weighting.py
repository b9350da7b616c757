"""Clients' weights: the formulas of McMahan et al. and Gao et al., whatever the order in which clients come."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.small import CPU, Small, as_model, furthest, loaded_client, small, update_of

from sottovoce.base.errors import InputError
from sottovoce.config import FederationSettings
from sottovoce.evaluation.error_rates import compute_wer
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.federated.client import train_locally
from sottovoce.federated.engines import Engine, StackedEngine, Trained
from sottovoce.federated.feature_cache import FeatureCache
from sottovoce.federated.weighting import ClientFigures, WeightedSum
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import Recogniser
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings, Weighting

LAYOUT = Layout.of({"w": torch.zeros(3)})
SHARED = [weighting for weighting in Weighting if weighting is not Weighting.UNIFORM]
LEAKING = [Weighting.LOSS, Weighting.WER, Weighting.LOSS_RELEASED, Weighting.WER_RELEASED]
# What each is measured by, but for the amounts: clients' own held-out speech, everybody's, passes over their speech.
MEASURED: dict[str, Any] = {
    "people": {"holdout": 0.25},
    "local": {"local_epochs": 2, "batch_seconds": 1.3},
    "shared_dev": "dev",
}

figures = st.builds(
    ClientFigures,
    utterances=st.integers(1, 10_000),
    seconds=st.floats(0.01, 1e5),
    loss=st.floats(0, 500),
    wer=st.floats(0, 3),
)


def plan_for(weighting: Weighting, **changes: object) -> Plan:
    chosen = {"population_size": 100, "privacy_unit": "speaker", "cohort_size": 10, "clip_bound": math.inf}
    chosen |= {"noise_multiplier": 0.0, "delta": 1e-5, "root_seed": 1, "weighting": weighting}
    return Plan(PrivacySettings(**chosen | changes), LAYOUT)  # type: ignore[arg-type]


def direct(weighting: Weighting, clients: list[ClientFigures]) -> np.ndarray:
    """The shares as the papers write them, in float64."""
    match weighting:
        case Weighting.UTTERANCES:
            amounts = np.array([client.utterances for client in clients], dtype=np.float64)
        case Weighting.SECONDS:
            amounts = np.array([client.seconds for client in clients])
        case Weighting.LOSS | Weighting.LOSS_RELEASED:  # softmax(−loss); shifting all losses changes no share
            losses = np.array([client.loss for client in clients], dtype=np.float64)
            amounts = np.exp(-(losses - losses.min()))
        case Weighting.WER_RELEASED:  # exp(100 − WER in per cent, at most 100); shifting changes no share
            points = 100 * np.minimum([client.wer for client in clients], 1.0)
            amounts = np.exp(points.min() - points)
        case _:  # softmax(1 − WER)
            amounts = np.exp(1 - np.array([client.wer for client in clients], dtype=np.float64))
    return amounts / amounts.sum()


def weighed(weighting: Weighting, clients: list[ClientFigures], updates: np.ndarray) -> np.ndarray:
    """Σ ω·update as a round sums it: one client at a time."""
    total = torch.zeros(LAYOUT.flat_size, dtype=torch.float64)
    weighted = WeightedSum(plan_for(weighting), total)
    for client, update in zip(clients, updates, strict=True):
        (weight,) = weighted.weigh([client])
        assert 0 <= weight <= 1
        total[:3] += weight * torch.from_numpy(update)
    return (total[:3] / weighted.denominator).numpy()


@pytest.mark.parametrize("weighting", SHARED)
@given(clients=st.lists(figures, min_size=1, max_size=8), order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_running_sum_has_the_shares_of_the_papers_in_any_order(
    weighting: Weighting, clients: list[ClientFigures], order: object
) -> None:
    updates = np.random.default_rng(1).normal(size=(len(clients), 3))
    expected = direct(weighting, clients) @ updates
    np.testing.assert_allclose(weighed(weighting, clients, updates), expected, atol=1e-9)
    shuffled = list(range(len(clients)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = weighed(weighting, [clients[i] for i in shuffled], updates[shuffled])
    np.testing.assert_allclose(again, expected, atol=1e-9)


@pytest.mark.parametrize("weighting", SHARED)
@given(clients=st.lists(figures, min_size=2, max_size=8), cut=st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_stacked_clients_weigh_what_they_weigh_one_by_one(
    weighting: Weighting, clients: list[ClientFigures], cut: int
) -> None:
    updates = np.random.default_rng(2).normal(size=(len(clients), 3))
    total = torch.zeros(LAYOUT.flat_size, dtype=torch.float64)
    weighted = WeightedSum(plan_for(weighting), total)
    for part in (slice(None, cut), slice(cut, None)):
        weights = torch.tensor(weighted.weigh(clients[part]), dtype=torch.float64)
        total[:3] += weights @ torch.from_numpy(updates[part])
    np.testing.assert_allclose(
        (total[:3] / weighted.denominator).numpy(), weighed(weighting, clients, updates), atol=1e-9
    )


def test_a_diverged_client_weighs_nothing_by_loss() -> None:
    clients = [ClientFigures(1, 1.0, loss=2.0), ClientFigures(1, 1.0, loss=math.nan), ClientFigures(1, 1.0, loss=3.0)]
    finite = [clients[0], clients[2]]
    updates = np.eye(3)
    found = weighed(Weighting.LOSS, clients, updates)
    np.testing.assert_allclose(found, [*direct(Weighting.LOSS, finite)[:1], 0.0, *direct(Weighting.LOSS, finite)[1:]])


def test_with_a_cap_a_weight_is_the_clients_own_and_the_denominator_public() -> None:
    plan = plan_for(Weighting.SECONDS, weight_cap=20.0, noise_multiplier=1.0, clip_bound=1.0, denominator=7.5)
    alone, together = (WeightedSum(plan, plan.new_total()) for _ in range(2))
    amounts = [ClientFigures(3, 5.0), ClientFigures(9, 20.0), ClientFigures(1, 400.0)]
    assert together.weigh(amounts) == [alone.weigh([client])[0] for client in amounts] == [0.25, 1.0, 1.0]
    assert together.denominator == 7.5


@pytest.mark.parametrize("weighting", LEAKING)
def test_weights_that_leak_are_refused_under_privacy(weighting: Weighting) -> None:
    with pytest.raises(InputError, match=f"weighting={weighting} with noise_multiplier=1.0: such weights leak"):
        plan_for(weighting, noise_multiplier=1.0, clip_bound=1.0)


@pytest.mark.parametrize("weighting", ["seconds", "loss", "wer", "loss_released", "wer_released"])
def test_a_round_uses_them(weighting: str, tones: Path, tmp_path: Path) -> None:
    """One SGD step of the server against Σ ω·Δ, with ω from what the clients measured themselves."""
    privacy = {"clip_bound": math.inf, "weighting": weighting}
    ours = small(tones, tmp_path / "l.jsonl", privacy=privacy, cohort_size=9, dtype=torch.float64, **MEASURED)
    start = ours.model()
    found: list[ClientFigures] = []
    for trained in ours.engine.train(ours.server.parameters_P, range(9), step=0):
        found += trained.figures  # type: ignore[union-attr]
    shares = direct(Weighting(weighting), found)
    expected = dict(start)
    for index, share in enumerate(shares):
        update = update_of(ours, index)
        expected = {name: expected[name] - share * update[name] for name in expected}
    ours.round(0)
    assert furthest(ours.model(), expected, start) < 1
    assert len({round(share, 9) for share in shares}) > 1 or weighting.startswith("wer")
    assert as_model(ours.layout, ours.server.result_P).keys() == start.keys()


@pytest.mark.parametrize("weighting", LEAKING)
def test_stacks_measure_what_clients_measure_one_by_one(weighting: Weighting, tones: Path, tmp_path: Path) -> None:
    """In float64: losses but for the order of sums, and the same words."""
    privacy = {"weighting": weighting}
    ours = small(tones, tmp_path / "l.jsonl", privacy=privacy, cohort_size=9, dtype=torch.float64, **MEASURED)
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float64}
    alone, stacked = (
        measured_by(engine, ours)
        for engine in (ours.engine, StackedEngine(ours.context, ours.layout, size=4, **options))
    )
    assert alone.keys() == stacked.keys() == set(range(9))
    for client, own in alone.items():
        assert own.wer == stacked[client].wer
        assert (own.wer is None) == (own.loss is not None) == weighting.startswith("loss")
        # Stacks add losses up in float32.
        assert (own.loss or 0.0) == pytest.approx(stacked[client].loss or 0.0, rel=1e-6)


def measured_by(engine: Engine, ours: Small) -> dict[int, ClientFigures]:
    found: dict[int, ClientFigures] = {}
    for trained in engine.train(ours.server.parameters_P, range(9), step=0):
        assert isinstance(trained, Trained), trained
        found |= dict(zip(trained.clients, trained.figures, strict=True))
    return found


def test_the_loss_as_released_is_that_of_the_last_local_epoch(tones: Path, tmp_path: Path) -> None:
    """A client's steps one by one: half of them are its second epoch."""
    ours = small(tones, tmp_path / "l.jsonl", privacy={"weighting": "loss_released"}, cohort_size=9, **MEASURED)
    loaded = loaded_client(ours.context, 3, step=0)
    heard = loaded.extract_features(FeatureCache(0), ours.context, dtype=torch.float32)
    weights = Weights(ours.layout, ours.context.local.built_optimiser(), device=CPU, dtype=torch.float32)
    losses_L, _ = train_locally(weights, loaded, heard, ours.context, server_P=ours.server.parameters_P)
    assert len(losses_L) >= 4
    last = losses_L[len(losses_L) // 2 :]
    assert measured_by(ours.engine, ours)[3].loss == float(last.mean()) != float(losses_L.mean())
    assert sorted(torch.cat(loaded.lines[len(last) :]).tolist()) == list(range(len(loaded.speech.rows)))


def test_the_wer_as_released_is_that_of_the_same_speech_for_all(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "l.jsonl", privacy={"weighting": "wer_released"}, cohort_size=9, **MEASURED)
    shared = ours.context.shared_dev
    assert shared is not None
    assert not set(shared.rows.tolist()) & set(ours.context.population.utterance_rows().tolist())
    (trained,) = ours.engine.train(ours.server.parameters_P, [3], step=0)
    assert isinstance(trained, Trained)
    context = ours.context
    local = ours.layout.views(ours.server.parameters_P - trained.update)
    model = Recogniser(context.family, context.model, context.tokens, dict(local), shared.store.language)
    assert trained.figures[0].wer == compute_wer(shared.texts, recognise_utterances(model, shared.store, shared.rows))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"privacy": {"weighting": "wer"}},
            "weighting=wer is measured on clients' held-out speech, .* expected clients.holdout or shared_dev",
        ),
        ({"privacy": {"weighting": "loss_released"}}, "expected local.local_epochs"),
        (
            {"shared_dev": {"utterances": 4}},
            "shared_dev with privacy.weighting=uniform: only wer and wer_released read it",
        ),
    ],
)
def test_recipes_without_what_weights_are_measured_by_are_refused(changes: dict[str, Any], words: str) -> None:
    federation = {
        "steps": 1,
        "cohort_size": 1,
        "local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 1},
        "server": {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1}},
    }
    with pytest.raises(ValueError, match=words):
        FederationSettings(**federation | changes)
