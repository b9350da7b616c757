"""A round computes what Algorithm 1 says, whatever the settings; without privacy it is what it would be centrally."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.small import AMPLIFIED, CPU, Small, as_model, furthest, rounding, small, start_stream, update_of
from tests.reference_round import LAMB, SGD, Model, minus, norm, reference_round

from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.augment import SpecAugmentSettings
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.federated.client import LoadedClient, Proximal
from sottovoce.federated.engines import SequentialEngine, Trained
from sottovoce.federated.engines import engine as engine_module
from sottovoce.federated.weighting import WeightedSum
from sottovoce.flat import segments
from sottovoce.models import ctc
from sottovoce.models.family import extract_float32_features
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.ledger import Charge

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
        "model": {"layer_drop": 0.3},
        "local": {
            "spec_augment": SpecAugmentSettings(frequency_masks=1, frequency_width=10),
            "spec_augment_from": 1,
        },
    },
    "two epochs, everybody": {"local": {"local_epochs": 2}, "cohort_size": 9},
}


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_are_those_of_the_twin(name: str, tones: Path, tmp_path: Path) -> None:
    """Each from where ours begins it: what rounding makes of one round is not carried into the next."""
    case = dict(CASES[name])
    optimiser = {"name": "sgd"} | case.pop("optimiser", {})
    lamb = optimiser["name"] == "lamb"
    optimiser |= {"eps": LAMB_EPS} if lamb else {}
    opt, lr = (LAMB(eps=LAMB_EPS), 0.02) if lamb else (SGD(momentum=optimiser.get("momentum", 0.0)), 0.8)
    case["server"] = {"optimiser": optimiser, "schedule": {"name": "constant", "lr": lr}}
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, **case)
    sampled = 0
    for step in range(3):
        sampled += len(ours.plan.sample(step))
        start, twin = ours.model(), twin_of(ours, step, opt=opt, lr=lr)
        ours.round(step)
        assert furthest(ours.model(), twin, start) < 1
    assert sampled >= 3


def twin_of(ours: Small, step: int, *, opt: SGD | LAMB, lr: float) -> Model:
    """What Algorithm 1 makes of our model in round `step`."""
    proximal = ours.context.local.proximal
    return reference_round(
        ours.model(),
        [ours.gradients(index, step=step) for index in ours.plan.sample(step).tolist()],
        opt=opt,
        server_lr=lr,
        local_lr=ours.context.local.lr,
        local_bound=ours.context.local.clip_gradients,
        expected_cohort=ours.plan.cohort_size,
        bound=ours.plan.clip_bound,
        share=str(ours.plan.settings.share),
        normalise=str(ours.plan.settings.normalise),
        proximal=None if proximal is None else (proximal.name, proximal.mu),
        noise=_noise(ours, step),
        statistics=ours.context.family.training.statistics(ours.context.model),
    )


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


# What these comparisons can see, and what rounding can do.


def utterance_missing(patch: pytest.MonkeyPatch) -> None:
    """Each client's batches lack an utterance where they have several."""
    _load_otherwise(patch, lambda own: replace(own, lines=[b[:-1] if len(b) > 1 else b for b in own.lines]))


def step_missing(patch: pytest.MonkeyPatch) -> None:
    """Each client makes one local step less."""
    _load_otherwise(patch, lambda own: replace(own, lines=own.lines[:-1], draws=own.draws[:-1]))


def _load_otherwise(patch: pytest.MonkeyPatch, change: Callable[[LoadedClient], LoadedClient]) -> None:
    whole = engine_module.load_client
    patch.setattr(engine_module, "load_client", lambda *given, **named: change(whole(*given, **named)))


def gradients_unclipped(patch: pytest.MonkeyPatch) -> None:
    whole = Weights.step
    patch.setattr(Weights, "step", lambda self, *, lr, max_norm: whole(self, lr=lr, max_norm=math.inf))


def bound_off_by_a_thousandth(patch: pytest.MonkeyPatch) -> None:
    whole = segments.add_scaled
    patch.setattr(segments, "add_scaled", lambda total, u, scales, *g, **n: whole(total, u, scales * 1.001, *g, **n))


def divided_by_who_came(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightedSum, "denominator", property(lambda _: 4.0))


FAULTS = [utterance_missing, step_missing, gradients_unclipped, bound_off_by_a_thousandth, divided_by_who_came]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_lies_far_outside_of_rounding(
    fault: Callable[[pytest.MonkeyPatch], None], tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"model": {"positions": "sinusoidal"}, "local": {"local_epochs": 2}}
    ours = small(tones, tmp_path / "ledger.jsonl", dtype=torch.float64, **options)
    step = next(step for step in range(50) if len(ours.plan.sample(step)) == 4)
    start, twin = ours.model(), twin_of(ours, step, opt=SGD(), lr=1.0)
    fault(monkeypatch)
    ours.round(step)
    assert furthest(ours.model(), twin, start) > 100


def test_local_training_amplifies_a_small_difference_by_less_than_we_allow(tones: Path, tmp_path: Path) -> None:
    """Of the start by 2⁻⁴⁰: far above float64's rounding, and far below what any ReLU would notice."""
    ours = small(tones, tmp_path / "ledger.jsonl", local={"local_epochs": 2, "batch_seconds": 1.3}, cohort_size=9)
    expected, flat_P = [update_of(ours, index) for index in range(9)], ours.server.parameters_P.double()
    sign_P = torch.randint(2, flat_P.shape, generator=torch_stream(1, "signs")).double() * 2 - 1
    ours.server.parameters_P = flat_P * (1 + 2.0**-40 * sign_P)
    moved = [norm(minus(update_of(ours, index), own)) / norm(own) * 2.0**40 for index, own in enumerate(expected)]
    assert 1 < max(moved) < AMPLIFIED


