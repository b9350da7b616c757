"""What ε means for somebody who guesses: was this person among those a model was trained on, or not?

Let P be what is released with the person and Q without. A guess is a set of outcomes in which one says *yes*: it is
right with probability P(yes) about those who are in, and wrong with α = Q(yes) about those who are not. For every ε the
events' own δ(ε) bounds both directions, P(yes) ≤ e^ε·Q(yes) + δ(ε) and Q(no) ≤ e^ε·P(no) + δ(ε), and so

    found   of those who are in, by who says yes to α of the others: P(yes) is at most the least over ε of
            e^ε·α + δ(ε) and of 1 − e^−ε·(1 − α − δ(ε))
    right   of guesses about somebody who is in as often as not: ½·P(yes) + ½·Q(no) is at most the least over ε of
            (e^ε + δ(ε))/(1 + e^ε)

The sum of both directions gives the second (Kairouz, Oh, Viswanath 2015). At ε = 0 it is (1 + δ(0))/2, where δ(0) is
the total variation between P and Q: no guess does better, and the best one does as well. A single pair (ε, δ) says far
less: ε = 8 alone allows 99.97 right guesses in 100, a Gaussian mechanism with ε = 8 at δ = 10⁻⁶ no more than 77.8.

Odds: but for an event of probability δ, all that is released changes the odds of the two by e^ε at most, whatever they
were: every (ε, δ)-private pair can be had from one that tells all with probability δ and otherwise flips a coin with
odds e^ε (the same paper, Theorem 3.3).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sottovoce.privacy.events import Event
from sottovoce.privacy.pld import QUICK, compose_pld
from sottovoce.privacy.rdp import delta_of_curve, event_curve

Values = NDArray[np.float64]

FALSE_ALARMS = 0.01  # who is wrong about one in a hundred of those who are not in it
# ε at which δ(ε) is asked for. Near e^709 float64 ends, and long before it a bound says nothing.
_LARGEST = 600.0
_POINTS = 400


@dataclass(frozen=True)
class Odds:
    """The most that anybody can do who tries to tell whether one person is in it; 1.0 is every time.

    `right` of guesses about somebody who is in as often as not, where a coin is right half of the time. `found` of
    those who are in, by who is wrong about `FALSE_ALARMS` of the others.
    """

    right: float
    found: float


@lru_cache(maxsize=256)
def odds(event: Event) -> Odds:
    """What `event` allows anybody, whatever they know and however they compute.

    Guarantee: upper bounds, by whichever accountant is tighter; without a guarantee, both are 1.

    >>> from sottovoce.privacy.events import poisson_release
    >>> odds(poisson_release(1.0, sampling_rate=1.0)).right < 0.6916  # Φ(½) = 0.69146
    True
    """
    curve = event_curve(event).values
    if not np.isfinite(curve).any():
        return Odds(1.0, 1.0)
    epsilons = np.concatenate([[0.0], np.geomspace(1e-3, _LARGEST, _POINTS)])
    deltas = np.array([delta_of_curve(curve, epsilon=one)[0] for one in epsilons.tolist()])
    if (composed := compose_pld(event, cap=QUICK)).distribution is not None:
        deltas = np.minimum(deltas, composed.deltas(epsilons))
    return odds_of_profile(epsilons, deltas)


def odds_of_profile(epsilons: Values, deltas: Values, *, false_alarms: float = FALSE_ALARMS) -> Odds:
    """The same from pairs (ε, δ) that all hold.

    >>> one = odds_of_profile(np.array([math.log(3)]), np.array([0.0]))
    >>> round(one.right, 4), round(one.found, 4)
    (0.75, 0.03)
    """
    shrink = np.exp(-epsilons)
    right = (1 + deltas * shrink) / (1 + shrink)
    by_alarms = np.exp(epsilons) * false_alarms + deltas
    by_misses = 1 - shrink * (1 - false_alarms - deltas)
    return Odds(
        right=float(min(1.0, right.min())),
        found=float(min(1.0, by_alarms.min(), by_misses.min())),
    )


def believed(prior: float, *, epsilon: float) -> float:
    """How likely somebody can come to think what they thought `prior` likely; but for a probability δ.

    >>> round(believed(0.5, epsilon=math.log(3)), 4), round(believed(0.01, epsilon=8.0), 3)
    (0.75, 0.968)
    """
    shrink = math.exp(-epsilon)
    return prior / (prior + (1 - prior) * shrink)
