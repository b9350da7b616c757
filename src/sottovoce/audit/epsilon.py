"""ε from the scores of canaries that took part and of those that did not: an estimate, and a proven lower bound.

Estimate: ε of two Gaussians fitted to the scores. It supposes that scores are Gaussian (Andrew et al. 2023).
Extrapolating two fitted variances to a tail of δ amplifies an error of a few per cent in either: at a true ε of 1 such
an estimate is nearly twice too large on average. So both groups share one variance unless their scores show otherwise.

Bound: how many canaries' coins can be guessed (Steinke, Nasr and Jagielski 2023). Each canary is in by a fair
coin. Whoever sees an (ε, δ)-private output guesses `made` of the `coins` coins and has `right` of them right no more
often than their Theorem 5.2 allows:

    P[right ≥ v] ≤ f(v) + 2·coins·δ·max_i (f(v − i) − f(v))/i,    f(v) = P[Binomial(made, e^ε/(1 + e^ε)) ≥ v]

Nothing is supposed of the scores: where the bound is above the promised ε, the promise is broken, but for one audit in
1/(1 − GUESS_LEVEL). It is far below the true ε: no such bound from one run comes near it.

Shapes: N canaries, V guesses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]

LEVEL = 0.98  # of an interval: one honest audit in a hundred gives a false alarm
_SAME_VARIANCE = 1e-3  # below this chance, scores with one variance would differ as much as these do
_LARGEST = 1e6  # beyond this, ε is called infinite
_LARGEST_BOUND = 64.0


@dataclass(frozen=True)
class EpsilonFit:
    """ε as estimated, and its interval. `effect` is how far apart the groups' means are, in standard deviations."""

    epsilon: float
    low: float
    high: float
    effect: float

    def as_json(self) -> dict[str, Any]:
        return {
            "epsilon": _number(self.epsilon),
            "interval": [_number(self.low), _number(self.high)],
            "level": LEVEL,
            "effect": _number(self.effect),
        }


def fit_epsilon(
    scores_in: Scores, scores_out: Scores, *, delta: float, dimension: float = math.inf, tests: int = 1
) -> EpsilonFit:
    """ε at δ of what these scores look like, with its interval: so wide that those of `tests` fits hold together.

    `dimension` is how many independent numbers of noise the scores were made of: where there are fewer of them than
    canaries, the spread of the scores is known only so well.
    """
    sizes = len(scores_in), len(scores_out)
    assert min(sizes) >= 2, "canaries in and out, two of each or more"
    gap = float(scores_in.mean() - scores_out.mean())
    own = float(scores_in.std(ddof=1)), float(scores_out.std(ddof=1))
    if max(own) == 0:  # nothing hides the difference, if there is one
        certain = math.inf if gap else 0.0
        return EpsilonFit(certain, certain, certain, certain)
    pooled = math.sqrt(((sizes[0] - 1) * own[0] ** 2 + (sizes[1] - 1) * own[1] ** 2) / (sum(sizes) - 2))
    reach = _reach(tests)
    if _one_variance(own, sizes):
        return _shared(gap, pooled, sizes, delta=delta, dimension=dimension, reach=reach)
    return _separate(gap, own, sizes, delta=delta, dimension=dimension, reach=reach)


def _one_variance(own: tuple[float, float], sizes: tuple[int, int]) -> bool:
    from scipy.stats import f

    if min(own) == 0:
        return False
    chance = float(f.cdf((own[0] / own[1]) ** 2, sizes[0] - 1, sizes[1] - 1))
    return 2 * min(chance, 1 - chance) >= _SAME_VARIANCE


