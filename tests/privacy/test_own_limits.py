"""People's own limits against accounting for Poisson sampling: what may hang on earlier draws, and what may not."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import poisson_release, repeated

RATE, NOISE, DELTA = 0.1, 0.7, 1e-4
STEP = NOISE / 20
SEEN = np.arange(-8 * NOISE, 4 + 8 * NOISE, STEP)  # of a round's noised sum

Floats = NDArray[np.float64]
Sends = Callable[[bool, Floats], Floats]


def deltas(epsilon: float, *, sends: Sends, others_move: float = 0.0) -> tuple[float, float]:
    """δ at ε of two rounds, for adding somebody and for removing: they have speech, or send zeros whenever drawn.

    In the first round they send 1. In the second, `sends` says what, given whether they were drawn in the first, and
    what was released of it. `others_move` is by how much the sum of all others differs where they were drawn before.
    """
    density = stats.norm(scale=NOISE).pdf
    with_speech, without = np.zeros((len(SEEN), len(SEEN))), np.zeros((len(SEEN), len(SEEN)))
    for before in (False, True):
        for now in (False, True):
            chance = math.prod(RATE if drawn else 1 - RATE for drawn in (before, now))
            theirs = others_move * before
            own = sends(before, SEEN)[:, None] * now
            with_speech += chance * density(SEEN - before)[:, None] * density(SEEN[None, :] - theirs - own)
            without += chance * density(SEEN)[:, None] * density(SEEN[None, :] - theirs)
    factor = math.exp(epsilon)
    return tuple(
        float(np.maximum(one - factor * other, 0).sum() * STEP**2)
        for one, other in ((with_speech, without), (without, with_speech))
    )  # type: ignore[return-value]


def always(_: bool, seen: Floats) -> Floats:
    return np.ones_like(seen)


RULES: dict[str, Sends] = {
    "once and no more": lambda before, seen: np.full_like(seen, not before),
    "again where drawn before": lambda before, seen: np.full_like(seen, before),
    "never": lambda _, seen: np.zeros_like(seen),
    "by what was released": lambda _, seen: np.where(seen > 0.5, 1.0, 0.0),
    "the other way where drawn before": lambda before, seen: np.full_like(seen, -1.0 if before else 1.0),
    "by both": lambda before, seen: np.where(before, np.sign(seen), np.cos(seen)),
}


def charged() -> float:
    found = epsilon(repeated(poisson_release(NOISE, sampling_rate=RATE), 2), DELTA).pld
    assert found is not None
    return found


def test_without_limits_two_rounds_cost_what_is_charged() -> None:
    assert max(deltas(charged(), sends=always)) == pytest.approx(DELTA, rel=0.01)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_what_somebody_sends_may_hang_on_their_own_speech_and_earlier_draws(rule: str, share: float) -> None:
    """Given all that was released, whether they are drawn now is a new coin: a limit of their own costs nothing.

    Both directions; to a millionth of δ, which is more than the grid's error: every rule is summed on the same grid.
    """
    bound = deltas(share * charged(), sends=always)
    found = deltas(share * charged(), sends=RULES[rule])
    assert all(mine <= most * (1 + 1e-6) for mine, most in zip(found, bound, strict=True))


def test_what_others_send_must_not_hang_on_somebodys_earlier_draws() -> None:
    """Who is away once their limit is reached, in a round that waits for enough people, moves others' sums."""
    once = RULES["once and no more"]
    assert max(deltas(charged(), sends=once, others_move=3.0)) > 2 * DELTA
