"""Which noise suits people, cohorts and rounds: the figures that are known, the floor, and what binds."""

import math

import pytest

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import pld_epsilon
from sottovoce.privacy.events import poisson_release
from sottovoce.privacy.mechanism import optimal_banded, optimal_blt, relative_error
from sottovoce.privacy.mechanism_search import (
    KINDS,
    Kind,
    MechanismSearch,
    Sizes,
    single_release,
    single_release_epsilon,
)
from sottovoce.privacy.noise_planner import NoisePlan, NoiseRequest, plan_noise
from sottovoce.privacy.plan_tables import noise_table, noise_words
from sottovoce.privacy.strategies import Blt, Strategy

EPSILON, DELTA, STEPS = 8.0, 1e-9, 2000
COHORT = 1000  # what counts is K/S

# Effective noise multipliers at T = 2,000, ε = 8, δ = 1e-9, computed once with jax_privacy's strategies; three digits.
EFFECTIVE = [
    ("independent", 34, 1.289),
    ("independent", 100, 0.753),
    ("independent", 339, 0.569),
    ("independent", 2000, 0.453),
    ("banded", 34, 1.146),
    ("banded", 100, 0.462),
    ("banded", 339, 0.207),
    ("blt", 34, 1.289),
    ("blt", 100, 0.535),
    ("blt", 339, 0.229),
    ("blt", 2000, 0.082),
]

pytestmark = pytest.mark.long  # searches; test_plan_mechanism has short ones


@pytest.mark.parametrize(("kind", "apart", "effective"), EFFECTIVE)
def test_effective_noise_multipliers_are_those_that_are_known(kind: Kind, apart: int, effective: float) -> None:
    people = apart * COHORT
    floor = single_release(EPSILON, delta=DELTA) * math.sqrt(STEPS) / people
    asked = NoiseRequest(
        population_size=people, max_cohort=COHORT, central_steps=STEPS, delta=DELTA, target_epsilon=EPSILON
    )
    (run,) = plan_noise(asked, kinds=[kind]).runs
    # A search stops within 0.1 %, its grids add 0.01 to ε of 8, figures have three digits, and a BLT of one buffer
    # is taken where more win less than 1 %.
    assert run.effective_multiplier == pytest.approx(effective, rel=0.012)
    assert run.sigma_dp > floor
    assert run.epsilon.headline <= EPSILON
    assert run.cohort_size == COHORT


