"""Sampling: every user's chance, on its own and together with another's, and what the samplers refuse."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.privacy.sampling import (
    CyclicSampler,
    FixedSizeSampler,
    PoissonSampler,
    Words,
    _below,
    bounded_weight,
)


def words_of(step: int, root: int = 5) -> Words:
    raw = stream(root, "cohort", step).bit_generator.random_raw
    return lambda count: raw(count)


def membership(sampler: PoissonSampler | FixedSizeSampler, population_size: int, rounds: int) -> np.ndarray:
    """[rounds, users] of 0 and 1."""
    member = np.zeros((rounds, population_size))
    for step in range(rounds):
        member[step, sampler.sample(population_size, words=words_of(step))] = 1
    return member


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.97])
def test_poisson_includes_each_user_alone_with_the_rate(rate: float) -> None:
    rounds, users = 4000, 40
    member = membership(PoissonSampler(sampling_rate=rate), users, rounds)
    error = math.sqrt(rate * (1 - rate) / rounds)
    assert np.abs(member.mean(0) - rate).max() < 5 * error + 1e-12
    # Independent users and rounds: the cohort size is binomial, neighbours in place and time are uncorrelated.
    sizes = member.sum(1)
    assert sizes.mean() == pytest.approx(users * rate, abs=5 * math.sqrt(users) * error)
    variance = users * rate * (1 - rate)
    assert sizes.var() == pytest.approx(variance, rel=5 * math.sqrt((2 + 1 / variance) / rounds))
    centred = member - rate
    scale = rate * (1 - rate) * math.sqrt(rounds * users)
    assert abs((centred[:, 1:] * centred[:, :-1]).sum()) < 5 * scale
    assert abs((centred[1:] * centred[:-1]).sum()) < 5 * scale


def test_every_fixed_size_cohort_is_equally_likely() -> None:
    for users, size in ((6, 2), (6, 4), (5, 5)):
        pairs = dict.fromkeys(combinations(range(users), size), 0)
        for step in range(3000):
            pairs[tuple(FixedSizeSampler(cohort_size=size).sample(users, words=words_of(step)).tolist())] += 1
        if len(pairs) > 1:
            assert stats.chisquare(list(pairs.values())).pvalue > 1e-5


@given(st.integers(1, 5000), st.floats(1e-9, 1.0), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_cohorts_are_sets_of_users_and_repeat_with_the_seed(users: int, rate: float, step: int) -> None:
    fixed = FixedSizeSampler(cohort_size=max(1, int(users * rate)))
    for sampler in (PoissonSampler(sampling_rate=rate), fixed):
        cohort = sampler.sample(users, words=words_of(step))
        assert np.array_equal(cohort, np.unique(cohort))
        assert len(cohort) == 0 or (cohort[0] >= 0 and cohort[-1] < users)
        assert np.array_equal(cohort, sampler.sample(users, words=words_of(step)))
    assert len(cohort) == fixed.cohort_size


def test_a_large_population_costs_only_its_cohort() -> None:
    asked = 0

    def counting(count: int) -> np.ndarray:
        nonlocal asked
        asked += count
        return words_of(0)(count)

    cohort = PoissonSampler(sampling_rate=204_800 / 70_000_000).sample(70_000_000, words=counting)
    assert len(cohort) == pytest.approx(204_800, abs=5 * math.sqrt(204_800))
    assert asked < 250_000


def test_remainders_favour_nobody() -> None:
    # 2⁶⁴ mod 3 = 1: the one word left over must be drawn again.
    assert _below(3, 2, lambda count: np.array([2**64 - 1, 2**64 - 2], dtype=np.uint64)).tolist() == [2]


def test_rate_one_takes_everybody() -> None:
    assert PoissonSampler(sampling_rate=1.0).sample(4, words=words_of(0)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rate", [0.0, 1.01, -1.0, math.nan])
def test_rates_that_are_no_probability(rate: float) -> None:
    with pytest.raises(InputError, match="sampling_rate="):
        PoissonSampler(sampling_rate=rate)


@given(users=st.integers(1, 300), cycle=st.integers(1, 40), rate=st.floats(0.05, 1.0))
@settings(max_examples=60)
def test_groups_take_turns_and_everybody_is_in_one(users: int, cycle: int, rate: float) -> None:
    whole, some = CyclicSampler(cycle=cycle, sampling_rate=1.0), CyclicSampler(cycle=cycle, sampling_rate=rate)
    groups = [whole.sample(users, row=row, words=words_of(row)) for row in range(cycle)]
    assert sorted(np.concatenate(groups).tolist()) == [*range(users)]
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    for row in range(2 * cycle):
        cohort = some.sample(users, row=row, words=words_of(row))
        assert np.array_equal(cohort, np.unique(cohort))
        assert set(cohort.tolist()) <= set(groups[row % cycle].tolist())


def test_a_group_is_drawn_from_as_a_population_is() -> None:
    """Each member alone, with the rate: the coins are those of Poisson sampling."""
    rounds, users, cycle, rate = 4000, 40, 4, 0.3
    sampler, member = CyclicSampler(cycle=cycle, sampling_rate=rate), np.zeros((rounds, users))
    for row in range(rounds):
        member[row, sampler.sample(users, row=row, words=words_of(row))] = 1
    error = math.sqrt(rate * (1 - rate) / (rounds / cycle))
    assert np.abs(member.mean(0) * cycle - rate).max() < 5 * error
    rows, people = np.nonzero(member)
    for user in range(users):
        own = rows[people == user]
        assert set((own % cycle).tolist()) == {int(own[0]) % cycle}


def test_one_group_is_poisson_sampling() -> None:
    alone, everybody = CyclicSampler(cycle=1, sampling_rate=0.2), PoissonSampler(sampling_rate=0.2)
    for row in range(5):
        cohort = alone.sample(50, row=row, words=words_of(row))
        assert np.array_equal(cohort, everybody.sample(50, words=words_of(row)))


def test_cyclic_refusals() -> None:
    with pytest.raises(InputError, match="cycle=0"):
        CyclicSampler(cycle=0, sampling_rate=1.0)
    with pytest.raises(InputError, match="sampling_rate="):
        CyclicSampler(cycle=2, sampling_rate=1.2)


def test_fixed_size_refusals() -> None:
    with pytest.raises(InputError, match="cohort_size=0"):
        FixedSizeSampler(cohort_size=0)
    with pytest.raises(InputError, match="exceeds population_size=3"):
        FixedSizeSampler(cohort_size=4).sample(3, words=words_of(0))


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(1e-300, 1e300))
def test_weights_are_bounded_whatever_the_data(amount: float, cap: float) -> None:
    assert 0 <= bounded_weight(amount, cap=cap) <= 1


def test_weight_refuses_a_cap_that_is_none() -> None:
    with pytest.raises(InputError, match="weight cap=0"):
        bounded_weight(1, cap=0)
