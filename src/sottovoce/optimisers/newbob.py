"""NewBob: the learning rate falls when a dev score stops getting better (SpeechBrain's, without its patience)."""

import math
from dataclasses import dataclass, replace

from sottovoce.base.errors import InputError
from sottovoce.optimisers.ranges import check_range


@dataclass(frozen=True, kw_only=True)
class NewBob:
    """After every evaluation that is better than the one before by less than `improvement`, a share of it, the
    learning rate is multiplied by `factor`. Gao et al. have 0.8 and 0.25 %."""

    factor: float = 0.8
    improvement: float = 0.0025

    def __post_init__(self) -> None:
        check_range(self, "improvement", low=0, below=1)
        if not 0 < self.factor < 1:
            raise InputError(f"NewBob: factor={self.factor!r}, expected a number between 0 and 1, both excluded")

    def after(self, standing: "Annealed", score: float) -> "Annealed":
        """Where a run stands with one more score, of which lower is better; what is not finite is no improvement.

        >>> NewBob().after(Annealed(scale=1.0, score=2.0), 1.999).scale
        0.8
        """
        if not math.isfinite(score):
            return replace(standing, scale=standing.scale * self.factor)
        before = standing.score
        gain = math.inf if before is None else (before - score) / before if before else 0.0
        return Annealed(standing.scale if gain >= self.improvement else standing.scale * self.factor, score)


@dataclass(frozen=True)
class Annealed:
    """What the schedule's learning rate is multiplied by, and the last score."""

    scale: float = 1.0
    score: float | None = None
