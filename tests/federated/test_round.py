"""A round computes what Algorithm 1 says, whatever the settings; without privacy it is what it would be centrally."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import Small, as_model, furthest, small, start_stream
from tests.reference_round import LAMB, SGD, Model, reference_round, train_client

from sottovoce.audio.augment import SpecAugmentSettings
from sottovoce.federated.client import Proximal
from sottovoce.models.ctc_transformer import init
from sottovoce.models.recogniser import batch_loss, make_batch
from sottovoce.privacy.adaptive import AdaptiveClipping
from sottovoce.privacy.ledger import Charge

FLOAT32 = 20.0  # units of rounding (see `furthest`); the worst case here has 6, a wrong factor anywhere thousands
LAMB_EPS = 1e-3  # where gradients lie far below eps, LAMB's direction is as well conditioned as they are

CASES: dict[str, dict[str, Any]] = {
    "global": {},
    "global, rescaled": {"privacy": {"normalise": "always", "clip_bound": 2.0}},
    "uniform": {"privacy": {"share": "uniform"}},
    "uniform, rescaled above": {"privacy": {"share": "uniform", "normalise": "above", "clip_bound": 0.35}},
    "dim": {"privacy": {"share": "dim"}, "local": {"local_epochs": 1}},
    "dim, rescaled, LAMB": {"privacy": {"share": "dim", "normalise": "always"}, "optimiser": {"name": "lamb"}},
    "LAMB and noise": {"privacy": {"noise_multiplier": 0.7}, "optimiser": {"name": "lamb"}},
    "momentum and noise": {"privacy": {"noise_multiplier": 0.7}, "optimiser": {"name": "sgd", "momentum": 0.9}},
    "FedProx": {"local": {"local_steps": 3, "proximal": Proximal(name="fedprox", mu=0.5)}},
    "FedProx, not squared": {"local": {"local_steps": 3, "proximal": Proximal(name="distance", mu=0.3)}},
    "no bounds at all": {"privacy": {"clip_bound": math.inf}, "local": {"clip_gradients": math.inf, "lr": 0.02}},
    "layers dropped, masks from step 1 on": {
        "model": {"layer_drop": 0.5},
        "local": {
            "spec_augment": SpecAugmentSettings(frequency_masks=1, frequency_width=10),
            "spec_augment_from": 1,
            "layerdrop_group": 2,
        },
    },
    "two epochs, everybody": {"local": {"local_epochs": 2}, "cohort_size": 9},
}


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_are_those_of_the_twin(name: str, tones: Path, tmp_path: Path) -> None:
    case = dict(CASES[name])
    optimiser = {"name": "sgd"} | case.pop("optimiser", {})
    lamb = optimiser["name"] == "lamb"
    optimiser |= {"eps": LAMB_EPS} if lamb else {}
    opt, lr = (LAMB(eps=LAMB_EPS), 0.02) if lamb else (SGD(momentum=optimiser.get("momentum", 0.0)), 0.8)
    case["server"] = {"optimiser": optimiser, "schedule": {"name": "constant", "lr": lr}}
    ours = small(tones, tmp_path / "ledger.jsonl", **case)
    proximal = ours.room.local.proximal

    start = twin = ours.model()
    sampled = 0
    for step in range(3):
        cohort = ours.plan.sample(step).tolist()
        sampled += len(cohort)
        twin = reference_round(
            twin,
            [ours.gradients(index, step=step) for index in cohort],
            opt=opt,
            server_lr=lr,
            local_lr=ours.room.local.lr,
            local_bound=ours.room.local.clip_gradients,
            expected_cohort=ours.plan.cohort_size,
            bound=ours.plan.clip_bound,
            share=str(ours.plan.settings.share),
            normalise=str(ours.plan.settings.normalise),
            proximal=None if proximal is None else (proximal.name, proximal.mu),
            noise=_noise(ours, step),
        )
        ours.round(step)
    assert sampled >= 3
    assert furthest(ours.model(), twin, start) < FLOAT32


def _noise(ours: Small, step: int) -> Model | None:
    """The plan's noise of `step`: what it adds to nothing."""
    if not ours.plan.settings.z:
        return None
    charge = Charge(ours.plan.event, step=step, clip_bound=ours.plan.clip_bound)
    noise = as_model(ours.layout, ours.plan.add_noise(ours.plan.new_total(), charge))
    # A sum of a few thousand draws: its spread is z·C within some per cent.
    spread = float(np.std(np.concatenate([layer.ravel() for layer in noise.values()])))
    assert spread == pytest.approx(ours.plan.settings.z * ours.plan.settings.clip_bound, rel=0.1)
    return noise


