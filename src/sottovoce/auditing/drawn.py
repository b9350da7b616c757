"""How far a canary that was drawn stands out of one release, and how often canaries are drawn.

No attack, but a check of what is accounted: only the audit knows who was drawn. Where few are drawn in a round, the
attacker sees little of that, and an update that counts twice may be lost in what sampling hides; here it is not.

Shapes: P flat length, N canaries drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from sottovoce.auditing.canaries import Canaries
from sottovoce.base.seeds import stream

DRAWN_LEVEL = 0.999  # of both intervals
_REACH = 3.2905  # standard errors to either side


@dataclass(frozen=True)
class Drawn:
    """`effect` is by how many standard deviations of the noise one who was drawn stands out: 1/z, as accounted.

    `rate` is how many of the canaries that are in were drawn.
    """

    effect: float
    effect_error: float
    effect_accounted: float
    rate: float
    rate_error: float
    rate_accounted: float

    @property
    def stands_out(self) -> bool:
        """More than is accounted for."""
        return self.effect - self.effect_error > self.effect_accounted

    @property
    def too_often(self) -> bool:
        return self.rate - self.rate_error > self.rate_accounted

    def as_json(self) -> dict[str, Any]:
        return {
            "effect": self.effect,
            "effect_interval": [self.effect - self.effect_error, self.effect + self.effect_error],
            "effect_accounted": self.effect_accounted,
            "sampling_rate": self.rate,
            "sampling_rate_interval": [self.rate - self.rate_error, self.rate + self.rate_error],
            "sampling_rate_accounted": self.rate_accounted,
            "level": DRAWN_LEVEL,
        }


@final
class DrawnMeter:
    """Measures rounds as they come."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries
        self._drawn: list[float] = []  # scores, in units of the clip bound
        self._others: list[float] = []
        self._draws, self._chances, self._dimension = 0, 0, canaries.effective_dimension()

    def add(self, scaled_P: Tensor, drawn: list[int], *, step: int) -> None:
        """A release in units of the clip bound, turned as canaries are, and which of those that are in were drawn."""
        canaries = self._canaries
        self._draws += len(drawn)
        self._chances += int(canaries.is_in.sum())
        absent = np.setdiff1d(np.arange(canaries.count), drawn)
        size = min(len(drawn), len(absent))
        if not size:
            return
        others = stream(canaries.seed, "audit", "others", step).choice(absent, size, replace=False)
        left_P = scaled_P.clone()  # all others who were drawn are known
        for _, directions_NP in canaries.in_chunks(drawn):
            left_P -= directions_NP.sum(0, dtype=torch.float64)
        self._drawn += [score + 1 for score in _scores(canaries, drawn, left_P)]
        self._others += _scores(canaries, others.tolist(), left_P)

    def found(self, *, multiplier: float, rate: float) -> Drawn | None:
        """What was found, beside a noise multiplier and a sampling rate; None where too few were drawn to say."""
        if min(len(self._drawn), len(self._others)) < 2:
            return None
        drawn, others = np.array(self._drawn), np.array(self._others)
        deviation = math.sqrt((drawn.var(ddof=1) + others.var(ddof=1)) / 2)
        effect = float(drawn.mean() - others.mean()) / deviation if deviation else math.inf
        spread = (1 / (len(drawn) + len(others) - 2) + 1 / self._dimension) / 2
        error = _REACH * math.sqrt(1 / len(drawn) + 1 / len(others) + effect**2 * spread)
        share = self._draws / self._chances
        # Of the rate that is accounted, so that none at all, or all, still has an error.
        rate_error = _REACH * math.sqrt(rate * (1 - rate) / self._chances)
        return Drawn(effect, error, 1 / multiplier, share, rate_error, rate)


def _scores(canaries: Canaries, which: Sequence[int], left_P: Tensor) -> list[float]:
    """How far that goes in their directions."""
    return [score for _, rows_NP in canaries.in_chunks(which) for score in (rows_NP @ left_P.float()).tolist()]