def _shared(
    gap: float, deviation: float, sizes: tuple[int, int], *, delta: float, dimension: float, reach: float
) -> EpsilonFit:
    """ε of μ-Gaussian privacy; μ's error by the delta method: that of the means, and that of the spread."""
    effect = gap / deviation
    spread = (1 / (sum(sizes) - 2) + 1 / dimension) / 2
    error = reach * math.sqrt(1 / sizes[0] + 1 / sizes[1] + effect**2 * spread)
    low, high = (gaussian_epsilon(max(abs(effect) + side * error, 0.0), delta) for side in (-1, 1))
    return EpsilonFit(gaussian_epsilon(abs(effect), delta), low, high, effect)


def _separate(
    gap: float, own: tuple[float, float], sizes: tuple[int, int], *, delta: float, dimension: float, reach: float
) -> EpsilonFit:
    """ε of two Gaussians with variances of their own; its error by the delta method in all that was fitted."""
    floor = max(own) * 1e-9  # one group without any spread: as good as none
    deviations = max(own[0], floor), max(own[1], floor)

    def at(gap: float, log_in: float, log_out: float) -> float:
        return pair_epsilon(gap, math.exp(log_in), math.exp(log_out), delta)

    fitted = gap, math.log(deviations[0]), math.log(deviations[1])
    errors = (
        math.sqrt(deviations[0] ** 2 / sizes[0] + deviations[1] ** 2 / sizes[1]),
        *(math.sqrt((1 / (size - 1) + 1 / dimension) / 2) for size in sizes),
    )
    found = at(*fitted)
    error = reach * math.hypot(*(_change(at, fitted, which, errors[which]) for which in range(3)))
    effect = gap / math.sqrt((deviations[0] ** 2 + deviations[1] ** 2) / 2)
    return EpsilonFit(found, max(found - error, 0.0), found + error, effect)


def _change(at: Callable[..., float], fitted: tuple[float, ...], which: int, error: float) -> float:
    """How far ε moves with one standard error of one of the numbers fitted."""
    ends = [at(*(value + side * error * (index == which) for index, value in enumerate(fitted))) for side in (-1, 1)]
    if not all(map(math.isfinite, ends)):
        return math.inf
    return (ends[1] - ends[0]) / 2


def _reach(tests: int) -> float:
    """How many standard errors to either side."""
    from scipy.special import ndtri

    return float(-ndtri((1 - LEVEL) / (2 * tests)))


# ε of Gaussians.


