"""Two checks of what was released: is the noise that is claimed in it, and is sampling as accounted.

Noise: a release is a signal and noise. Whatever the signal, its squared length is above a given number at least as
often as that of the noise alone, which is chi-squared: a release shorter than chance allows lacks noise, for certain,
in some tensor. So does the difference of two releases, where both have the same noise.

Sampling: how far a canary that was drawn stands out of one release, and how often canaries are drawn. No attack, since
only the audit knows who was drawn. Where few are drawn in a round, an update that counts twice may be lost for an
attacker in what sampling hides; here it is not.

Shapes: P flat length, N canaries drawn, H tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from sottovoce.audit.canaries import Canaries
from sottovoce.base.seeds import stream
from sottovoce.flat.layout import Layout

CHANCE = 1e-6  # below this chance, noise is called missing


@dataclass(frozen=True)
class NoiseCheck:
    """The least that was found, as a share of the noise that was claimed; signal counts as noise, so it is a bound.

    `chance` is how likely as little is where all of the noise is there, over all tensors.
    """

    share: float
    tensor: str
    chance: float
    between_rounds: bool

    @property
    def is_missing(self) -> bool:
        return self.chance < CHANCE

    def as_json(self) -> dict[str, Any]:
        return {
            "least_share": self.share,
            "in": self.tensor,
            "between_rounds": self.between_rounds,
            "chance": self.chance,
            "missing": self.is_missing,
        }


@final
class NoiseMeter:
    """Measures releases as they come."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        count = len(layout.names)
        self._alone_H, self._alone_rounds_H = np.zeros(count), np.zeros(count)
        self._apart_H, self._apart_rounds_H = np.zeros(count), np.zeros(count)
        # Of a pair that trains the same tensors: no release is in two of them.
        self._last: dict[tuple[str, ...], tuple[Tensor, float]] = {}

    def add(self, released_P: Tensor, *, std: float, step: int = 0) -> None:
        """The release of round `step`, claimed to have noise of this standard deviation in what it trains."""
        held = self._layout.held_at(step)
        trained_H = np.array([name not in held for name in self._layout.names], dtype=np.float64)
        self._alone_H += self._squares(released_P) / std**2
        self._alone_rounds_H += trained_H
        if held not in self._last:
            self._last[held] = released_P.clone(), std
            return
        before_P, before = self._last.pop(held)
        self._apart_H += self._squares(released_P - before_P) / (std**2 + before**2)
        self._apart_rounds_H += trained_H

    def _squares(self, flat_P: Tensor) -> Any:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._layout.parts(flat_P)]
        return torch.stack(norms).square().cpu().numpy()

    def found(self) -> NoiseCheck:
        """The least of it."""
        found = self._per_tensor(self._alone_H, self._alone_rounds_H, between=False)
        found += self._per_tensor(self._apart_H, self._apart_rounds_H, between=True)
        return min(found, key=lambda one: (one.chance, one.share))

    def _per_tensor(self, squares_H: Any, rounds_H: Any, *, between: bool) -> list[NoiseCheck]:
        from scipy.stats import chi2

        numbers_H = rounds_H * np.array(self._layout.sizes)
        tests = 2 * len(numbers_H)
        return [
            NoiseCheck(math.sqrt(squares / numbers), name, min(float(chi2.cdf(squares, numbers)) * tests, 1.0), between)
            for squares, name, numbers in zip(squares_H, self._layout.names, numbers_H, strict=True)
            if numbers and math.isfinite(squares)
        ]


DRAWN_LEVEL = 0.999  # of both intervals
_REACH = 3.2905  # standard errors to either side


@dataclass(frozen=True)
class SamplingCheck:
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
class SamplingMeter:
    """Measures rounds as they come."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries
        self._drawn: list[float] = []  # scores, in units of the clip bound
        self._others: list[float] = []
        self._draws, self._chances = 0, 0
        turns = range(max(1, len(canaries.plan.layout.held)))
        self._dimension = min(canaries.effective_dimension(step=step) for step in turns)

    def add(self, scaled_P: Tensor, drawn: list[int], *, step: int) -> None:
        """A release in units of the clip bound, with canaries' signs, and which canaries were drawn."""
        canaries = self._canaries
        self._draws += len(drawn)
        self._chances += int(canaries.is_in.sum())
        absent = np.setdiff1d(np.arange(canaries.count), drawn)
        size = min(len(drawn), len(absent))
        if not size:
            return
        others = stream(canaries.seed, "audit", "others", step).choice(absent, size, replace=False)
        left_P = scaled_P.clone()  # all others who were drawn are known
        for _, directions_NP in canaries.in_chunks(drawn, step=step):
            left_P -= directions_NP.sum(0, dtype=torch.float64)
        self._drawn += [score + 1 for score in _scores(canaries, drawn, left_P, step)]
        self._others += _scores(canaries, others.tolist(), left_P, step)

    def found(self, *, multiplier: float, rate: float) -> SamplingCheck | None:
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
        return SamplingCheck(effect, error, 1 / multiplier, share, rate_error, rate)


def _scores(canaries: Canaries, which: Sequence[int], left_P: Tensor, step: int) -> list[float]:
    """How far that goes in their directions of round `step`."""
    return [
        score for _, rows_NP in canaries.in_chunks(which, step=step) for score in (rows_NP @ left_P.float()).tolist()
    ]
