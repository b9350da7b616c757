"""The estimate: ε of two Gaussians is what integrals say, and fitted to scores it is right on average and in range.

The lower bound: never above what is true, and above zero where there is something to guess."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from sottovoce.audit.epsilon import (
    LEVEL,
    bound_epsilon,
    chance_of,
    fit_epsilon,
    gaussian_epsilon,
    pair_delta,
    pair_epsilon,
)

DELTA = 1e-6


@pytest.mark.parametrize(
    ("gap", "first", "second", "epsilon"),
    [(1.0, 1.0, 1.0, 0.5), (-1.0, 1.0, 1.0, 0.5), (0.7, 1.3, 1.0, 1.0), (0.7, 1.0, 1.3, 0.2), (0.0, 2.0, 1.0, 0.3)],
)
def test_delta_of_a_pair_is_its_integral(gap: float, first: float, second: float, epsilon: float) -> None:
    def excess(x: float) -> float:
        return max(norm.pdf(x, gap, first) - math.exp(epsilon) * norm.pdf(x, 0.0, second), 0.0)

    expected, error = quad(excess, -15, 15, limit=400, points=[-1.0, 0.0, 1.0])
    assert pair_delta(gap, first, second, epsilon) == pytest.approx(expected, abs=max(1e-7, 10 * error))


def test_epsilon_of_one_gaussian_step_is_the_accountants() -> None:
    """z = 1/μ: the Gaussian mechanism, whose ε the ledger knows by PLD."""
    from sottovoce.privacy.accounting import poisson_epsilon

    for multiplier in (4.0, 1.0, 0.5):
        known = poisson_epsilon(multiplier, sampling_rate=1.0, central_steps=1, delta=DELTA).pld
        assert gaussian_epsilon(1 / multiplier, DELTA) == pytest.approx(known, rel=2e-3)


def test_the_worse_of_both_directions_counts() -> None:
    assert pair_epsilon(0.5, 1.0, 1.4, DELTA) == pytest.approx(pair_epsilon(-0.5, 1.4, 1.0, DELTA))
    assert pair_epsilon(0.0, 1.4, 1.0, DELTA) > 5  # same means: the wider one shows in its tails
    assert pair_epsilon(0.0, 1.0, 1.0, DELTA) == 0.0


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 8.0])
def test_an_estimate_is_right_on_average_and_its_interval_holds_the_truth(epsilon: float) -> None:
    """200 draws of ideal scores: the mean within four standard errors and a tenth, the interval as often as it says."""
    effect = brentq(lambda one: gaussian_epsilon(one, DELTA) - epsilon, 1e-3, 10.0)
    drawn, runs = np.random.default_rng(5), 200
    fits = []
    for _ in range(runs):
        scores_in, scores_out = drawn.normal(effect, 1.0, 500), drawn.normal(0.0, 1.0, 500)
        fits.append(fit_epsilon(scores_in, scores_out, delta=DELTA))
    estimates = np.array([fit.epsilon for fit in fits])
    assert estimates.mean() == pytest.approx(epsilon, abs=4 * estimates.std() / math.sqrt(runs) + 0.05 * epsilon)
    held = sum(fit.low <= epsilon <= fit.high for fit in fits)
    assert held >= runs * LEVEL - 4 * math.sqrt(runs * LEVEL * (1 - LEVEL))


def test_variances_that_really_differ_are_kept_apart() -> None:
    drawn = np.random.default_rng(6)
    fit = fit_epsilon(drawn.normal(0.0, 2.0, 2000), drawn.normal(0.0, 1.0, 2000), delta=DELTA)
    assert fit.low < pair_epsilon(0.0, 2.0, 1.0, DELTA) < fit.high
    assert fit.low > 5


def test_scores_of_few_numbers_have_a_wide_interval() -> None:
    drawn = np.random.default_rng(7)
    scores_in, scores_out = drawn.normal(3.0, 1.0, 500), drawn.normal(0.0, 1.0, 500)
    many, few = (fit_epsilon(scores_in, scores_out, delta=DELTA, dimension=d) for d in (math.inf, 10.0))
    assert few.epsilon == many.epsilon
    assert few.high - few.low > 3 * (many.high - many.low)


def test_where_nothing_hides_the_difference() -> None:
    certain = fit_epsilon(np.ones(5), np.zeros(5), delta=DELTA)
    assert certain.epsilon == certain.low == math.inf
    assert certain.as_json()["epsilon"] is None
    assert fit_epsilon(np.ones(5), np.ones(5), delta=DELTA).epsilon == 0.0
    mixed = fit_epsilon(np.ones(50), np.random.default_rng(8).normal(size=50), delta=DELTA)
    assert mixed.epsilon > 100


DELTA = 1e-6


def test_guesses_of_randomised_response_are_as_often_right_as_allowed() -> None:
    """The output that tells most at ε: each coin, turned round with probability 1/(1 + e^ε)."""
    epsilon, coins, made = 1.0, 50, 50
    drawn = np.random.default_rng(1)
    right = drawn.binomial(made, 1 / (1 + math.exp(-epsilon)), size=20_000)
    for least in (35, 38, 42):
        seen = float((right >= least).mean())
        allowed = chance_of(coins, made, least, epsilon=epsilon, delta=0.0)
        assert seen == pytest.approx(allowed, abs=4 * math.sqrt(allowed / len(right)))


def test_delta_only_adds_and_fewer_right_guesses_are_likelier() -> None:
    for right in range(11):
        assert chance_of(20, 10, right, epsilon=0.5, delta=1e-3) >= chance_of(20, 10, right, epsilon=0.5, delta=0.0)
    chances = [chance_of(20, 10, right, epsilon=0.5, delta=0.0) for right in range(11)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == 1.0


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 8.0])
def test_the_bound_of_ideal_scores_is_never_above_the_truth(epsilon: float) -> None:
    effect = brentq(lambda one: gaussian_epsilon(one, DELTA) - epsilon, 1e-3, 10.0)
    drawn = np.random.default_rng(3)
    bounds = []
    for _ in range(30):
        is_in = drawn.random(1000) < 0.5
        bounds.append(bound_epsilon(drawn.normal(size=1000) + effect * is_in, is_in, delta=DELTA).epsilon)
    assert max(bounds) <= epsilon
    assert np.mean(bounds) > epsilon / 10


def test_what_is_guessed_without_error_is_bounded_by_the_number_of_guesses() -> None:
    is_in = np.arange(1000) % 2 == 0
    found = bound_epsilon(is_in.astype(float), is_in, delta=DELTA)
    assert (found.right, found.made) == (500, 500)
    assert found.epsilon > 4
    assert bound_epsilon(np.zeros(1000), is_in, delta=DELTA).epsilon < 1
