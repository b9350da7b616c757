"""Discrete Gaussians have the probabilities of their definition, coin by coin and integer by integer."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from sottovoce.base.errors import InputError
from sottovoce.privacy import discrete_gaussian
from sottovoce.privacy.discrete_gaussian import DiscreteGaussian, _context, _exp_of

VARIANCES = [1.0, 6.25, 80.5, 1024.0, 70000.1**2]


class Seeded:
    """Words that repeat, for tests."""

    def __init__(self, seed: int) -> None:
        self._raw = np.random.PCG64(seed)

    def words(self, count: int) -> NDArray[np.uint64]:
        return self._raw.random_raw(count)


@pytest.mark.parametrize("variance", VARIANCES)
def test_what_is_proposed_and_accepted_is_the_definition_to_35_digits(variance: float) -> None:
    """weight of the strip / w · chance of acceptance is proportional to exp(−x²/2σ²), for integers of every strip."""
    source, context = DiscreteGaussian(variance=variance), _context(40)
    width, strips = source._width, len(source._weights)
    assert sum(source._weights) == 2**64
    ratios = []
    for strip in range(strips):
        for offset in {0, width // 3, width - 1}:
            fall = Fraction(-offset * (2 * strip * width + offset)) / (2 * Fraction(variance))
            chance = context.multiply(source._correction(strip, context), _exp_of(fall, context))
            wanted = _exp_of(Fraction(-((strip * width + offset) ** 2)) / (2 * Fraction(variance)), context)
            ratios.append(context.divide(context.multiply(Decimal(source._weights[strip]), chance), wanted))
            assert chance <= 1
    assert max(ratios) / min(ratios) - 1 < Decimal("1e-35")


@pytest.mark.parametrize("variance", VARIANCES)
def test_float64_decides_as_exact_arithmetic_does(variance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same candidates, once with nobody in doubt and once with everybody: the same are accepted."""
    source = DiscreteGaussian(variance=variance)
    quick = source._candidates(300, Seeded(3))  # type: ignore[arg-type]
    monkeypatch.setattr(discrete_gaussian, "_DOUBT", 2.0)
    asked = []
    exact_coin = DiscreteGaussian._exact_coin
    monkeypatch.setattr(DiscreteGaussian, "_exact_coin", lambda *args: asked.append(1) or exact_coin(*args))
    careful = source._candidates(300, Seeded(3))  # type: ignore[arg-type]
    assert len(asked) == 300
    assert np.array_equal(quick, careful)


def test_a_coin_that_its_first_bits_leave_open_is_decided_by_the_next_ones() -> None:
    """Where the chance is 1 (the first integer) any coin is below it; where it is not, the extra bits decide."""
    source = DiscreteGaussian(variance=80.5)

    class Fixed:
        def __init__(self, word: int) -> None:
            self.word = word

        def words(self, count: int) -> NDArray[np.uint64]:
            return np.full(count, self.word, dtype=np.uint64)

    top = 2**source._coin_bits - 1
    assert source._exact_coin(0, 0, top, Fixed(2**63))  # type: ignore[arg-type]
    context = _context(60)
    chance = context.multiply(source._correction(9, context), _exp_of(Fraction(0), context))
    first = int(context.multiply(chance, Decimal(2**source._coin_bits)))
    assert source._exact_coin(9, 0, first, Fixed(0))  # type: ignore[arg-type]
    assert not source._exact_coin(9, 0, first, Fixed(2**64 - 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("variance", [1.0, 6.25, 80.5])
def test_draws_follow_the_definition(variance: float) -> None:
    drawn = DiscreteGaussian(variance=variance).draw(400_000, random=Seeded(5))  # type: ignore[arg-type]
    reach = int(3 * variance**0.5)
    x = np.arange(-40 * reach, 40 * reach + 1)
    mass = np.exp(-(x**2) / (2 * variance))
    mass /= mass.sum()
    inner = np.abs(x) <= reach
    counts = np.bincount(np.clip(drawn, -reach - 1, reach + 1) + reach + 1, minlength=2 * reach + 3)
    expected = np.concatenate([[mass[x < -reach].sum()], mass[inner], [mass[x > reach].sum()]]) * len(drawn)
    assert stats.chisquare(counts, expected).pvalue > 2 * stats.norm.sf(5)


def test_wide_ones_are_fair_in_every_low_bit() -> None:
    drawn = DiscreteGaussian(variance=70000.1**2).draw(1_000_000, random=Seeded(6))  # type: ignore[arg-type]
    for bit in range(8):
        assert abs(np.sum(drawn >> bit & 1) - 500_000) < 5 * 500  # five standard deviations
    assert abs(drawn.std() / 70000.1 - 1) < 5 / (2_000_000) ** 0.5


@pytest.mark.parametrize("variance", [0.0, 0.5, -1.0, float("nan"), float("inf"), 2.0**60])
def test_variances_that_float64_cannot_serve_are_refused(variance: float) -> None:
    with pytest.raises(InputError, match="variance="):
        DiscreteGaussian(variance=variance)
