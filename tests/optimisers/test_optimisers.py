"""What must hold for every optimiser: in place, restartable, and row by row when clients are stacked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.optimisers import (
    LAMB,
    LARS,
    OPTIMISERS,
    SCHEDULES,
    SGD,
    Adadelta,
    AdaGrad,
    Adam,
    Optimiser,
    State,
    build_optimiser,
    build_schedule,
    restore_state,
    state_tensors,
)

ALL = [
    SGD(),
    SGD(momentum=0.9, nesterov=True),
    Adam(weight_decay=0.1),
    AdaGrad(),
    Adadelta(),
    LARS(weight_decay=0.1, eps=1e-6),
    LARS(),
    LAMB(),
    LAMB(weight_decay=0.1),
]
SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), (), (2, 1, 3)]


def draw(*names: str | int, rows: int | None = None, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch_stream(1, *names)
    shapes = SHAPES if rows is None else [(rows, *shape) for shape in SHAPES]
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


def train(optimiser: Optimiser, parameters: list[torch.Tensor], state: State, steps: range) -> None:
    for step in steps:
        optimiser.step(parameters, draw("gradients", step), state, lr=0.1 / (1 + step))


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
def test_step_works_in_place_and_leaves_gradients_alone(optimiser: Optimiser) -> None:
    parameters, gradients = draw("parameters"), draw("gradients")
    parameters[0].requires_grad_()
    addresses = [p.data_ptr() for p in parameters]
    before = [p.detach().clone() for p in parameters]
    optimiser.step(parameters, gradients, optimiser.init(parameters), lr=0.1)
    assert [p.data_ptr() for p in parameters] == addresses
    assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(torch.equal(g, again) for g, again in zip(gradients, draw("gradients"), strict=True))


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
def test_zero_learning_rate_moves_nothing(optimiser: Optimiser) -> None:
    parameters = draw("parameters")
    optimiser.step(parameters, draw("gradients"), optimiser.init(parameters), lr=0.0)
    assert all(torch.equal(p, b) for p, b in zip(parameters, draw("parameters"), strict=True))


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
def test_restored_state_continues_to_the_bit(optimiser: Optimiser, tmp_path: Path) -> None:
    whole = draw("parameters")
    state = optimiser.init(whole)
    train(optimiser, whole, state, range(3))
    save_file(state_tensors(state), tmp_path / "state.safetensors")
    resumed = [p.clone() for p in whole]
    train(optimiser, whole, state, range(3, 6))

    restored = optimiser.init(resumed)
    restore_state(restored, tensors=load_file(tmp_path / "state.safetensors"))
    train(optimiser, resumed, restored, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_state_of_transposed_parameters_can_be_saved(tmp_path: Path) -> None:
    parameters = [torch.randn(4, 3, generator=torch_stream(1, "transposed")).T]
    state = LAMB().init(parameters)
    LAMB().step(parameters, [torch.ones(3, 4)], state, lr=0.1)
    save_file(state_tensors(state), tmp_path / "state.safetensors")
    restored = LAMB().init(parameters)
    restore_state(restored, tensors=load_file(tmp_path / "state.safetensors"))
    assert torch.equal(restored.slots["first_moment"][0], state.slots["first_moment"][0])


def test_state_of_another_optimiser_or_model_is_refused() -> None:
    parameters = draw("parameters")
    saved = state_tensors(Adam().init(parameters))
    with pytest.raises(InputError, match=r"lacks 'momentum\.0'"):
        restore_state(LARS().init(parameters), tensors=saved)
    with pytest.raises(InputError, match=r"has an unknown 'first_moment\.3'"):
        restore_state(Adam().init(parameters[:-1]), tensors=saved)
    with pytest.raises(InputError, match=r"'first_moment\.1' is \[5\].*expected \[6\]"):
        restore_state(Adam().init([parameters[0], torch.zeros(6), *parameters[2:]]), tensors=saved)


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 4), seed=st.integers(0, 9), zeroed=st.sampled_from(["none", "parameters", "gradients"]))
def test_stacked_step_is_each_client_alone(optimiser: Optimiser, rows: int, seed: int, zeroed: str) -> None:
    # Clients of very different scale: a norm taken over all of them would show.
    scale_C = 10.0 ** torch.arange(rows)
    stacked = [(p.movedim(0, -1) * scale_C).movedim(-1, 0).contiguous() for p in draw("stacked", seed, rows=rows)]
    if zeroed == "parameters":
        stacked[0][0] = 0
    alone = [[p[row].clone() for p in stacked] for row in range(rows)]
    state, states = optimiser.init(stacked), [optimiser.init(parameters) for parameters in alone]
    for step in range(3):
        gradients = draw("gradients", seed, step, rows=rows)
        if zeroed == "gradients":
            gradients[0][0] = 0
        ratios_CH = optimiser.step(stacked, gradients, state, lr=0.1, stacked=True)
        for row in range(rows):
            ratios_H = optimiser.step(alone[row], [g[row] for g in gradients], states[row], lr=0.1)
            if ratios_CH is not None:
                torch.testing.assert_close(ratios_CH[row], ratios_H)
    for row in range(rows):
        for together, separate in zip(stacked, alone[row], strict=True):
            torch.testing.assert_close(together[row], separate, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
def test_one_client_with_nan_changes_only_its_own_row(optimiser: Optimiser) -> None:
    clean, spoilt = draw("parameters", rows=3), draw("parameters", rows=3)
    clean_state, spoilt_state = optimiser.init(clean), optimiser.init(spoilt)
    for step in range(2):
        gradients = draw("gradients", step, rows=3)
        optimiser.step(clean, [g.clone() for g in gradients], clean_state, lr=0.1, stacked=True)
        for gradient in gradients:
            gradient[1] = torch.nan
        optimiser.step(spoilt, gradients, spoilt_state, lr=0.1, stacked=True)
    for c, s in zip(clean, spoilt, strict=True):
        assert torch.equal(c[[0, 2]], s[[0, 2]])
        assert s[1].isnan().all()


def test_lamb_ignores_the_scale_of_gradients_far_above_eps() -> None:
    """Why the clip bound hardly matters to the server (Pelikan et al., section 4): lr alone sets the step."""
    plain, scaled = draw("parameters"), draw("parameters")
    optimiser = LAMB(eps=1e-30)
    states = [optimiser.init(plain), optimiser.init(scaled)]
    for step in range(3):
        optimiser.step(plain, draw("gradients", step), states[0], lr=0.01)
        optimiser.step(scaled, draw("gradients", step, scale=1e-4), states[1], lr=0.01)
    for p, s in zip(plain, scaled, strict=True):
        torch.testing.assert_close(p, s, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimiser", [LARS(momentum=0.0), LAMB()], ids=repr)
def test_trust_ratio_makes_steps_proportional_to_the_parameters(optimiser: Optimiser) -> None:
    parameters = draw("parameters")
    optimiser.step(parameters, draw("gradients"), optimiser.init(parameters), lr=0.01)
    relative = 0.01 * (optimiser.trust_coefficient if isinstance(optimiser, LARS) else 1.0)
    for moved, start in zip(parameters, draw("parameters"), strict=True):
        torch.testing.assert_close((moved - start).norm(), relative * start.norm(), rtol=1e-2, atol=0)


def test_small_weight_decay_is_not_rounded_away() -> None:
    """lr·weight_decay = 1e-7: the float32 nearest to 1 - 1e-7 is 1 - 1.19e-7, and a product with it 19 % too strong."""
    parameters = [1 + torch.rand(200_000, generator=torch_stream(1, "weights"))]
    start = parameters[0].double().mean()
    Adam(weight_decay=1e-4).step(parameters, [torch.zeros(200_000)], Adam().init(parameters), lr=1e-3)
    assert float(parameters[0].double().mean() / start - 1) == pytest.approx(-1e-7, rel=0.1)


def test_gradients_of_another_shape_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="other shapes"):
        SGD().step([torch.zeros(2, 3)], [torch.zeros(3)], State(), lr=0.1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: SGD(momentum=1.0), "momentum=1.0, expected a finite number, at least 0 and below 1"),
        (lambda: SGD(nesterov=True), "nesterov=True with momentum=0.0"),
        (lambda: Adam(b2=float("nan")), "b2=nan"),
        (lambda: LAMB(eps=-1e-6), "eps=-1e-06, expected a finite number, at least 0"),
        (lambda: LARS(trust_coefficient=float("inf")), "trust_coefficient=inf"),
        (lambda: build_optimiser("adagrad", eps="1e-7"), "eps='1e-7'"),
        (lambda: build_optimiser("lamp"), "unknown optimiser 'lamp', did you mean 'lamb'"),
        (
            lambda: build_optimiser("adam", wight_decay=0.1),
            "unknown setting 'wight_decay', did you mean 'weight_decay'",
        ),
        (lambda: build_optimiser("sgd", zzz=1), r"unknown setting 'zzz', \(known: momentum, nesterov\)"),
        (lambda: build_schedule("exponential", lr=0.1, transition_steps=5), "setting 'decay_rate' is missing"),
        (lambda: build_schedule("exponental"), "did you mean 'exponential'"),
    ],
)
def test_mistakes_in_settings_are_named(made: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()


def test_registries_name_every_class_once() -> None:
    assert len(set(OPTIMISERS.values())) == len(OPTIMISERS) == 6
    assert len(set(SCHEDULES.values())) == len(SCHEDULES) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("optimiser", ALL, ids=repr)
def test_no_step_waits_for_the_device(optimiser: Optimiser, stacked: bool) -> None:
    rows = 3 if stacked else None
    parameters = [p.cuda() for p in draw("parameters", rows=rows)]
    gradients = [g.cuda() for g in draw("gradients", rows=rows)]
    state = optimiser.init(parameters)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            optimiser.step(parameters, gradients, state, lr=0.1, stacked=stacked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