@pytest.mark.parametrize(
    ("people", "weighting"),
    [({}, "uniform"), ({"max_seconds": 3.0}, "utterances")],
    ids=["as much from each", "more from some"],
)
def test_without_privacy_one_local_step_of_everybody_is_a_central_step_on_all_their_speech(
    people: dict[str, Any], weighting: str, tones: Path, tmp_path: Path
) -> None:
    """mean_k (θ − (θ − η·g_k)) = η·mean_k g_k = η·g of the large batch, where k counts by its utterances."""
    lr = 0.05
    ours = small(
        tones,
        tmp_path / "ledger.jsonl",
        people=people,
        model={"positions": "sinusoidal"},
        local={"lr": lr, "local_steps": 1, "batch_seconds": 30.0, "clip_gradients": math.inf},
        privacy={"clip_bound": math.inf, "weighting": weighting},
        cohort_size=9,
    )
    assert ours.plan.sampling_rate == 1
    counts = {len(ours.room.speech(client).rows) for client in ours.room.population}
    assert (len(counts) > 1) == bool(people)

    start = ours.model()
    central = ours.server.parameters_P.clone()
    for step in range(3):
        ours.round(step)
        central -= lr * _central_gradient(ours, central)
    assert furthest(ours.model(), as_model(ours.layout, central), start) < FLOAT32


def _central_gradient(ours: Small, parameters_P: torch.Tensor) -> torch.Tensor:
    """Of the mean loss over everybody's utterances, in one batch."""
    samples, texts = [], []
    for index in range(len(ours.room.population)):
        speech = ours.room.speech(ours.room.population.client(index))
        samples += [ours.room.store.samples(int(row)) for row in speech.rows]
        texts += [ids.tolist() for ids in speech.tokens]
    flat_P = parameters_P.clone().requires_grad_()
    loss = batch_loss(ours.layout.views(flat_P), make_batch(samples, texts), settings=ours.room.model)
    return torch.autograd.grad(loss, flat_P)[0]


def test_the_sum_is_divided_by_the_public_cohort_size_whoever_came(tones: Path, tmp_path: Path) -> None:
    """Where five come instead of three, the model moves by a third of their sum; where nobody comes it stays."""
    ours = small(tones, tmp_path / "ledger.jsonl", privacy={"clip_bound": math.inf})
    cohorts = {step: ours.plan.sample(step).tolist() for step in range(200)}
    five, nobody = (next(step for step in cohorts if len(cohorts[step]) == size) for size in (5, 0))
    start = ours.model()
    expected = dict(start)
    for index in cohorts[five]:
        update = train_client(
            start, ours.gradients(index, step=five), lr=ours.room.local.lr, local_bound=1.0, proximal=None
        )
        expected = {name: expected[name] - update[name] / 3 for name in expected}
    ours.round(five)
    assert furthest(ours.model(), expected, start) < FLOAT32

    alone = small(tones, tmp_path / "nobody.jsonl")
    done = alone.round(nobody)
    assert torch.equal(alone.server.parameters_P, ours.layout.flatten(init(ours.room.model, generator=start_stream())))
    assert done.private.as_json(alone.plan)["cohort"] == 0


def test_the_bound_follows_the_median_in_adaptive_clipping(tones: Path, tmp_path: Path) -> None:
    """All updates lie above the first bound, so it grows by e^(η·γ) a round, but for the count's noise."""
    adaptive = AdaptiveClipping(target_quantile=0.5, learning_rate=0.2, count_noise_std=1e-6)
    privacy = {"clip_bound": 1e-3, "adaptive": adaptive, "noise_multiplier": 1e-7}
    ours = small(tones, tmp_path / "ledger.jsonl", privacy=privacy, cohort_size=9)
    for step in range(3):
        done = ours.round(step)
        # b̃ = (−½·9 + ½·9)/9 = 0: nobody is within the bound.
        assert done.plan.clip_bound == pytest.approx(ours.plan.clip_bound * math.exp(0.2 * 0.5), rel=1e-4)
        ours.plan = done.plan
