"""The lower bound: never above what is true, and above zero where there is something to guess."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from sottovoce.auditing.gaussian_fit import gaussian_epsilon
from sottovoce.auditing.guesses import bound_epsilon, chance_of

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
