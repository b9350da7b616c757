"""More are drawn than are expected to answer in time: ε is of all who are drawn, and the divisor is public."""

from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from tests.privacy.test_plan import LAYOUT, plan_of, settings_of

from sottovoce.base.errors import InputError
from sottovoce.export.recompute import recompute_epsilons
from sottovoce.federated.lateness import in_time
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.privacy.noise_shares import fewest_available, largest_cohort
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import over_selected
from sottovoce.privacy.planner import plan_run, resized
from sottovoce.privacy.settings import PrivacySettings

K, DRAWN, ANSWERS = 1000, 26, 20
STEPS, DELTA = 300, 1e-6


def plan() -> Plan:
    return plan_of(cohort_size=DRAWN, expected_answers=ANSWERS)


def test_everybody_is_drawn_with_the_drawn_rate_and_charged_for_it() -> None:
    sizes = [len(plan().sample(step)) for step in range(400)]
    spread = 6 * (DRAWN * (1 - DRAWN / K) / len(sizes)) ** 0.5  # six standard errors of the mean
    assert abs(np.mean(sizes) - DRAWN) < spread < DRAWN - ANSWERS
    assert plan().event == poisson_release(0.8, sampling_rate=DRAWN / K)


def test_sums_are_divided_by_the_public_number_expected() -> None:
    assert plan().denominator == ANSWERS
    assert plan().noise_std_mean == pytest.approx(0.8 * 0.5 / ANSWERS)
    assert plan().sigma_dp == pytest.approx(0.8 / ANSWERS)
    by_sigma = plan_of(cohort_size=DRAWN, expected_answers=ANSWERS, noise_multiplier=None, sigma_dp=0.8 / ANSWERS)
    assert by_sigma.settings.z == pytest.approx(0.8)


def test_epsilon_is_that_of_the_drawn_rate_by_ours_and_by_dp_accounting() -> None:
    """dp-accounting is told the drawn rate here by hand, not by our event."""
    ours = epsilon(repeated(plan().event, STEPS), DELTA)
    assert ours == plan_run(K, cohort_size=DRAWN, central_steps=STEPS, delta=DELTA, noise_multiplier=0.8).epsilon
    step = dp_accounting.PoissonSampledDpEvent(DRAWN / K, dp_accounting.GaussianDpEvent(0.8))
    by_rdp = RdpAccountant().compose(step, STEPS).get_epsilon(DELTA)
    by_pld = PLDAccountant().compose(step, STEPS).get_epsilon(DELTA)
    assert ours.rdp == pytest.approx(by_rdp, rel=0.02)  # other orders
    assert ours.pld == pytest.approx(by_pld, rel=0.01)  # another grid
    (found,) = recompute_epsilons(repeated(plan().event, STEPS), [DELTA])
    assert found.proves(ours.headline)
    small = epsilon(repeated(poisson_release(0.8, sampling_rate=ANSWERS / K), STEPS), DELTA)
    assert ours.headline > 1.1 * small.headline  # which the rate of the answers would have stated


def test_a_planned_run_says_what_the_plan_says() -> None:
    planned = plan_run(
        K, cohort_size=DRAWN, expected_answers=ANSWERS, central_steps=STEPS, delta=DELTA, sigma_dp=0.8 / ANSWERS
    )
    assert planned.noise_multiplier == pytest.approx(0.8)
    assert planned.sampling_rate == DRAWN / K
    assert planned.to_json()["expected_answers"] == ANSWERS
    with pytest.raises(InputError, match="cohorts of their own"):
        resized(planned, 2 * K, 2 * DRAWN)


def test_the_ledger_says_it_and_earlier_ledgers_are_as_they_were() -> None:
    assert plan().describe()["expected_answers"] == ANSWERS
    assert plan().ledger_header(run="a").event == plan().event
    assert "poisson q=0.026 (26 drawn for 20 answers)" in plan().guarantee
    assert "expected_answers" not in plan_of().describe()


def test_sums_must_be_large_enough_to_be_opened_also_where_the_others_are_late() -> None:
    """Whether a sum is opened must not hang on who was drawn, nor on who of them was fast."""
    large = replace(settings_of(cohort_size=260, expected_answers=200))
    assert Plan(large, LAYOUT).fewest_available(100) == fewest_available(100, sampling_rate=200 / K)
    assert Plan(large, LAYOUT).fewest_available(100) > Plan(settings_of(cohort_size=260), LAYOUT).fewest_available(100)
    assert largest_cohort(K, sampling_rate=0.26) > 260  # shares of noise are still made for all who may be drawn
    fixed = settings_of(cohort_size=260, expected_answers=200, sampling="fixed_size")
    assert Plan(fixed, LAYOUT).fewest_available(100) == K - 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_answers": 0}, "expected_answers=0: expected a whole number from 1 to cohort_size=20"),
        ({"expected_answers": 21}, "expected_answers=21: expected a whole number from 1 to cohort_size=20"),
        ({"expected_answers": 2.5}, "expected_answers=2.5: expected a whole number"),
        ({"expected_answers": 9, "denominator": 9.0}, "with denominator=9.0: expected one of them"),
        ({"expected_answers": 9, "weighting": "loss", "noise_multiplier": 0.0}, "divided by their own weights"),
    ],
)
def test_refusals_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings_of(**changes)


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), -1.0])
def test_no_fewer_are_drawn_than_are_wanted(factor: float) -> None:
    with pytest.raises(InputError, match="expected a factor of at least 1"):
        over_selected(10, factor=factor)


# Who is late in a simulation.


def simulated(**changes: Any) -> Plan:
    return Plan(
        PrivacySettings(**{**vars(settings_of(cohort_size=DRAWN, expected_answers=ANSWERS)), **changes}), LAYOUT
    )


@given(others=st.sets(st.integers(0, K - 1), max_size=40), one=st.integers(0, K - 1), step=st.integers(0, 9))
def test_nobody_s_coin_depends_on_who_else_was_drawn(others: set[int], one: int, step: int) -> None:
    """So one client moves a sum by their own update, whether they are late or not."""
    without = np.array(sorted(others - {one}), dtype=np.int64)
    cohort = np.array(sorted(others | {one}), dtype=np.int64)
    everybody = in_time(cohort, plan=simulated(), step=step)
    assert np.array_equal(everybody[cohort != one], in_time(without, plan=simulated(), step=step))


def test_as_many_are_in_time_as_are_expected_and_others_in_each_step() -> None:
    cohort = np.arange(K, dtype=np.int64)
    found = np.array([in_time(cohort, plan=simulated(), step=step) for step in range(50)])
    share = ANSWERS / DRAWN
    assert abs(found.mean() - share) < 6 * (share * (1 - share) / found.size) ** 0.5
    assert not np.array_equal(found[0], found[1])
    assert in_time(cohort, plan=simulated(expected_answers=None), step=0).all()
