"""Estimates of the convergence bound's constants: exact on quadratics where they must be, never above, and harmless."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.federated.small import CPU, loaded_client, small_context, start_stream
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.federated.bound_estimates import (
    BoundEstimation,
    BoundEstimator,
    SpokenProblem,
    _new_weights,
    estimate_bound,
    largest_change,
    multiplier_deviations,
)
from sottovoce.federated.client import ClientContext, train_locally
from sottovoce.federated.feature_cache import FeatureCache
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout, group_layers, tensor_layers
from sottovoce.flat.segments import layer_norms

LAYOUT = Layout.of({"a": torch.zeros(2), "b": torch.zeros(3)})
LAYERS = tensor_layers(LAYOUT)


def flat(five: Tensor) -> Tensor:
    """Two numbers of `a` and three of `b` as a flat vector, which has gaps between tensors."""
    flat_P = LAYOUT.zeros(dtype=torch.float64, device=CPU)
    views = LAYOUT.views(flat_P)
    views["a"].copy_(five[:2])
    views["b"].copy_(five[2:])
    return flat_P


CURVATURES = torch.tensor([0.5, 1.0, 2.0, 3.0, 7.0], dtype=torch.float64)  # L = 7
HERE = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.5], dtype=torch.float64)
HERE_P = flat(HERE)
NOTHING_B5 = torch.zeros(2, 5, dtype=torch.float64)


@dataclass(frozen=True)
class Quadratic:
    """ℓ(x, θ) = ½·θᵀAθ − x·θ with A diagonal: batch b has x_b; elements of an update are as large as `sizes` says."""

    x_B5: Tensor
    sizes: tuple[float, ...] = (1.0, 2.0)

    @property
    def batches(self) -> int:
        return len(self.x_B5)

    def gradient(self, parameters_P: Tensor, batch: int) -> tuple[float, Tensor]:
        at = torch.cat([*LAYOUT.views(parameters_P).values()])
        loss = 0.5 * float((CURVATURES * at**2).sum()) - float((self.x_B5[batch] * at).sum())
        return loss, flat(CURVATURES * at - self.x_B5[batch])

    def update(self, parameters_P: Tensor, repeat: int) -> Tensor:
        return flat(torch.full((5,), self.sizes[repeat], dtype=torch.float64))


def quadratics(*, clients: int, batches: int, within: float, between: float, seed: int = 1) -> list[Quadratic]:
    """Clients' mean gradients spread with variance `between` in each of five directions, batches with `within`."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(scale=math.sqrt(between), size=(clients, 1, 5))
    x = torch.from_numpy(centres + generator.normal(scale=math.sqrt(within), size=(clients, batches, 5)))
    return [Quadratic(x_B5) for x_B5 in x]


def test_a_quadratic_gives_back_its_constants() -> None:
    """Two clients with two batches each, by hand: x = ±e₁ around 0, and 4·e₂ ± e₁."""
    one, other = torch.eye(5, dtype=torch.float64)[:2]
    clients = [Quadratic(torch.stack([one, -one])), Quadratic(torch.stack([4 * other + one, 4 * other - one]))]
    found = estimate_bound(clients, HERE_P, layers=LAYERS, repeats=2)
    assert found is not None
    assert found.local_variance == pytest.approx(2.0)  # (1 + 1)/(2 − 1)
    # Means lie 4 apart: (2² + 2²)/(2 − 1) = 8, of which 2/2 is chance.
    assert found.global_variance == pytest.approx(8.0 - 1.0)
    mean = CURVATURES * HERE - 2 * other
    assert found.gradient_norm_squared == pytest.approx(float(mean.square().sum()) - 8 / 2)
    gradients = [CURVATURES * HERE - x for client in clients for x in client.x_B5]
    expected_H = torch.stack([layer_norms(flat(gradient), LAYERS) for gradient in gradients]).amax(dim=0)
    assert torch.allclose(found.gradient_bounds_H, expected_H)
    assert found.largest_gradient_norm == pytest.approx(max(float(g.norm()) for g in gradients))
    # Norms of a layer of d elements: √d and 2·√d for every client, whose variance is d/2.
    assert found.intra_variances_H.tolist() == pytest.approx([2 * 0.5, 3 * 0.5])
    assert found.inter_variances_H.tolist() == [0.0, 0.0]


def test_smoothness_is_found_from_below() -> None:
    """A step along the smallest curvature shows 0.5; from any other start the directions turn to the largest, 7."""
    problem = Quadratic(NOTHING_B5)

    def gradient(at_P: Tensor) -> Tensor:
        return problem.gradient(at_P, 0)[1]

    assert largest_change(gradient, HERE_P, away_P=flat(torch.eye(5, dtype=torch.float64)[0])) == pytest.approx(0.5)
    found = largest_change(gradient, HERE_P, away_P=flat(torch.ones(5, dtype=torch.float64)))
    # After three turns a direction has weights c³ where it had 1: ‖A·d‖/‖d‖ = √(Σc⁸/Σc⁶).
    assert found == pytest.approx(float((CURVATURES**8).sum() / (CURVATURES**6).sum()) ** 0.5)
    assert 6.9 < found <= 7.0
    assert largest_change(gradient, HERE_P, away_P=torch.zeros_like(HERE_P)) == 0.0