def gaussian_epsilon(effect: float, delta: float) -> float:
    """ε at δ of telling N(0, 1) from N(μ, 1) (Balle and Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    return pair_epsilon(effect, 1.0, 1.0, delta)


def pair_epsilon(gap: float, deviation_in: float, deviation_out: float, delta: float) -> float:
    """The least ε at which N(gap, σ_in²) and N(0, σ_out²) are (ε, δ)-close, both ways."""

    def excess(epsilon: float) -> float:
        one_way = pair_delta(gap, deviation_in, deviation_out, epsilon)
        return max(one_way, pair_delta(gap, deviation_out, deviation_in, epsilon)) - delta

    return _zero_of(excess, largest=_LARGEST, tolerance=1e-9)


def _zero_of(falling: Callable[[float], float], *, largest: float, tolerance: float) -> float:
    """Where a falling function reaches zero: 0 where it starts there, infinity where that is beyond `largest`."""
    from scipy.optimize import brentq

    if falling(0.0) <= 0:
        return 0.0
    most = 1.0
    while falling(most) > 0:
        most *= 2
        if most > largest:
            return math.inf
    return float(brentq(falling, 0.0, most, xtol=tolerance))


def pair_delta(gap: float, first: float, second: float, epsilon: float) -> float:
    """sup over events of P(E) − e^ε·Q(E) for P = N(gap, first²) and Q = N(0, second²): where log p/q exceeds ε.

    That is where a quadratic in x is positive: a half-line, two of them, or what lies between two roots.
    """
    from scipy.special import log_ndtr, ndtr

    a = (1 / second**2 - 1 / first**2) / 2
    b = gap / first**2
    c = math.log(second / first) - gap**2 / (2 * first**2) - epsilon

    def over(p: float, log_q: float) -> float:
        """P(E) − e^ε·Q(E), where the second is given by its logarithm: e^ε alone may be too large."""
        return p - math.exp(min(epsilon + log_q, 700.0))

    def above(x: float) -> float:
        return over(float(ndtr((gap - x) / first)), float(log_ndtr(-x / second)))

    def below(x: float) -> float:
        return over(float(ndtr((x - gap) / first)), float(log_ndtr(x / second)))

    if a == 0:
        if b == 0:
            return max(-math.expm1(epsilon), 0.0) if c > 0 else 0.0
        return max(above(-c / b) if b > 0 else below(-c / b), 0.0)
    under = b * b - 4 * a * c
    if under <= 0:
        return 0.0 if a < 0 else 1 - math.exp(min(epsilon, 700.0))
    # The root that does not cancel, and the other one by their product.
    far = -(b + math.copysign(math.sqrt(under), b)) / 2
    low, high = sorted((far / a, c / far if far else -far / a))
    if a > 0:
        return max(below(low), 0.0) + max(above(high), 0.0)
    inside = float(ndtr((high - gap) / first) - ndtr((low - gap) / first))
    outside = float(ndtr(high / second) - ndtr(low / second))
    return max(inside - math.exp(min(epsilon, 700.0)) * outside, 0.0)


def _number(value: float) -> float | None:
    """Infinity is not JSON."""
    return value if math.isfinite(value) else None


GUESS_LEVEL = 0.95
# Shares of the canaries that are guessed, fixed beforehand. All are tried, and pay for it (Bonferroni).
SHARES = (0.02, 0.05, 0.1, 0.25, 0.5)


@dataclass(frozen=True)
class GuessBound:
    """ε is at least `epsilon`: of `made` guesses, `right` were right."""

    epsilon: float
    made: int
    right: int

    def as_json(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon, "guesses": self.made, "right": self.right, "level": GUESS_LEVEL}


def bound_epsilon(scores: Scores, is_in: NDArray[np.bool_], *, delta: float) -> GuessBound:
    """The best lower bound: `scores` are functions of what was released and of nothing else, coins included.

    The highest scores are guessed to be in, the lowest out, as many of each.
    """
    order = np.argsort(scores, kind="stable")
    found = []
    for share in SHARES:
        half = max(1, round(share * len(scores) / 2))
        right = int(is_in[order[-half:]].sum() + (~is_in[order[:half]]).sum())
        found.append(GuessBound(_largest_refuted(len(scores), 2 * half, right, delta=delta), 2 * half, right))
    return max(found, key=lambda bound: bound.epsilon)


def _largest_refuted(coins: int, made: int, right: int, *, delta: float) -> float:
    """The largest ε at which so many right guesses are too many to be chance."""
    chance = (1 - GUESS_LEVEL) / len(SHARES)
    found = _zero_of(
        lambda epsilon: chance - chance_of(coins, made, right, epsilon=epsilon, delta=delta),
        largest=_LARGEST_BOUND,
        tolerance=1e-6,
    )
    return min(found, 2 * _LARGEST_BOUND)  # everything was guessed right: no more guesses, no larger bound


def chance_of(coins: int, made: int, right: int, *, epsilon: float, delta: float) -> float:
    """At most the probability of as many right guesses of an (ε, δ)-private output, or more.

    >>> round(chance_of(100, 20, 20, epsilon=0.0, delta=0.0) * 2**20, 6)
    1.0
    """
    from scipy.stats import binom

    least = right - np.arange(right + 1)
    at_least_V = binom.sf(least - 1, made, 1 / (1 + math.exp(-epsilon)))
    gained = 0.0 if right == 0 else float(((at_least_V[1:] - at_least_V[0]) / np.arange(1, right + 1)).max())
    return min(float(at_least_V[0]) + 2 * coins * delta * gained, 1.0)
