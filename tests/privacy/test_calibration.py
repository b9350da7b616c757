"""Calibration is the inverse of accounting, and says so when there is no inverse."""

import math

import pytest

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import poisson_epsilon, rdp_epsilon
from sottovoce.privacy.calibration import (
    Accountant,
    Bracket,
    UnreachableTarget,
    calibrate_noise_multiplier,
    calibrate_steps,
    event_epsilon,
    smallest_integer,
    solve_decreasing,
)
from sottovoce.privacy.events import Event, fixed_size_release, poisson_release, repeated
from sottovoce.privacy.planner import plan_run, smallest_population
from sottovoce.privacy.pld import QUICK

DELTA = 1e-6


def run(z: float) -> Event:
    return repeated(poisson_release(z, sampling_rate=0.02), 300)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_inverts_epsilon(accountant: Accountant) -> None:
    z = calibrate_noise_multiplier(2.0, run_event=run, delta=DELTA, accountant=accountant)
    careful = poisson_epsilon(z, sampling_rate=0.02, central_steps=300, delta=DELTA)
    reached = careful.rdp if accountant == "rdp" else careful.pld
    assert reached is not None
    assert 2.0 * 0.995 <= reached <= 2.0


def test_noise_can_be_calibrated_for_cohorts_of_fixed_size() -> None:
    def fixed(z: float) -> Event:
        return repeated(fixed_size_release(z, cohort_size=200, population_size=200), 50)

    # Cohort = population: plain Gaussians of multiplier z/2, whose RDP is αT/(2(z/2)²).
    z = calibrate_noise_multiplier(5.0, run_event=fixed, delta=DELTA)
    assert rdp_epsilon(fixed(z), DELTA) == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_are_the_most_that_fit(accountant: Accountant) -> None:
    step = poisson_release(1.0, sampling_rate=0.02)
    steps = calibrate_steps(2.0, step_event=step, delta=DELTA, accountant=accountant)
    assert event_epsilon(repeated(step, steps), delta=DELTA, accountant=accountant) <= 2.0
    assert event_epsilon(repeated(step, steps + 1), delta=DELTA, accountant=accountant) > 2.0


def test_population_grows_with_its_cohort_and_then_alone() -> None:
    plan = plan_run(10_000, cohort_size=500, central_steps=200, delta=DELTA, sigma_dp=1e-3, cap=QUICK)

    def at(population: int, cohort: int) -> float:
        step = poisson_release(1e-3 * cohort, sampling_rate=cohort / population)
        return event_epsilon(repeated(step, 200), delta=DELTA)

    found = smallest_population(plan, target_epsilon=3.0, cap=QUICK)
    free, free_cohort = found.population_size, found.cohort_size
    assert free_cohort == round(0.05 * free)
    assert at(free, free_cohort) <= 3.0 < at(round(free * 0.99), round(free_cohort * 0.99))
    found = smallest_population(plan, target_epsilon=3.0, max_cohort=500, cap=QUICK)
    capped, capped_cohort = found.population_size, found.cohort_size
    assert capped_cohort == 500 < free_cohort
    assert capped > free
    assert at(capped, 500) <= 3.0 < at(round(capped * 0.99), 500)


@pytest.mark.parametrize("jump", ["first", "last"])
def test_a_jump_at_either_end_is_found(jump: str) -> None:
    for low in range(3, 400):
        high = 10 * low
        edge = low if jump == "first" else high - 1

        def spent(x: float, edge: int = edge) -> float:
            return 2.0 if math.ceil(x) <= edge else 0.5

        found = solve_decreasing(1, spent, Bracket(start=low, factor=10, precision=1e-3))
        assert edge < math.ceil(found) <= max(edge + 1, math.ceil(edge * 1.002))


def test_what_cannot_be_reached_says_the_best() -> None:
    with pytest.raises(InputError, match=r"target_epsilon=2 cannot be reached: the best is ε = .*, with a single step"):
        calibrate_steps(2.0, step_event=poisson_release(0.1, sampling_rate=0.5), delta=DELTA)
    plan = plan_run(10_000, cohort_size=10, central_steps=10, delta=1e-12, sigma_dp=1e-2, cap=QUICK)
    with pytest.raises(InputError, match=r"cannot be reached: .* cohort_size=10"):
        smallest_population(plan, target_epsilon=1.0, max_cohort=10)
    with pytest.raises(InputError, match=r"cannot be reached: .* noise_multiplier="):
        calibrate_noise_multiplier(1e-9, run_event=run, delta=1e-12, accountant="rdp")


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), float("nan")])
def test_targets_are_positive(target: float) -> None:
    with pytest.raises(InputError, match="target_epsilon="):
        calibrate_noise_multiplier(target, run_event=run, delta=DELTA)


@pytest.mark.parametrize("edge", [0.001, 0.7, 1.0, 3.0, 900.0])
def test_a_search_finds_the_edge_from_either_side(edge: float) -> None:
    found = solve_decreasing(
        5.0, lambda x: 5.0 * edge / x, Bracket(start=1.0, factor=4, precision=1e-6, least=1e-6, most=1e6)
    )
    assert edge * (1 - 1e-12) <= found <= edge * (1 + 2e-6)


def test_a_search_stays_between_its_limits() -> None:
    assert solve_decreasing(5.0, lambda x: 1.0, Bracket(start=1.0, factor=4, precision=1e-3, least=0.1)) == 0.1
    assert solve_decreasing(5.0, lambda x: 1.0, Bracket(start=1.0, factor=4, precision=1e-3)) == 1.0
    with pytest.raises(UnreachableTarget, match="target_epsilon=5 cannot be reached: the best is ε = 9, at 16"):
        solve_decreasing(
            5.0, lambda x: 9.0, Bracket(start=1.0, factor=4, precision=1e-3, most=20), at=lambda x: f", at {x:g}"
        )


@pytest.mark.parametrize("first", range(1, 40))
def test_the_smallest_whole_number_is_found(first: int) -> None:
    for start in range(1, first + 1):
        assert smallest_integer(lambda n: n >= first, start=start) == first
        assert smallest_integer(lambda n: n >= first, start=start, most=first) == first
