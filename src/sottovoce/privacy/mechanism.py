"""Noise that is correlated over rounds: what a recipe says of it, what a plan has, and the best strategy for a run.

    {kind: banded, bands: 8, cycle: 8}  ─┐
    {kind: blt, buffers: 3}             ─┴─► steps, population, cohort ─► Correlated: the numbers that are released by

They are computed once, before a run, and written into its ledger: whoever verifies that computes nothing again.

A model after t rounds is made of the sum of their updates, so what counts is the noise in such sums. With the
strategy's column as a power series c(x), that in the sum of rounds 0…t is Σ_s g_s·w_{t−s}, g(x) = 1/((1 − x)·c(x)),
and the mean of its variance over T rounds is Σ_s (T − s)·g_s²/T. That times the squared sensitivity is minimised by
L-BFGS with exact gradients, over what is always valid: any column that begins with 1 (no two rounds of a user overlap),
or decays and scales for which the sensitivity's formula is exact. Numbers are rounded to four digits: an optimiser
knows them to seven or so, which differ from machine to machine, and what is lost is of second order, 1e-8. The
sensitivity is that of the rounded ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.privacy.events import LARGEST_STEPS, CorrelatedRelease, check_whole
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.strategies import (
    MOST_BANDS,
    MOST_BUFFERS,
    Banded,
    Blt,
    Column,
    Strategy,
    first_column,
    sensitivity,
    strategy_from_json,
    strategy_to_json,
    sum_participations,
)

_DIGITS = 4
_NO_BETTER = 1e-4  # of the squared noise: a buffer that wins less is left out, since nothing says what it should be
_SLOWEST = 1 - 1e-9  # decay: beyond any run's rounds
_REFUSED = 1e3  # a logarithm that no error has
# Where a search for a BLT begins: its fastest decay, and how slow the slowest is in parts of the cycle. There are local
# minima in which buffers fall together.
_STARTS = [(fastest, slowest) for fastest in (0.1, 0.5, 0.8) for slowest in (0.5, 2.0)]


@dataclass(frozen=True, kw_only=True)
class Correlated:
    """Noise by `strategy`, for users in `cycle` groups that take turns."""

    cycle: int
    strategy: Strategy

    def sampler(self, *, population_size: int, cohort_size: int) -> CyclicSampler:
        """For cohorts of `cohort_size` on average. Refuses what no group can give, or no accountant bounds."""
        rate = self.cycle * cohort_size / population_size
        if self.rows_overlap:
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
        if self.rows_overlap:
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
    def rows_overlap(self) -> bool:
        """Whether one user's rows meet. There nothing is known of what drawing among the group would hide."""
        return not (isinstance(self.strategy, Banded) and self.strategy.bands <= self.cycle)


def correlated_from_json(data: dict[str, Any]) -> Correlated:
    """What `Correlated.as_json` wrote; InputError for anything else.

    >>> correlated_from_json({"cycle": 3, "strategy": {"kind": "banded", "column": [1.0, 0.5]}}).rows_overlap
    False
    """
    match data:
        case {"cycle": int(cycle), "strategy": dict(strategy), **rest} if not rest and 1 <= cycle <= LARGEST_STEPS:
            try:
                return Correlated(cycle=cycle, strategy=strategy_from_json(strategy))
            except (TypeError, OverflowError) as error:
                raise InputError(f"strategy of correlated noise: {error}; expected numbers") from None
    raise InputError(f"correlated noise: expected a cycle from 1 to {LARGEST_STEPS} and a strategy, and nothing else")