def planned(*kinds: Kind, **asked: float | None) -> NoisePlan:
    sizes = {"max_cohort": 2000, "central_steps": 40, "delta": 1e-6, **asked}
    return plan_noise(NoiseRequest(**sizes), kinds=kinds or KINDS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def paper() -> dict[int, NoisePlan]:
    """The paper's headline row (σ_DP = 3e-6), for two largest cohorts."""
    return {
        cohort: plan_noise(
            NoiseRequest(max_cohort=cohort, central_steps=STEPS, delta=DELTA, sigma_dp=3e-6, target_epsilon=EPSILON)
        )
        for cohort in (204_800, 102_400)
    }


def test_the_headline_row_needs_a_third_of_the_people(paper: dict[int, NoisePlan]) -> None:
    independent, banded, blt = (run.population_size for run in paper[204_800].runs)
    assert independent == pytest.approx(46.0e6, rel=0.01)
    assert banded == pytest.approx(14.3e6, rel=0.01)
    assert banded < blt < independent
    assert paper[204_800].chosen.kind == "banded"
    assert paper[204_800].floor == pytest.approx(0.792 * math.sqrt(STEPS) / 3e-6, rel=1e-3)


def test_smaller_cohorts_need_correlated_noise(paper: dict[int, NoisePlan]) -> None:
    independent, banded, _ = (run.population_size for run in paper[102_400].runs)
    assert independent > 205e6
    assert banded < 18.4e6 * 1.01
    assert all(run.epsilon.headline <= EPSILON for plan in paper.values() for run in plan.runs)


def test_each_of_people_noise_and_epsilon_is_found_from_the_others() -> None:
    noise = planned("banded", population_size=50_000, target_epsilon=4.0)
    sigma = noise.chosen.sigma_dp
    assert noise.goal == "sigma_dp"
    people = planned("banded", sigma_dp=sigma, target_epsilon=4.0)
    assert people.chosen.population_size == pytest.approx(50_000, rel=0.01)
    spent = planned("banded", population_size=50_000, sigma_dp=sigma)
    assert spent.chosen.epsilon.headline == pytest.approx(4.0, rel=0.01)
    for plan in (noise, people, spent):
        assert plan.binds in plan.instead
        assert min(plan.instead.values()) < plan.chosen.epsilon.headline


def test_no_mechanism_beats_the_floor_and_everybody_in_every_round_is_at_it() -> None:
    for max_cohort in (5_000, 50_000):
        plan = planned(population_size=50_000, target_epsilon=4.0, max_cohort=max_cohort)
        for run in plan.runs:
            assert run.sigma_dp > plan.floor * (1 - 1e-3)
    assert plan.chosen.kind == "independent"  # the simplest that is as good
    assert plan.chosen.sigma_dp == pytest.approx(plan.floor, rel=5e-3)
    assert set(plan.instead) == {"people", "rounds"}  # a larger cohort there is not


def test_with_enough_people_the_smallest_cohort_is_found() -> None:
    plan = planned(population_size=200_000, sigma_dp=1e-3, target_epsilon=4.0)
    assert (plan.goal, plan.binds) == ("cohort_size", None)
    assert plan.chosen.cohort_size < 2000
    assert plan.chosen.central_steps == 40
    assert plan.chosen.epsilon.headline <= 4.0
    less = Sizes(population_size=200_000, max_cohort=int(plan.chosen.cohort_size * 0.97), central_steps=40)
    assert MechanismSearch(plan.chosen.kind, delta=1e-6).epsilon(less, 1e-3) > 4.0
    assert "nothing binds" in noise_words(plan)[-1]


def test_with_too_few_people_the_most_rounds_are_found() -> None:
    plan = planned(population_size=10_000, sigma_dp=5e-4, target_epsilon=4.0)
    assert plan.goal == "central_steps"
    assert 1 <= plan.chosen.central_steps < 40
    assert plan.chosen.central_steps <= plan.floor
    assert plan.chosen.epsilon.headline <= 4.0
    with pytest.raises(InputError, match="in 1 to 40 rounds"):
        planned(population_size=10, sigma_dp=1e-6, target_epsilon=4.0)


def test_a_run_is_told_as_a_recipe_says_it() -> None:
    plan = planned(population_size=50_000, target_epsilon=4.0)
    independent, banded, blt = plan.runs
    assert independent.recipe is None
    assert independent.kept == 0
    assert banded.recipe == {"kind": "banded", "bands": banded.cycle, "cycle": banded.cycle}
    assert isinstance(blt.strategy, Blt)
    assert blt.recipe == {"kind": "blt", "buffers": blt.strategy.buffers, "cycle": 25}
    assert blt.cohort_size * blt.cycle >= 50_000
    told = plan.to_json()
    assert [one["mechanism"]["kind"] for one in told["mechanisms"]] == ["independent", "banded", "blt"]
    assert told["floor"] == {"sigma_dp": plan.floor}
    assert noise_table(plan).row_count == 4
    assert f"noise_multiplier: {plan.chosen.noise_multiplier:g}" in noise_words(plan)[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "got none"),
        ({"sigma_dp": 1e-4}, "got sigma_dp"),
        ({"sigma_dp": -1.0, "target_epsilon": 1.0}, "sigma_dp=-1"),
        ({"sigma_dp": 1e-4, "target_epsilon": math.nan}, "target_epsilon=nan"),
        ({"sigma_dp": 1e-4, "target_epsilon": 1.0, "max_cohort": 0}, "max_cohort=0"),
        ({"sigma_dp": 1e-4, "target_epsilon": 1.0, "delta": 0.0}, "delta=0"),
    ],
)
def test_nonsense_is_refused(asked: dict[str, float], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        planned(**asked)


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 40.0])
def test_one_release_is_exact(target: float) -> None:
    z = single_release(target, delta=DELTA)
    assert single_release_epsilon(z, delta=DELTA) == pytest.approx(target, rel=1e-9)
    assert pld_epsilon(poisson_release(z, sampling_rate=1.0), DELTA) == pytest.approx(target, rel=2e-3)


def test_a_larger_cohort_is_what_independent_noise_wants() -> None:
    plan = plan_noise(
        NoiseRequest(max_cohort=300, central_steps=40, delta=1e-6, population_size=200_000, sigma_dp=2e-3),
        kinds=("independent",),
    )
    assert plan.binds == "cohort"
    assert "what binds: cohort" in noise_words(plan)[-1]


@pytest.mark.parametrize("kind", ["banded", "blt"])
@pytest.mark.parametrize("cycle", [2, 8, 34, 64])
def test_the_last_sum_has_the_least_relative_error(kind: Kind, cycle: int) -> None:
    """So that the floor, which is one of the last sum, is one of the RMS over all of them, too."""
    steps = 500
    strategy: Strategy = optimal_banded(steps=steps, bands=cycle, cycle=cycle)
    if kind == "blt":
        strategy = optimal_blt(steps=steps, buffers=2, cycle=cycle)
    squared = relative_error(strategy, steps=steps) ** 2 * steps * (steps + 1) / 2
    before = relative_error(strategy, steps=steps - 1) ** 2 * (steps - 1) * steps / 2
    last = math.sqrt((squared - before) / steps)  # the variances of all prefix sums, less all but the last
    assert last < relative_error(strategy, steps=steps)
