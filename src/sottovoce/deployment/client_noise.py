"""Noise by clients: what one client adds to its words before they are masked, and what that hides from the server.

How much is the plan's business (`privacy.noise_shares`); that fewer than `least` people are never summed is checked by
each client (`sum_terms.Terms`), and both must say the same number.
"""

from sottovoce.deployment.masks import Words
from sottovoce.deployment.sum_terms import Terms
from sottovoce.errors import InvariantError, check_invariant
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.discrete_gaussian import DiscreteGaussian
from sottovoce.privacy.events import repeated
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.randomness import SecureRandom

_CHUNK = 1 << 17  # words


def add_share(words: Words, *, plan: Plan, terms: Terms) -> None:
    """words += this client's share of the noise, in place, modulo 2³² or 2⁶⁴.

    Guarantee: in a sum of `least` survivors or more, `colluding` of whom tell theirs, the shares of the others are a
    discrete Gaussian of at least honest/needed of the plan's variance, but for e to the `log_gap`.
    """
    agreed = plan.noise_shares
    check_invariant(agreed is not None and terms.least >= agreed.least, "a share of noise for sums of too few")
    check_invariant(plan.sum_bits == terms.bits, f"words of {terms.bits} bits in a plan of {plan.sum_bits}")
    source, random = DiscreteGaussian(variance=plan.noise.share_variance), SecureRandom()
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        part += source.draw(len(part), random=random).astype(
            words.dtype
        )  # negative numbers wrap around, as they should


def epsilon_for_server(plan: Plan, *, rounds: int, delta: float) -> Epsilon:
    """What a server that does not lie, but looks, can learn of somebody who takes part in `rounds` rounds."""
    event = plan.server_event
    if event is None:
        raise InvariantError("without noise by clients the server sees sums as they are")
    return epsilon(repeated(event, rounds), delta)