@dataclass(frozen=True, kw_only=True)
class MechanismSettings:
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
        cycle = self.cycle or self.bands or -(-population_size // cohort_size)
        strategy: Strategy
        if self.kind == "banded":
            assert self.bands is not None
            strategy = optimal_banded(steps=central_steps, bands=min(self.bands, central_steps), cycle=cycle)
        else:
            assert self.buffers is not None
            strategy = optimal_blt(steps=central_steps, buffers=self.buffers, cycle=cycle)
        return Correlated(cycle=cycle, strategy=strategy)


def relative_error(strategy: Strategy, *, steps: int) -> float:
    """RMS noise of all prefix sums with a strategy, over that with independent noise of the same multiplier.

    >>> round(relative_error(Banded(column=(1.0, 0.5)), steps=1000), 3), relative_error(Banded(column=(1.0,)), steps=9)
    (0.667, 1.0)
    """
    return math.sqrt(_squared_error(_prefix_noise(strategy, steps)) / (steps * (steps + 1) / 2))


@lru_cache(maxsize=256)
def optimal_banded(*, steps: int, bands: int, cycle: int) -> Banded:
    """The banded strategy with the least error for its column's norm, which is what a user moves in each of the rounds.

    >>> optimal_banded(steps=100, bands=3, cycle=5).column
    (1.0, 0.7395, 0.622)
    """
    check_whole("steps", steps, most=LARGEST_STEPS)
    check_whole("bands", bands, most=min(cycle, MOST_BANDS))

    def loss(entries: Column) -> tuple[float, Column]:
        column = np.concatenate([[1.0], entries])
        sums = _filter(np.ones(1), column, np.ones(steps))
        error = _squared_error(sums)
        by_column = _error_gradient(sums, _filter(np.ones(1), column, sums), entries=bands) / error
        norm = column @ column
        return math.log(error) + math.log(norm), (by_column + 2 * column / norm)[1:]

    bands = min(bands, steps)
    orders = np.arange(1.0, bands)
    start = np.cumprod((orders - 0.5) / orders, dtype=np.float64)  # the series of (1 − x)^(−1/2)
    found = _minimised(loss, start)[1] if bands > 1 else start
    return Banded(column=(1.0, *(_rounded(value) for value in found)))


@lru_cache(maxsize=256)
def optimal_blt(*, steps: int, buffers: int, cycle: int) -> Blt:
    """The buffered linear Toeplitz strategy with the least error for what a user in every `cycle`-th round moves.

    It has fewer buffers than were asked for where the last ones win nothing.
    """
    from scipy.special import expit

    check_whole("steps", steps, most=LARGEST_STEPS)
    check_whole("buffers", buffers, most=MOST_BUFFERS)
    check_whole("cycle", cycle, most=LARGEST_STEPS)
    later = np.arange(steps - 1)

    def strategy(free: Column) -> tuple[Column, Column]:
        """Decays below 1, and scales that add up to less than 1, of any numbers."""
        raised = np.exp(free[buffers:] - max(0.0, free[buffers:].max()))
        rest = math.exp(-max(0.0, free[buffers:].max()))
        return expit(free[:buffers]), raised / (rest + raised.sum())

    def loss(free: Column) -> tuple[float, Column]:
        decays, scales = strategy(free)
        powers = decays[:, None] ** later  # [buffers, T − 1]
        column = np.concatenate([[1.0], scales @ powers])
        over, under = _rational(decays, scales)
        sums = _filter(over, under, np.ones(steps))
        error, moved = _squared_error(sums), sum_participations(column, cycle)
        squared = float(moved @ moved)
        gradient = _error_gradient(sums, _filter(over, under, sums), entries=steps) / error
        gradient = (gradient + 2 * sum_participations(moved, cycle, is_transposed=True) / squared)[1:]
        by_scale = powers @ gradient
        slopes = np.zeros_like(powers)
        slopes[:, 1:] = later[1:] * powers[:, :-1]
        by_decay = scales * (slopes @ gradient)
        return (
            math.log(error) + math.log(squared),
            np.concatenate([by_decay * decays * (1 - decays), scales * (by_scale - scales @ by_scale)]),
        )

    reach = min(cycle, steps)
    starts = [_blt_start(buffers, fastest=fastest, slowest=slowest * reach + 2) for fastest, slowest in _STARTS]
    best = min((_minimised(loss, start) for start in starts), key=lambda found: found[0])
    if buffers > 1:
        fewer = optimal_blt(steps=steps, buffers=buffers - 1, cycle=cycle)
        moved = sensitivity(fewer, rows=steps, cycle=cycle)
        if math.log(_squared_error(_prefix_noise(fewer, steps)) * moved**2) < best[0] + _NO_BETTER:
            return fewer
    decays, scales = strategy(best[1])
    order = np.argsort(-decays)
    shrink = 1 - 10.0**-_DIGITS  # rounding must not take their sum above 1
    return Blt(
        decays=tuple(_rounded_decay(min(decay, _SLOWEST)) for decay in decays[order]),
        scales=tuple(_rounded(scale * shrink) for scale in scales[order]),
    )


def _prefix_noise(strategy: Strategy, steps: int) -> Column:
    """How much of the noise of each round is in the sum of the last round and all before it, newest first, [T]."""
    if isinstance(strategy, Banded):
        over, under = np.ones(1), first_column(strategy, min(strategy.bands, steps))
    else:
        over, under = _rational(np.asarray(strategy.decays), np.asarray(strategy.scales))
    return _filter(over, under, np.ones(steps))


def _filter(over: Column, under: Column, signal: Column) -> Column:
    """The series over(x)/under(x)·signal(x), as many terms as the signal has."""
    from scipy.signal import lfilter

    found: Column = lfilter(over, under, signal)
    return found


def _rational(decays: Column, scales: Column) -> tuple[Column, Column]:
    """1/c(x) of a BLT as two polynomials: c(x) = 1 + Σ_i scale_i·x/(1 − decay_i·x)."""
    over = np.asarray(np.poly(decays), dtype=np.float64)
    under = over.copy()
    for index, scale in enumerate(scales):
        under[1:] += scale * np.poly(np.delete(decays, index))
    return over, under


def _squared_error(sums: Column) -> float:
    """Σ_t Σ_{s ≤ t} g_s²: the variance of all prefix sums together."""
    return float(np.arange(len(sums), 0, -1) @ sums**2)


def _error_gradient(sums: Column, again: Column, *, entries: int) -> Column:
    """By the column's first entries: a change of x^k in c changes g by −x^k·g/c, and `again` is g/c."""
    from scipy.signal import fftconvolve

    weighted = np.arange(len(sums), 0, -1) * sums
    correlated: Column = fftconvolve(weighted, again[::-1])[len(sums) - 1 :][:entries]
    return -2 * correlated


def _blt_start(buffers: int, *, fastest: float, slowest: float) -> Column:
    """Decays evenly spread by the logarithm of how far they are from 1, the slowest first; equal scales."""
    decays = 1 - np.geomspace(1 / slowest, 1 - fastest, buffers)
    return np.concatenate([np.log(decays / (1 - decays)), np.full(buffers, -math.log(buffers))])


def _minimised(loss: Callable[[Column], tuple[float, Column]], start: Column) -> tuple[float, Column]:
    from scipy.optimize import minimize

    def guarded(free: Column) -> tuple[float, Column]:
        with np.errstate(all="ignore"):  # a step too far, to a strategy whose noise explodes
            value, gradient = loss(free)
        finite = math.isfinite(value) and bool(np.isfinite(gradient).all())
        return (value, gradient) if finite else (_REFUSED, np.zeros_like(gradient))

    found = minimize(
        guarded, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    )
    return float(found.fun), np.asarray(found.x)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rounded_decay(decay: float) -> float:
    """By how far it is from 1, which is what counts."""
    return round(decay, _DIGITS - 1 - math.floor(math.log10(1 - decay)))
