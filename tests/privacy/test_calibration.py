"""Calibration is the inverse of accounting, and says so when there is no inverse."""

import math

import pytest

from sottovoce.errors import InputError
from sottovoce.privacy.accounting import poisson_epsilon, rdp_epsilon
from sottovoce.privacy.calibration import (
    Accountant,
    crossing,
    event_epsilon,
    noise_multiplier_for,
    population_for,
    steps_for,
)
from sottovoce.privacy.events import Event, fixed_size_release, poisson_release, repeated

DELTA = 1e-6


def run(z: float) -> Event:
    return repeated(poisson_release(z, sampling_rate=0.02), 300)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_inverts_epsilon(accountant: Accountant) -> None:
    z = noise_multiplier_for(2.0, run_event=run, delta=DELTA, accountant=accountant)
    careful = poisson_epsilon(z, sampling_rate=0.02, central_steps=300, delta=DELTA)
    reached = careful.rdp if accountant == "rdp" else careful.pld
    assert reached is not None
    assert 2.0 * 0.995 <= reached <= 2.0


def test_noise_can_be_calibrated_for_cohorts_of_fixed_size() -> None:
    def fixed(z: float) -> Event:
        return repeated(fixed_size_release(z, cohort_size=200, population_size=200), 50)

    # Cohort = population: plain Gaussians of multiplier z/2, whose RDP is αT/(2(z/2)²).
    z = noise_multiplier_for(5.0, run_event=fixed, delta=DELTA)
    assert rdp_epsilon(fixed(z), DELTA) == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_are_the_most_that_fit(accountant: Accountant) -> None:
    step = poisson_release(1.0, sampling_rate=0.02)
    steps = steps_for(2.0, step_event=step, delta=DELTA, accountant=accountant)
    assert event_epsilon(repeated(step, steps), delta=DELTA, accountant=accountant) <= 2.0
    assert event_epsilon(repeated(step, steps + 1), delta=DELTA, accountant=accountant) > 2.0


def test_population_grows_with_its_cohort_and_then_alone() -> None:
    recipe = {"sigma_dp": 1e-3, "sampling_rate": 0.05, "central_steps": 200, "delta": DELTA}

    def at(population: int, cohort: int) -> float:
        step = poisson_release(1e-3 * cohort, sampling_rate=cohort / population)
        return event_epsilon(repeated(step, 200), delta=DELTA)

    free, free_cohort = population_for(3.0, **recipe)  # type: ignore[arg-type]
    assert free_cohort == round(0.05 * free)
    assert at(free, free_cohort) <= 3.0 < at(round(free * 0.99), round(free_cohort * 0.99))
    capped, capped_cohort = population_for(3.0, max_cohort=500, **recipe)  # type: ignore[arg-type]
    assert capped_cohort == 500 < free_cohort
    assert capped > free
    assert at(capped, 500) <= 3.0 < at(round(capped * 0.99), 500)


@pytest.mark.parametrize("jump", ["first", "last"])
def test_a_jump_at_either_end_is_found(jump: str) -> None:
    for low in range(3, 400):
        high = 10 * low
        edge = low if jump == "first" else high - 1
        found = crossing(lambda x, edge=edge: 2.0 if math.ceil(x) <= edge else 0.5, low, high, target=1, precision=1e-3)  # type: ignore[misc]
        assert edge < math.ceil(found) <= max(edge + 1, math.ceil(edge * 1.002))


def test_what_cannot_be_reached_says_the_best() -> None:
    with pytest.raises(InputError, match=r"target_epsilon=2 cannot be reached: the best is ε = .*, with a single step"):
        steps_for(2.0, step_event=poisson_release(0.1, sampling_rate=0.5), delta=DELTA)
    with pytest.raises(InputError, match=r"cannot be reached: .* cohort_size=10"):
        population_for(1.0, sigma_dp=1e-2, sampling_rate=1e-3, central_steps=10, delta=1e-12, max_cohort=10)
    with pytest.raises(InputError, match=r"cannot be reached: .* noise_multiplier="):
        noise_multiplier_for(1e-9, run_event=run, delta=1e-12, accountant="rdp")


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), float("nan")])
def test_targets_are_positive(target: float) -> None:
    with pytest.raises(InputError, match="target_epsilon="):
        noise_multiplier_for(target, run_event=run, delta=DELTA)
