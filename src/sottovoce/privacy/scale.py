"""One scale of ε, for whoever signs, whoever takes part and whoever trains: which words go with which numbers.

An ε says how far odds can move at worst: those of 1 : 1, that somebody took part, to at most e^ε : 1. The steps follow
from that, and from what is usual (Ponomareva et al. 2023, "How to DP-fy ML": strong up to 1, reasonable up to 10, weak
above). Right guesses are those of one Gaussian release at δ = 1e-6, where a coin has 50; a report has a run's own.

    strong           ε ≤ 1     odds become 2.8 : 1 at most, and 55 of 100 guesses are right: they stay guesses
    moderate         ε ≤ 8     2,981 : 1 and 78: nothing rules out any more that somebody is nearly sure about a few
    weak             ε ≤ 20    half a billion : 1 and 95: nor that they are sure about most
    next to nothing  ε > 20    such odds are enough to name one of a hundred million people
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A step of the scale: `words` for an ε up to `most`. `means` is for people who are no mathematicians."""

    words: str
    most: float
    means: str


STRONG = Step("strong", 1.0, "whatever is published, whether you took part stays a guess")
MODERATE = Step("moderate", 8.0, "most guesses stay guesses; at worst somebody could be nearly sure about a few people")
WEAK = Step("weak", 20.0, "at worst somebody could be sure about most people; ask what else protects you")
NEXT_TO_NOTHING = Step("next to nothing", math.inf, "the number rules nothing out; ask what else protects you")
SCALE = (STRONG, MODERATE, WEAK, NEXT_TO_NOTHING)

# Up to which a release is called one with a guarantee, and for which populations are extrapolated.
GUARANTEE = MODERATE.most
# Above which it must not be called one, however secure its randomness was.
NO_GUARANTEE = WEAK.most


def step_of(epsilon: float) -> Step:
    """The step of the scale that ε is on.

    >>> [step_of(epsilon).words for epsilon in (0.5, 1.0, 8.0, 8.01, 20.0, 3933.0)]
    ['strong', 'strong', 'moderate', 'weak', 'weak', 'next to nothing']
    """
    return next(step for step in SCALE if epsilon <= step.most)
