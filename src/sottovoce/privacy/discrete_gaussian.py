"""The discrete Gaussian, drawn exactly: integers x with probability proportional to exp(−x²/2σ²).

Canonne, Kamath and Steinke (2020) draw it one number at a time from coins that are exact. Here are the same two ideas,
rejection and coins of exact bias, a vector at a time:

* |x| = k·w + r: a strip k of w integers is drawn from a table of weights, whole numbers that sum to 2⁶⁴, and r
  uniformly within it; both signs, but zero only once;
* x is accepted with probability ρ_k·exp(−r·(2kw + r)/2σ²). ρ_k, near 1, makes up for the rounding of the table's
  weights, so that what is accepted has the distribution above, and no other;
* a coin of bias a is a uniform number compared with a. Its first bits decide, unless they lie so near to a that the
  rounding of float64 could matter (2⁻⁴⁵; its exponential is good to 2⁻⁵⁰). Then more bits are drawn and compared
  with a in as many decimal places as it takes.

What is cut off is the mass beyond 40σ, below e⁻⁸⁰⁰. How often a draw is rejected depends on chance alone, never on the
data.
"""

import math
from decimal import Context, Decimal
from fractions import Fraction
from functools import cached_property, reduce
from typing import final

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.privacy.randomness import SecureRandom

_REACH = 40  # standard deviations
_STRIPS_PER_STD = 8  # at least
_LARGEST_STD = 2.0**26  # beyond, r·(2kw + r) would not be exact in float64
_COIN_BITS = 52  # at most
_DOUBT = 2.0**-45
_CHUNK = 1 << 15  # candidates at once: they stay in the cache
_GUIDE_BITS = 16


@final
class DiscreteGaussian:
    """Draws from the discrete Gaussian of one variance; its table takes some hundredths of a second.

    >>> drawn = DiscreteGaussian(variance=100.0).draw(10_000, random=SecureRandom())
    >>> bool(abs(drawn.std() - 10) < 1)
    True
    """

    def __init__(self, *, variance: float) -> None:
        if not 1 <= variance <= _LARGEST_STD**2:
            raise InputError(f"variance={variance}: expected a number from 1 to {_LARGEST_STD**2:g}")
        std = math.sqrt(variance)
        self._variance = variance
        self._offset_bits = max(0, math.floor(math.log2(std / _STRIPS_PER_STD)))
        self._width = 1 << self._offset_bits
        self._coin_bits = min(_COIN_BITS, 63 - self._offset_bits)
        self._weights = self._strip_weights(math.ceil(_REACH * std / self._width))
        self._ends = np.cumsum(np.array(self._weights[:-1], dtype=np.uint64))
        corrections = [self._correction(k, _context(40)) for k in range(len(self._weights))]
        check_invariant(min(self._weights) > 0 and max(corrections) <= 1, "a strip with too few words for its integers")
        self._corrections = np.array(corrections, dtype=np.float64)

    def _strip_weights(self, strips: int) -> list[int]:
        """Of 2⁶⁴ words, how many stand for each strip: its share by its first integer, rounded up but for the first."""
        context = _context(40)
        heights = [_exp_of(Fraction(-((k * self._width) ** 2)) / self._double_variance, context) for k in range(strips)]
        scale = context.divide(Decimal(2**64), reduce(context.add, heights))
        weights = [math.ceil(context.multiply(height, scale)) for height in heights]
        return [2**64 - sum(weights[1:]), *weights[1:]]

    @cached_property
    def _double_variance(self) -> Fraction:
        return 2 * Fraction(self._variance)

    def _correction(self, strip: int, context: Context) -> Decimal:
        """ρ_k: how much too heavy strip k is beside strip 0; at most 1, as all weights but that one are rounded up."""
        height = _exp_of(Fraction(-((strip * self._width) ** 2)) / self._double_variance, context)
        return context.divide(context.multiply(Decimal(self._weights[0]), height), Decimal(self._weights[strip]))

    @cached_property
    def _guide(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """By a word's first bits: its strip, and whether its other bits matter."""
        first = np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(64 - _GUIDE_BITS)
        last = first + np.uint64(2 ** (64 - _GUIDE_BITS) - 1)
        low, high = (np.searchsorted(self._ends, words, side="right") for words in (first, last))
        return low, low != high

    def draw(self, count: int, *, random: SecureRandom) -> NDArray[np.int64]:
        """`count` independent draws."""
        drawn = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            accepted = self._candidates(min(_CHUNK, (count - done) * 9 // 8 + 16), random)[: count - done]
            drawn[done : done + len(accepted)] = accepted
            done += len(accepted)
        return drawn

    def _candidates(self, count: int, random: SecureRandom) -> NDArray[np.int64]:
        words = random.words(2 * count)
        strips, rest = self._strips(words[:count]), words[count:]
        offsets = (rest & np.uint64(self._width - 1)).view(np.int64)
        coins = ((rest >> np.uint64(self._offset_bits)) & np.uint64(2**self._coin_bits - 1)).view(np.int64)
        starts = strips << self._offset_bits
        falls = (offsets * (2 * starts + offsets)).astype(np.float64)
        falls *= -0.5 / self._variance
        chances = np.exp(falls, out=falls)
        chances *= self._corrections[strips]
        chances *= 2.0**self._coin_bits
        above = chances - coins
        accepted = above > 0
        for i in np.flatnonzero(np.abs(above) <= 1 + _DOUBT * 2.0**self._coin_bits):
            accepted[i] = self._exact_coin(int(strips[i]), int(offsets[i]), int(coins[i]), random)
        values = starts + offsets
        negative = rest >> np.uint64(63) == 1
        accepted &= ~(negative & (values == 0))
        return np.where(negative, -values, values)[accepted]

    def _strips(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        strip_of, unsure_of = self._guide
        first = (words >> np.uint64(64 - _GUIDE_BITS)).view(np.int64)
        strips = strip_of[first]
        unsure = np.flatnonzero(unsure_of[first])
        strips[unsure] = np.searchsorted(self._ends, words[unsure], side="right")
        return strips

    def _exact_coin(self, strip: int, offset: int, coin: int, random: SecureRandom) -> bool:
        """Whether the uniform number that begins with `coin` is below the chance of this candidate."""
        bits, digits = self._coin_bits, 40
        while True:
            coin, bits, digits = coin << 64 | int(random.words(1)[0]), bits + 64, digits + 20
            context = _context(digits)
            fall = Fraction(-offset * (2 * strip * self._width + offset)) / self._double_variance
            chance = context.multiply(self._correction(strip, context), _exp_of(fall, context))
            bound = int(_context(digits + 20).multiply(chance, Decimal(2**bits)))
            if abs(coin - bound) > 1 + 2**bits // 10 ** (digits - 5):  # beyond what the digits leave open
                return coin < bound


def _context(digits: int) -> Context:
    return Context(prec=digits, Emin=-(10**6), Emax=10**6)


def _exp_of(exponent: Fraction, context: Context) -> Decimal:
    """exp of a fraction to some fewer digits than `context` has: decimal's own exponential is correctly rounded."""
    quotient = context.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return context.exp(quotient)
