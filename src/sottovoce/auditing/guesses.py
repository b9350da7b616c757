"""The proof: a lower bound on ε from how many canaries' coins can be guessed (Steinke, Nasr and Jagielski 2023).

Each canary is in by a fair coin of its own. Whoever sees an (ε, δ)-private output guesses `made` of the `coins` coins
and has `right` of them right no more often than their Theorem 5.2 allows:

    P[right ≥ v] ≤ f(v) + 2·coins·δ·max_i (f(v − i) − f(v))/i,    f(v) = P[Binomial(made, e^ε/(1 + e^ε)) ≥ v]

Nothing is supposed of the scores: where the bound is above what was promised, the promise is broken, but for one audit
in 1/(1 − LEVEL). It is far below what is true: no such bound from one run comes near it.

Shapes: N canaries, V guesses.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.auditing.gaussian_fit import Scores

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
    from scipy.optimize import brentq

    chance = (1 - GUESS_LEVEL) / len(SHARES)

    def excess(epsilon: float) -> float:
        return chance_of(coins, made, right, epsilon=epsilon, delta=delta) - chance

    if excess(0.0) >= 0:
        return 0.0
    most = 1.0
    while excess(most) < 0:
        most *= 2
        if most > 64:  # everything was guessed right, over and over: no more guesses, no larger bound
            return most
    return float(brentq(excess, 0.0, most, xtol=1e-6))


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