@pytest.mark.parametrize("name", ["global", "two epochs, everybody", "FedProx", "layers dropped, masks from step 1 on"])
def test_in_float32_ordinary_updates_are_as_precise_as_its_sums(name: str, tones: Path, tmp_path: Path) -> None:
    """And in bfloat16 they are not: the comparison sees a wrong type of any number that matters."""
    ours = small(tones, tmp_path / "ledger.jsonl", **CASES[name])
    apart: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for index, step in itertools.product(range(9), (0, 1)):
        expected = update_of(ours, index, step=step)
        for dtype, found in apart.items():
            engine = SequentialEngine(ours.context, ours.layout, device=CPU, dtype=dtype)
            (trained,) = engine.train(ours.server.parameters_P, [index], step=step)
            assert isinstance(trained, Trained)
            found.append(norm(minus(as_model(ours.layout, trained.update), expected)) / norm(expected))
    assert np.median(apart[torch.float32]) < rounding(torch.float32)
    assert np.median(apart[torch.bfloat16]) > 10 * rounding(torch.float32)


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
        dtype=torch.float64,
    )
    assert ours.plan.sampling_rate == 1
    counts = {len(ours.context.speech(client).rows) for client in ours.context.population}
    assert (len(counts) > 1) == bool(people)

    for step in range(3):
        start, central = ours.model(), ours.server.parameters_P.double()
        central -= lr * _central_gradient(ours, central)
        ours.round(step)
        assert furthest(ours.model(), as_model(ours.layout, central), start) < 1


def _central_gradient(ours: Small, parameters_P: torch.Tensor) -> torch.Tensor:
    """Of the mean loss over everybody's utterances, in one batch."""
    samples, texts = [], []
    for index in range(len(ours.context.population)):
        speech = ours.context.speech(ours.context.population.client(index))
        samples += [ours.context.store.samples(int(row)) for row in speech.rows]
        texts += [ids.tolist() for ids in speech.tokens]
    flat_P = parameters_P.clone().requires_grad_()
    family, settings = ours.context.family, ours.context.model
    heard = extract_float32_features(family, pad_waveforms(samples, texts), settings=settings)
    assert family.recognition is not None
    emitted = family.recognition.emit(ours.layout.views(flat_P), heard, settings=settings)
    loss = ctc.mean_ctc_loss(*emitted, heard.tokens_UL, heard.token_lengths_U)
    return torch.autograd.grad(loss, flat_P)[0]


def test_the_sum_is_divided_by_the_public_cohort_size_whoever_came(tones: Path, tmp_path: Path) -> None:
    """Where five come instead of three, the model moves by a third of their sum; where nobody comes it stays."""
    ours = small(tones, tmp_path / "ledger.jsonl", privacy={"clip_bound": math.inf}, dtype=torch.float64)
    cohorts = {step: ours.plan.sample(step).tolist() for step in range(200)}
    five, nobody = (next(step for step in cohorts if len(cohorts[step]) == size) for size in (5, 0))
    start = ours.model()
    expected = dict(start)
    for index in cohorts[five]:
        update = update_of(ours, index, step=five)
        expected = {name: expected[name] - update[name] / 3 for name in expected}
    ours.round(five)
    assert furthest(ours.model(), expected, start) < 1

    alone = small(tones, tmp_path / "nobody.jsonl")
    figures = alone.figures(nobody)
    assert torch.equal(
        alone.server.parameters_P,
        ours.layout.flatten(ours.context.family.init(ours.context.model, generator=start_stream())),
    )
    assert figures.as_json(alone.plan)["cohort"] == 0


def test_the_bound_follows_the_median_in_adaptive_clipping(tones: Path, tmp_path: Path) -> None:
    """All updates lie above the first bound, so it grows by e^(η·γ) a round, but for the count's noise."""
    adaptive = AdaptiveClipping(target_quantile=0.5, learning_rate=0.2, count_noise_std=1e-6)
    privacy = {"clip_bound": 1e-3, "adaptive": adaptive, "noise_multiplier": 1e-7}
    ours = small(tones, tmp_path / "ledger.jsonl", privacy=privacy, cohort_size=9)
    for step in range(3):
        ours.round(step)
        # b̃ = (−½·9 + ½·9)/9 = 0: nobody is within the bound.
        assert ours.next_plan.clip_bound == pytest.approx(ours.plan.clip_bound * math.exp(0.2 * 0.5), rel=1e-4)
        ours.plan = ours.next_plan


def test_the_average_is_of_the_models_after_the_pass(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", server={"ema": 0.75})
    start_P, after_P = ours.server.parameters_P.clone(), torch.full_like(ours.server.parameters_P, 2.0)

    def jump(server_P: torch.Tensor, step: int) -> dict[str, float]:
        assert not torch.equal(server_P, start_P), "the server has made its step"
        server_P.copy_(after_P)
        return {"server_pass_loss": 0.5}

    done = ours.round(0, after_step=[jump])
    assert done.figures == {"server_pass_loss": 0.5}
    assert torch.equal(ours.server.parameters_P, after_P)
    torch.testing.assert_close(ours.server.result_P, 0.75 * start_P + 0.25 * after_P)


def test_what_is_shown_of_a_release_is_what_the_server_steps_against(tones: Path, tmp_path: Path) -> None:
    """By plain SGD at a rate of 1, exactly that much."""
    ours = small(tones, tmp_path / "ledger.jsonl", privacy={"noise_multiplier": 0.7})
    start_P, shown = ours.server.parameters_P.clone(), list[torch.Tensor]()
    ours.round(0, on_release=lambda released_P, _: shown.append(released_P.clone()))
    assert torch.equal(ours.server.parameters_P, start_P - shown[0])
