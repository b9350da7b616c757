"""Whether the noise that is claimed is in what was released: in every tensor, and anew in every round.

A release is a signal and noise. Whatever the signal, its squared length is above a given number at least as often as
that of the noise alone, which is chi-squared: a release shorter than chance allows lacks noise, for certain. So does
the difference of two releases, where both have the same noise.

Shapes: P flat length, H tensors.
"""

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from sottovoce.flat.layout import Layout

CHANCE = 1e-6  # below this chance, noise is called missing


@dataclass(frozen=True)
class NoiseFound:
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
        self._alone_H, self._alone_rounds = np.zeros(count), 0
        self._apart_H, self._apart_rounds = np.zeros(count), 0
        self._last: tuple[Tensor, float] | None = None  # of a pair: no release is in two of them

    def add(self, released_P: Tensor, *, std: float) -> None:
        """A release that is claimed to have noise of this standard deviation."""
        self._alone_H += self._squares(released_P) / std**2
        self._alone_rounds += 1
        if self._last is None:
            self._last = released_P.clone(), std
            return
        before_P, before = self._last
        self._apart_H += self._squares(released_P - before_P) / (std**2 + before**2)
        self._apart_rounds += 1
        self._last = None

    def _squares(self, flat_P: Tensor) -> Any:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._layout.parts(flat_P)]
        return torch.stack(norms).square().cpu().numpy()

    def found(self) -> NoiseFound:
        """The least of it."""
        return min(
            (
                one
                for squares_H, rounds, between in (
                    (self._alone_H, self._alone_rounds, False),
                    (self._apart_H, self._apart_rounds, True),
                )
                if rounds
                for one in self._tensors(squares_H, rounds, between)
            ),
            key=lambda one: (one.chance, one.share),
        )

    def _tensors(self, squares_H: Any, rounds: int, between: bool) -> list[NoiseFound]:
        from scipy.stats import chi2

        numbers_H = rounds * np.array(self._layout.sizes)
        tests = 2 * len(numbers_H)
        chances_H = np.minimum(chi2.cdf(squares_H, numbers_H) * tests, 1.0)
        shares_H = np.sqrt(squares_H / numbers_H)
        return [
            NoiseFound(float(share), name, float(chance), between)
            for share, name, chance in zip(shares_H, self._layout.names, chances_H, strict=True)
            if math.isfinite(share)
        ]
