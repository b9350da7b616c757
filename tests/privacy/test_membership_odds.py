"""What ε means for who guesses: held against what is known in closed form, and against sums over all outcomes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import (
    Composition,
    CorrelatedRelease,
    Event,
    NoGuarantee,
    composed,
    expand_rows,
    fixed_size_release,
    poisson_release,
    repeated,
)
from sottovoce.privacy.membership_odds import FALSE_ALARMS, bound_membership_odds, odds_of_profile, posterior_belief
from sottovoce.privacy.strategies import Banded


@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (2.0, 4), (5.0, 9), (0.5, 1), (50.0, 2000)])
def test_a_gaussian_mechanism_allows_what_its_closed_form_says(z: float, steps: int) -> None:
    """T steps without sampling are one, N(0, 1) against N(μ, 1) with μ = √T/z: the best test is a threshold."""
    mu = math.sqrt(steps) / z
    found = bound_membership_odds(repeated(poisson_release(z, sampling_rate=1.0), steps))
    assert found.right == pytest.approx(norm.cdf(mu / 2), abs=1e-6)
    best = norm.cdf(norm.ppf(FALSE_ALARMS) + mu)
    # From above; between two of the ε that are asked for it may lie a little higher.
    assert best - 1e-9 <= found.found <= best + 1e-3


@pytest.mark.parametrize(("z", "q", "steps"), [(1.0, 0.3, 1), (0.7, 0.5, 2), (1.5, 0.25, 2)])
def test_with_sampling_it_is_what_all_outcomes_add_up_to(z: float, q: float, steps: int) -> None:
    """The likelihoods of every outcome on a fine grid, in as many dimensions as there are steps."""
    width = 0.02
    x = np.arange(-8 * z, 1 + 8 * z, width)
    out = norm.pdf(x, 0, z) * width
    inside = (1 - q) * out + q * norm.pdf(x, 1, z) * width
    without, with_them = out, inside
    for _ in range(steps - 1):
        without, with_them = np.outer(without, out).ravel(), np.outer(with_them, inside).ravel()
    found = bound_membership_odds(repeated(poisson_release(z, sampling_rate=q), steps))
    assert found.right == pytest.approx(0.5 + 0.25 * np.abs(with_them - without).sum(), abs=1e-4)
    order = np.argsort(without / with_them)  # Neyman and Pearson: yes where it tells most
    alarms, hits = np.cumsum(without[order]), np.cumsum(with_them[order])
    best = float(np.interp(FALSE_ALARMS, alarms, hits))
    assert best - 1e-4 <= found.found <= best + 2e-3


def test_who_is_rarely_drawn_is_rarely_found_however_little_noise_there_is() -> None:
    """With no noise to speak of, whoever is drawn is seen: ½ + ½·(1 − (1 − q)^T), and ε tells nothing of that."""
    event = repeated(poisson_release(0.02, sampling_rate=1 / 6), 4)
    assert epsilon(event, 1e-3).headline > 1000
    assert bound_membership_odds(event).right == pytest.approx(0.5 + 0.5 * (1 - (5 / 6) ** 4), abs=1e-6)


@pytest.mark.parametrize("z", [0.003, 0.02])
def test_with_hardly_any_noise_and_many_rounds_everybody_is_found(z: float) -> None:
    found = bound_membership_odds(repeated(poisson_release(z, sampling_rate=0.03), 2006))
    assert found.right == pytest.approx(1)
    assert found.found == pytest.approx(1)


def test_without_a_guarantee_everything_is_allowed() -> None:
    events: tuple[Event, ...] = (
        NoGuarantee("no noise"),
        composed(poisson_release(1, sampling_rate=0.1), NoGuarantee("x")),
    )
    for event in events:
        assert (bound_membership_odds(event).right, bound_membership_odds(event).found) == (1.0, 1.0)


def test_nothing_released_is_a_coin() -> None:
    found = bound_membership_odds(repeated(poisson_release(1.0, sampling_rate=0.1), 0))
    assert found.right == pytest.approx(0.5, abs=1e-9)
    assert found.found == pytest.approx(FALSE_ALARMS, abs=1e-9)


def test_cohorts_of_fixed_size_are_bounded_by_rdp_alone() -> None:
    found = bound_membership_odds(repeated(fixed_size_release(20.0, cohort_size=10, population_size=1000), 10))
    assert 0.5 < found.right < 0.7


@pytest.mark.parametrize(("z", "q", "steps"), [(0.3, 0.01, 50), (0.5, 1.0, 7), (1.0, 0.2, 1), (5.0, 0.5, 40)])
def test_it_says_at_least_as_much_as_a_stated_pair(z: float, q: float, steps: int) -> None:
    """The mechanism's own bound is never above what its (ε, δ) says by itself."""
    event = repeated(poisson_release(z, sampling_rate=q), steps)
    stated = epsilon(event, 1e-5)
    alone = odds_of_profile(np.array([stated.headline]), np.array([1e-5]))
    found = bound_membership_odds(event)
    assert 0.5 <= found.right <= alone.right + 1e-6
    assert found.found + 1e-12 >= FALSE_ALARMS


def test_a_chain_of_correlated_noise_is_what_its_accounts_are() -> None:
    chain = CorrelatedRelease(2.0, 0.5, 3, Banded(column=(1.0, 0.75)))
    assert bound_membership_odds(repeated(chain, 7)) == bound_membership_odds(Composition(expand_rows(chain, 7)))


@given(st.floats(0, 30), st.floats(1e-6, 1 - 1e-6))
def test_belief_follows_from_odds(epsilon: float, prior: float) -> None:
    found = posterior_belief(prior, epsilon=epsilon)
    assert prior <= found + 1e-12
    # Beyond, few digits of 1 − found are left, and then none.
    assert found > 1 - 1e-9 or found / (1 - found) == pytest.approx(math.exp(epsilon) * prior / (1 - prior), rel=1e-6)
