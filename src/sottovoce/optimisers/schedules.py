"""Learning rates over time: each schedule is a pure function from the step (0 for the first) to a learning rate.

NewBob lowers it besides, when the dev loss stops getting better.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

from sottovoce.base.errors import InputError
from sottovoce.optimisers.optimiser import check_range


class Schedule(ABC):
    """The interface of all schedules."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The learning rate of `step`, the number of updates made before it."""


@final
@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same learning rate at every step."""

    lr: float

    def __post_init__(self) -> None:
        check_range(self, "lr", low=0)

    def __call__(self, step: int) -> float:
        return self.lr


@final
@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiplies the rate by `decay_rate` at `transition_begin` and then every `transition_steps`.

    Central training of Pelikan et al.: halve every 50,000 steps, for the first time at 40,000 to 330,000.

    >>> schedule = StepDecay(lr=0.5, transition_begin=330_000, transition_steps=50_000)
    >>> [schedule(step) for step in (0, 329_999, 330_000, 379_999, 380_000)]
    [0.5, 0.5, 0.25, 0.25, 0.125]
    """

    lr: float
    transition_begin: int
    transition_steps: int
    decay_rate: float = 0.5

    def __post_init__(self) -> None:
        _check_decay(self)

    def __call__(self, step: int) -> float:
        since = step - self.transition_begin
        return self.lr if since < 0 else self.lr * self.decay_rate ** (1 + since // self.transition_steps)


@final
@dataclass(frozen=True, kw_only=True)
class ExponentialDecay(Schedule):
    """lr·decay_rate^((step - transition_begin)/transition_steps), constant before (optax.exponential_decay).

    `staircase` rounds the exponent down; in the first `warmup_steps` the rate rises linearly from 0. The flagship's
    server:

    >>> schedule = ExponentialDecay(lr=0.002, transition_begin=750, transition_steps=750, decay_rate=0.6)
    >>> [round(schedule(step), 6) for step in (0, 750, 1125, 1500)]
    [0.002, 0.002, 0.001549, 0.0012]
    """

    lr: float
    transition_steps: int
    decay_rate: float
    transition_begin: int = 0
    staircase: bool = False
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_decay(self)
        _check_count(self, "warmup_steps", low=0)

    def __call__(self, step: int) -> float:
        since = max(0, step - self.transition_begin)
        exponent = since // self.transition_steps if self.staircase else since / self.transition_steps
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return self.lr * warm * self.decay_rate**exponent


@final
@dataclass(frozen=True, kw_only=True)
class WarmupCosine(Schedule):
    """Rises linearly from 0 to `lr` in `warmup_steps`, then falls along half a cosine to `final_lr` at `total_steps`.

    As optax.warmup_cosine_decay_schedule with init_value 0; `total_steps` includes the warm-up.
    """

    lr: float
    warmup_steps: int
    total_steps: int
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "lr", "final_lr", low=0)
        _check_count(self, "warmup_steps", low=0)
        _check_count(self, "total_steps", low=1)
        if self.total_steps <= self.warmup_steps:
            raise InputError(f"WarmupCosine: total_steps={self.total_steps}, expected more than {self.warmup_steps=}")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


@final
@dataclass(frozen=True, kw_only=True)
class WarmupInverseSqrt(Schedule):
    """Rises linearly from 0 to `lr` in `warmup_steps`, then falls as lr·√(warmup_steps/step), without an end.

    >>> schedule = WarmupInverseSqrt(lr=0.1, warmup_steps=100)
    >>> [schedule(step) for step in (0, 50, 100, 400)]
    [0.0, 0.05, 0.1, 0.05]
    """

    lr: float
    warmup_steps: int

    def __post_init__(self) -> None:
        check_range(self, "lr", low=0)
        _check_count(self, "warmup_steps", low=1)

    def __call__(self, step: int) -> float:
        return self.lr * min(step / self.warmup_steps, math.sqrt(self.warmup_steps / max(step, 1)))


def _check_decay(schedule: StepDecay | ExponentialDecay) -> None:
    check_range(schedule, "lr", "decay_rate", low=0)
    _check_count(schedule, "transition_begin", low=0)
    _check_count(schedule, "transition_steps", low=1)
    if not 0 < schedule.decay_rate <= 1:
        raise InputError(f"{type(schedule).__name__}: decay_rate={schedule.decay_rate}, expected above 0 and at most 1")


def _check_count(schedule: Schedule, name: str, *, low: int) -> None:
    value = getattr(schedule, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InputError(f"{type(schedule).__name__}: {name}={value!r}, expected a whole number, at least {low}")


@dataclass(frozen=True, kw_only=True)
class NewBob:
    """After every evaluation whose dev loss is lower than the one before by less than `improvement`, a share of it, the
    learning rate is multiplied by `factor`. Gao et al. have 0.8 and 0.25 %. SpeechBrain's, with a patience of 0."""

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
