"""What must hold for every schedule; their values against optax are in test_golden.py."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.optimisers import Constant, ExponentialDecay, Schedule, StepDecay, WarmupCosine, WarmupInverseSqrt

counts = st.integers(1, 1000)
rates = st.floats(0.01, 1.0)
decaying = st.one_of(
    st.builds(Constant, lr=rates),
    st.builds(StepDecay, lr=rates, transition_begin=counts, transition_steps=counts, decay_rate=rates),
    st.builds(
        ExponentialDecay,
        lr=rates,
        transition_begin=counts,
        transition_steps=counts,
        decay_rate=rates,
        staircase=st.booleans(),
    ),
)


@given(decaying, st.integers(0, 5000))
def test_decays_start_at_lr_and_never_rise(schedule: Constant | StepDecay | ExponentialDecay, step: int) -> None:
    assert schedule(0) == schedule.lr
    assert schedule.lr >= schedule(step) >= schedule(step + 1) >= 0


@given(rates, counts, counts, st.integers(0, 5000))
def test_warmups_peak_at_their_end(lr: float, warmup: int, extra: int, step: int) -> None:
    schedules: list[Schedule] = [
        WarmupCosine(lr=lr, warmup_steps=warmup, total_steps=warmup + extra),
        WarmupInverseSqrt(lr=lr, warmup_steps=warmup),
    ]
    for schedule in schedules:
        assert schedule(0) == 0
        assert schedule(warmup) == pytest.approx(lr)
        rising = step < warmup
        assert (schedule(step) < schedule(step + 1)) if rising else (schedule(step) >= schedule(step + 1))


def test_warmup_may_be_left_out_of_a_cosine() -> None:
    assert WarmupCosine(lr=0.1, warmup_steps=0, total_steps=10)(0) == 0.1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Constant(lr=-0.1), "lr=-0.1"),
        (lambda: Constant(lr=True), "lr=True"),
        (lambda: StepDecay(lr=0.1, transition_begin=5, transition_steps=0), "transition_steps=0"),
        (lambda: StepDecay(lr=0.1, transition_begin=-1, transition_steps=5), "transition_begin=-1"),
        (lambda: ExponentialDecay(lr=0.1, transition_steps=5, decay_rate=1.5), "decay_rate=1.5"),
        (lambda: ExponentialDecay(lr=0.1, transition_steps=2.5, decay_rate=0.5), "transition_steps=2.5"),  # type: ignore[arg-type]
        (lambda: WarmupCosine(lr=0.1, warmup_steps=10, total_steps=10), "total_steps=10"),
        (lambda: WarmupInverseSqrt(lr=0.1, warmup_steps=0), "warmup_steps=0"),
    ],
)
def test_mistakes_in_settings_are_named(made: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()
