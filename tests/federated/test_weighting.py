"""Clients' weights: the formulas of McMahan et al. and Gao et al., whatever the order in which clients come."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.small import as_model, furthest, small, update_of

from sottovoce.errors import InputError
from sottovoce.federated.weighting import ClientFigures, WeightedSum
from sottovoce.flat.layout import Layout
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings, Weighting

LAYOUT = Layout.of({"w": torch.zeros(3)})
SHARED = [Weighting.UTTERANCES, Weighting.SECONDS, Weighting.LOSS, Weighting.WER]

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
        case Weighting.LOSS:  # softmax(−loss); shifting all losses changes no share
            losses = np.array([client.loss for client in clients], dtype=np.float64)
            amounts = np.exp(-(losses - losses.min()))
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


@pytest.mark.parametrize("weighting", [Weighting.LOSS, Weighting.WER])
def test_weights_that_leak_are_refused_under_privacy(weighting: Weighting) -> None:
    with pytest.raises(InputError, match=f"weighting={weighting} with noise_multiplier=1.0: such weights leak"):
        plan_for(weighting, noise_multiplier=1.0, clip_bound=1.0)


@pytest.mark.parametrize("weighting", ["seconds", "loss", "wer"])
def test_a_round_uses_them(weighting: str, tones: Path, tmp_path: Path) -> None:
    """One SGD step of the server against Σ ω·Δ, with ω from what the clients measured themselves."""
    privacy = {"clip_bound": math.inf, "weighting": weighting}
    ours = small(
        tones, tmp_path / "l.jsonl", privacy=privacy, people={"holdout": 0.25}, cohort_size=9, dtype=torch.float64
    )
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
    assert len({round(share, 9) for share in shares}) > 1 or weighting == "wer"
    assert as_model(ours.layout, ours.server.result_P).keys() == start.keys()
