"""What an ε means: words for its range, and bounds on guesses whether one person's data was used in training.

**The scale.** An ε says how far odds can move at worst: odds of 1 : 1 that somebody took part, to at most e^ε : 1. The
steps follow from that, and from what is usual (Ponomareva et al. 2023, "How to DP-fy ML": strong up to 1, reasonable up
to 10, weak above). Right guesses are those of one Gaussian release at δ = 1e-6, where a coin has 50; a report has a
run's own.

    strong           ε ≤ 1     odds become 2.8 : 1 at most, and 55 of 100 guesses are right: they stay guesses
    moderate         ε ≤ 8     2,981 : 1 and 78: nothing rules out any more that somebody is nearly sure about a few
    weak             ε ≤ 20    half a billion : 1 and 95: nor that they are sure about most
    next to nothing  ε > 20    such odds are enough to name one of a hundred million people

**Guesses.** Let P be what is released with the person and Q without. A guess is a set of outcomes in which one says
*yes*: it is right with probability P(yes) about those who are in, and wrong with α = Q(yes) about those who are not.
For every ε the events' own δ(ε) bounds both directions, P(yes) ≤ e^ε·Q(yes) + δ(ε) and Q(no) ≤ e^ε·P(no) + δ(ε), so

    found   of those who are in, by who says yes to α of the others: P(yes) is at most the least over ε of
            e^ε·α + δ(ε) and of 1 − e^−ε·(1 − α − δ(ε))
    right   of guesses about somebody who is in as often as not: ½·P(yes) + ½·Q(no) is at most the least over ε of
            (e^ε + δ(ε))/(1 + e^ε)

The sum of both directions gives the second (Kairouz, Oh, Viswanath 2015). At ε = 0 it is (1 + δ(0))/2, where δ(0) is
the total variation between P and Q: no guess does better, and the best one does as well. A single pair (ε, δ) says far
less: ε = 8 alone allows 99.97 right guesses in 100, a Gaussian mechanism with ε = 8 at δ = 10⁻⁶ no more than 77.8.

**Odds.** But for an event of probability δ, all that is released changes the odds by e^ε at most, whatever they were:
every (ε, δ)-private pair can be had from one that tells all with probability δ and otherwise flips a coin with odds e^ε
(the same paper, Theorem 3.3).
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


@dataclass(frozen=True)
class Strength:
    """A step of the scale: `words` for an ε up to `most`, and what it `means` in plain language."""

    words: str
    most: float
    means: str


STRONG = Strength("strong", 1.0, "whatever is published, whether you took part stays a guess")
MODERATE = Strength(
    "moderate", 8.0, "most guesses stay guesses; at worst somebody could be nearly sure about a few people"
)
WEAK = Strength("weak", 20.0, "at worst somebody could be sure about most people; ask what else protects you")
NEXT_TO_NOTHING = Strength("next to nothing", math.inf, "the number rules nothing out; ask what else protects you")
SCALE = (STRONG, MODERATE, WEAK, NEXT_TO_NOTHING)

GUARANTEE = MODERATE.most  # up to which a release is called one with a guarantee, and populations are extrapolated
NO_GUARANTEE = WEAK.most  # above which it must not be called one, however secure its randomness was

FALSE_ALARMS = 0.01  # the share of people outside the training data whom a guess is wrong about
_LARGEST_EPSILON = 600.0  # near e^709 float64 ends, and long before it a bound says nothing
_POINTS = 400


def strength_of(epsilon: float) -> Strength:
    """The step of the scale that ε is on.

    >>> [strength_of(epsilon).words for epsilon in (0.5, 1.0, 8.0, 8.01, 20.0, 3933.0)]
    ['strong', 'strong', 'moderate', 'weak', 'weak', 'next to nothing']
    """
    return next(step for step in SCALE if epsilon <= step.most)


@dataclass(frozen=True)
class MembershipOdds:
    """Upper bounds for anybody who guesses whether one person's data was used; 1.0 is every time.

    `right` of guesses about somebody who is in as often as not, where a coin is right half of the time. `found` of
    those who are in, by who is wrong about `FALSE_ALARMS` of the others.
    """

    right: float
    found: float


@lru_cache(maxsize=256)
def bound_membership_odds(event: Event) -> MembershipOdds:
    """What `event` allows anybody, whatever they know and however they compute.

    Guarantee: upper bounds, by whichever accountant is tighter; without a guarantee, both are 1.

    >>> from sottovoce.privacy.events import poisson_release
    >>> bound_membership_odds(poisson_release(1.0, sampling_rate=1.0)).right < 0.6916  # Φ(½) = 0.69146
    True
    """
    curve = event_curve(event).values
    if not np.isfinite(curve).any():
        return MembershipOdds(1.0, 1.0)
    epsilons = np.concatenate([[0.0], np.geomspace(1e-3, _LARGEST_EPSILON, _POINTS)])
    deltas = np.array([delta_of_curve(curve, epsilon=one)[0] for one in epsilons.tolist()])
    if (composed := compose_pld(event, cap=QUICK)).distribution is not None:
        deltas = np.minimum(deltas, composed.deltas(epsilons))
    return odds_of_profile(epsilons, deltas)


def odds_of_profile(epsilons: Values, deltas: Values, *, false_alarms: float = FALSE_ALARMS) -> MembershipOdds:
    """The same from pairs (ε, δ) that all hold.

    >>> one = odds_of_profile(np.array([math.log(3)]), np.array([0.0]))
    >>> round(one.right, 4), round(one.found, 4)
    (0.75, 0.03)
    """
    shrink = np.exp(-epsilons)
    right = (1 + deltas * shrink) / (1 + shrink)
    by_alarms = np.exp(epsilons) * false_alarms + deltas
    by_misses = 1 - shrink * (1 - false_alarms - deltas)
    found = min(1.0, by_alarms.min(), by_misses.min())
    return MembershipOdds(right=float(min(1.0, right.min())), found=float(found))


def posterior_belief(prior: float, *, epsilon: float) -> float:
    """The largest posterior probability of what was thought `prior` likely; but for a probability δ.

    >>> round(posterior_belief(0.5, epsilon=math.log(3)), 4), round(posterior_belief(0.01, epsilon=8.0), 3)
    (0.75, 0.968)
    """
    return prior / (prior + (1 - prior) * math.exp(-epsilon))