def test_variances_are_unbiased() -> None:
    """Means over 400 draws, each within five of its standard deviations of the truth."""
    local, between, square = [], [], []
    for seed in range(400):
        clients = quadratics(clients=4, batches=3, within=0.6, between=0.2, seed=seed)
        found = estimate_bound(clients, HERE_P * 3, layers=LAYERS, repeats=2)
        assert found is not None
        between.append(found.global_variance)
        square.append(found.gradient_norm_squared)
        local.append(found.local_variance)
    for values, truth in ((between, 5 * 0.2), (square, float((CURVATURES * HERE * 3).square().sum()))):
        deviation = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 5 * deviation
    assert np.mean(local) > 5 * 0.6, "the largest of four clients: σ_loc² holds for every client"


def test_differences_between_clients_updates_are_told_from_those_within() -> None:
    found = estimate_bound(
        [Quadratic(NOTHING_B5, (1.0, 1.0)), Quadratic(NOTHING_B5, (3.0, 3.0))], HERE_P, layers=LAYERS, repeats=2
    )
    assert found is not None
    assert found.intra_variances_H.tolist() == [0.0, 0.0]
    assert found.inter_variances_H.tolist() == pytest.approx([2 * 2.0, 3 * 2.0])  # Var(1, 3) = 2


def test_too_few_clients_say_nothing() -> None:
    assert estimate_bound([Quadratic(NOTHING_B5), Quadratic(NOTHING_B5[:1])], HERE_P, layers=LAYERS, repeats=2) is None


def test_deviations_of_multipliers_are_the_largest_of_a_layers_tensors() -> None:
    multipliers_2H = torch.tensor([[0.5, 0.9], [1.2, 4.0]])
    assert multiplier_deviations(multipliers_2H, LAYERS) == pytest.approx({"a": 0.5, "b": 3.0})
    assert multiplier_deviations(multipliers_2H, group_layers(LAYOUT, {"all": ["*"]})) == pytest.approx({"all": 3.0})


def test_multipliers_are_what_lamb_moves_elements_by() -> None:
    """θ_after = θ − lr·p ⊙ Δ (Eq. 14) with b1 = 0, after one step and after two."""
    settings = ServerSettings(
        optimiser={"name": "lamb", "b1": 0.0, "eps": 1e-3}, schedule={"name": "constant", "lr": 0.1}
    )
    server = Server(settings, LAYOUT, flat(HERE).float())
    for step, delta in enumerate(([0.5, -0.25, 0.125, 2.0, -1.0], [0.1, 0.3, -0.7, 0.2, 0.4])):
        before_P, delta_P = server.parameters_P.clone(), flat(torch.tensor(delta)).float()
        moved = server.step(delta_P.clone(), step=step)
        found = server.multipliers(moved)
        assert found is not None
        p_P = (before_P - server.parameters_P) / (0.1 * delta_P)
        for layer, view in enumerate(LAYOUT.views(p_P).values()):
            assert found[:, layer].tolist() == pytest.approx([float(view.min()), float(view.max())], rel=1e-4)
    sgd = replace(settings, optimiser={"name": "sgd"})
    without = Server(sgd, LAYOUT, flat(HERE).float())
    assert without.multipliers(without.step(flat(HERE).float(), step=0)) is None


@pytest.mark.parametrize("settings", [{"clients": 1}, {"every": 0}, {"repeats": 1}])
def test_settings_that_estimate_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected at least"):
        BoundEstimation(**settings)


# Of speech.


def start_model(context: ClientContext) -> tuple[Layout, Tensor]:
    parameters = context.family.init(context.model, generator=start_stream())
    layout = Layout.of(parameters)
    return layout, layout.flatten(parameters)


def test_a_clients_gradient_is_that_of_its_local_training(tones: Path) -> None:
    """One local step of SGD without clipping moves by lr times it; other repetitions train on other batches."""
    context = small_context(tones, local={"local_steps": 1, "lr": 0.25, "clip_gradients": math.inf})
    layout, start_P = start_model(context)
    weights = _new_weights(context, layout, CPU)
    problem = SpokenProblem(context, 0, weights=weights, step=0)
    loss, gradient_P = problem.gradient(start_P, 0)
    loaded = loaded_client(context, 0, step=0)
    features = loaded.extract_features(FeatureCache(0), context, dtype=torch.float32)
    losses, _ = train_locally(weights, loaded, features, context, server_P=start_P)
    assert float(losses[0]) == loss
    assert torch.equal(weights.master, start_P - 0.25 * gradient_P)
    updates = [problem.update(start_P, repeat) for repeat in (0, 1, 0)]
    assert torch.equal(updates[0], updates[2])
    assert not torch.equal(updates[0], updates[1])


def test_speech_gives_estimates_that_repeat_and_leave_the_model_alone(tones: Path) -> None:
    context = small_context(tones)
    layout, start_P = start_model(context)
    layers = tensor_layers(layout)
    estimator = BoundEstimator(BoundEstimation(clients=3, every=2), context, layers, device=CPU)
    before_P = start_P.clone()
    found = estimator.measure(start_P, step=0)
    assert found is not None
    assert torch.equal(start_P, before_P)
    assert found == estimator.measure(start_P, step=0)
    assert estimator.measure(start_P, step=1) is None
    assert found["clients"] == 3
    numbers = ("loss", "smoothness", "local_variance", "largest_gradient_norm")
    assert all(math.isfinite(found[name]) and found[name] > 0 for name in numbers)
    assert set(found["layers"]) == set(layout.names)
