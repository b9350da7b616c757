"""How a run's noise is correlated over its rounds, as a recipe says it and as a plan has it.

    {kind: banded, bands: 8, cycle: 8}  ─┐
    {kind: blt, buffers: 3}             ─┴─► steps, people, cohort ─► Correlated: numbers that decide what is released

The numbers are the best for as many rounds as the recipe has. They are worked out once, before a run, and written into
its ledger: whoever verifies that works out nothing again.
"""

from dataclasses import dataclass
from typing import Any, Literal

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import CorrelatedRelease
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.strategies import Banded, Strategy, strategy_to_json


@dataclass(frozen=True, kw_only=True)
class Correlated:
    """Noise by `strategy`, for users in `cycle` groups that take turns."""

    cycle: int
    strategy: Strategy

    def sampler(self, *, population_size: int, cohort_size: int) -> CyclicSampler:
        """For cohorts of `cohort_size` on average. Refuses what no group can give, or no accountant bounds."""
        rate = self.cycle * cohort_size / population_size
        if self.rows_meet:
            smallest = population_size // self.cycle
            largest = -(-population_size // self.cycle)
            if not smallest <= cohort_size <= largest:
                raise InputError(
                    f"mechanism with cycle={self.cycle} and cohort_size={cohort_size}: each round takes one of "
                    f"{self.cycle} groups of {population_size} clients whole; expected cohort_size={largest}, or "
                    "another cycle"
                )
            rate = 1.0
        if rate > 1:
            raise InputError(
                f"mechanism with cycle={self.cycle} and cohort_size={cohort_size}: each round draws from one of "
                f"{self.cycle} groups of {population_size} clients, which is smaller; expected a cycle of at most "
                f"{population_size // cohort_size}"
            )
        return CyclicSampler(cycle=self.cycle, sampling_rate=rate)

    def cohort_near(self, cohort_size: int, *, population_size: int) -> int:
        """The size of cohorts that so many people allow, as near as may be to one that is wanted.

        >>> Correlated(cycle=3, strategy=Banded(column=(1.0, 0.5))).cohort_near(40, population_size=100)
        33
        """
        if self.rows_meet:
            return -(-population_size // self.cycle)
        return max(min(cohort_size, population_size // self.cycle), 1)

    def release(self, noise_multiplier: float, *, population_size: int, cohort_size: int) -> CorrelatedRelease:
        """What one row spends, together with those around it."""
        sampler = self.sampler(population_size=population_size, cohort_size=cohort_size)
        return CorrelatedRelease(noise_multiplier, sampler.sampling_rate, self.cycle, self.strategy)

    @property
    def kind(self) -> str:
        return "banded" if isinstance(self.strategy, Banded) else "blt"

    def as_json(self) -> dict[str, Any]:
        return {"cycle": self.cycle, "strategy": strategy_to_json(self.strategy)}

    @property
    def rows_meet(self) -> bool:
        """Whether one user's rows meet. There nothing is known of what drawing among the group would hide."""
        return not (isinstance(self.strategy, Banded) and self.strategy.bands <= self.cycle)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What a recipe says. `banded` has `bands` and a `cycle` of at least as many groups (as many, if not given).

    `blt` has `buffers`, less those that win nothing; its `cycle`, if not given, is how many cohorts the population is.
    """

    kind: Literal["banded", "blt"]
    bands: int | None = None
    buffers: int | None = None
    cycle: int | None = None

    def __post_init__(self) -> None:
        own, other = ("bands", "buffers") if self.kind == "banded" else ("buffers", "bands")
        if getattr(self, own) is None or getattr(self, other) is not None:
            raise InputError(f"mechanism={self.kind}: expected {own}, and no {other}")
        for name in ("bands", "buffers", "cycle"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"mechanism: {name}={value}, expected at least 1")
        if self.bands is not None and self.cycle is not None and self.bands > self.cycle:
            raise InputError(
                f"mechanism=banded: bands={self.bands} with cycle={self.cycle}, expected no more bands than the cycle"
            )

    @property
    def memory(self) -> int:
        """How many vectors of the model's size a run keeps of earlier noise, at most."""
        return self.bands - 1 if self.bands is not None else self.buffers or 0

    def for_run(self, central_steps: int, *, population_size: int, cohort_size: int) -> Correlated:
        """The best noise of this kind for so many steps; takes a moment the first time."""
        from sottovoce.privacy.optimal_strategies import optimal_banded, optimal_blt

        cycle = self.cycle or self.bands or -(-population_size // cohort_size)
        strategy: Strategy
        if self.kind == "banded":
            assert self.bands is not None
            strategy = optimal_banded(steps=central_steps, bands=min(self.bands, central_steps), cycle=cycle)
        else:
            assert self.buffers is not None
            strategy = optimal_blt(steps=central_steps, buffers=self.buffers, cycle=cycle)
        return Correlated(cycle=cycle, strategy=strategy)
