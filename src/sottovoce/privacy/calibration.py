"""Calibration: from a target ε to the noise or the steps that reach it.

ε falls with noise and grows with steps, so each answer is where ε crosses the target. Searches use a coarser PLD grid,
which only ever overstates ε. The noise of a run is then found on the fine grid itself. (dp-accounting's
`calibrate_dp_mechanism` asks its own accountants, whose ε differs from ours in the last digits.)
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import pld_epsilon, rdp_epsilon
from sottovoce.privacy.events import (
    LARGEST_STEPS,
    Event,
    Measured,
    Sampling,
    check_sizes,
    check_whole,
    repeated,
    run_event,
    sampled_release,
)
from sottovoce.privacy.mechanism import Correlated
from sottovoce.privacy.pld import CAREFUL, QUICK, PldCap
from sottovoce.privacy.rdp import check_delta

# "pld" is the tight ε (RDP where there is no PLD). "rdp" is what the ledger can follow step by step: calibrate by it
# when a run must spend all its steps within an `epsilon_budget`.
Accountant = Literal["pld", "rdp"]

SMALLEST_TARGET = 1e-30
_SMALLEST_NOISE, _LARGEST_NOISE = 2.0**-12, 2.0**20
_ROUGH_NOISE, _NOISE_DIGITS = 1e-3, 6


class UnreachableTarget(InputError):
    """No number that may be tried brings ε to its target."""


def check_target(target_epsilon: float) -> None:
    if not (math.isfinite(target_epsilon) and target_epsilon >= SMALLEST_TARGET):
        raise InputError(f"target_epsilon={target_epsilon}: expected a positive number, {SMALLEST_TARGET:g} or more")


def event_epsilon(event: Event, *, delta: float, accountant: Accountant = "pld", cap: PldCap = QUICK) -> float:
    """ε as the searches see it: quick, and never below the careful value."""
    check_delta(delta)
    by_pld = pld_epsilon(event, delta, cap=cap) if accountant == "pld" else None
    return rdp_epsilon(event, delta) if by_pld is None else by_pld


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Where a search begins, by which `factor` it widens, how far, and to which relative `precision` it closes in.

    `least` and `most` bound what is tried; nothing below `start` is tried unless `least` is given.
    """

    start: float
    factor: float
    precision: float
    least: float = math.inf
    most: float = math.inf


def solve_decreasing(
    target: float, spent: Callable[[float], float], bracket: Bracket, *, at: Callable[[float], str] = lambda x: ""
) -> float:
    """The smallest x, to the bracket's precision, with `spent(x)` ≤ target; `spent` falls with x.

    UnreachableTarget where there is none; `at` says in words with which x the best ε was found.
    """
    low = high = bracket.start
    while spent(high) > target:
        low, high = high, high * bracket.factor
        if high > bracket.most:
            best = f"the best is ε = {spent(low):.4g}{at(low)}"
            raise UnreachableTarget(f"target_epsilon={target:g} cannot be reached: {best}")
    while low == high:  # `start` is within the target
        if high <= bracket.least:
            return high
        low = max(high / bracket.factor, bracket.least)
        if spent(low) <= target:
            high = low
    return _find_crossing(spent, low, high, target=target, precision=bracket.precision)


def _find_crossing(
    spent: Callable[[float], float], low: float, high: float, *, target: float, precision: float
) -> float:
    """Between `low` (above the target) and `high` (within), from the side that is within."""
    from scipy.optimize import brentq  # here: half a second to load, and few calibrate

    log_low, log_high = math.log(low), math.log(high)

    def excess(log_x: float) -> float:
        # The ends are known by value: exp(log(x)) is not quite x, which matters where ε jumps.
        x = low if log_x <= log_low else high if log_x >= log_high else math.exp(log_x)
        return math.log(max(spent(x), 1e-300)) - math.log(target)

    found = math.exp(brentq(excess, log_low, log_high, xtol=precision / 4)) * (1 + precision / 2)
    while spent(found) > target:
        found *= 1 + precision / 2
    return min(found, high)


def smallest_integer(holds: Callable[[int], bool], *, start: int, most: int = 2**62) -> int:
    """The smallest number from `start` on that `holds`, if all after it do; `most` + 1 where none up to `most` does.

    >>> smallest_integer(lambda n: n * n > 1000, start=1, most=100), smallest_integer(lambda n: False, start=1, most=9)
    (32, 10)
    """
    low, high = start, start
    while high < most and not holds(high):
        low, high = high + 1, min(2 * high, most)
    return bisect_left(range(high + 1), True, lo=low, key=holds)


def calibrate_noise_multiplier(
    target_epsilon: float,
    *,
    run_event: Callable[[float], Event],
    delta: float,
    accountant: Accountant = "pld",
    cap: PldCap = CAREFUL,
) -> float:
    """The smallest noise multiplier of six digits whose whole run, `run_event(z)`, stays within the target.

    Six digits, so that the number which a plan prints is the one that a run has, on this machine and on any other.

    >>> from sottovoce.privacy.events import poisson_release
    >>> def run(z): return repeated(poisson_release(z, sampling_rate=0.0295), 2006)
    >>> calibrate_noise_multiplier(4.5, run_event=run, delta=1e-9, accountant="rdp")
    2.02837
    """
    check_target(target_epsilon)

    def spent_roughly(z: float) -> float:
        return event_epsilon(run_event(z), delta=delta, accountant=accountant)

    @cache
    def spent(z: float) -> float:
        return event_epsilon(run_event(z), delta=delta, accountant=accountant, cap=cap)

    def least_noise(spent: Callable[[float], float], *, start: float, factor: float, precision: float) -> float:
        limits = {"least": _SMALLEST_NOISE, "most": _LARGEST_NOISE}
        bracket = Bracket(start=start, factor=factor, precision=precision, **limits)
        return solve_decreasing(target_epsilon, spent, bracket, at=lambda z: f", with noise_multiplier={z:g}")

    start, factor = 1.0, 4.0
    if accountant == "pld":  # a careful one takes a second: most of the way goes by quick ones
        start = least_noise(spent_roughly, start=start, factor=factor, precision=_ROUGH_NOISE)
        factor = 1 + 4 * _ROUGH_NOISE
    exact = least_noise(spent, start=start, factor=factor, precision=10.0**-_NOISE_DIGITS)
    if exact == _SMALLEST_NOISE:
        return exact
    exponent = _last_digit(exact)

    def with_digits(digits: int) -> float:
        return float(f"{digits}e{exponent}")

    digits = math.ceil(exact / 10.0**exponent)  # the smallest that fits, whichever way the search came there
    while spent(with_digits(digits)) > target_epsilon:
        digits += 1
    while spent(with_digits(digits - 1)) <= target_epsilon:
        digits -= 1
    return with_digits(digits)


@lru_cache(maxsize=64)  # the runs of a suite often share it, and it takes seconds
def calibrate_run_noise(
    target_epsilon: float,
    *,
    population_size: int,
    cohort_size: int,
    central_steps: int,
    delta: float,
    sampling: Sampling = "poisson",
    accountant: Accountant = "pld",
    cap: PldCap = CAREFUL,
    measured: Measured | None = None,
    mechanism: Correlated | None = None,
) -> float:
    """The noise multiplier with which a run's ε is the target, or as little below it as six digits can say.

    What `sottovoce plan` prints and what a recipe with `target_epsilon` is run with. Adaptive clipping changes nothing:
    its count is part of the step. What is `measured` besides is part of ε, with its own noise. With a `mechanism` it is
    the multiplier of the fresh noise that is then correlated.
    """
    check_sizes(population_size, cohort_size=cohort_size)
    check_whole("central_steps", central_steps, most=LARGEST_STEPS)
    sizes = {"population_size": population_size, "cohort_size": cohort_size}
    besides = None if measured is None else measured.event(sampling=sampling, **sizes)

    def whole_run(z: float) -> Event:
        step = sampled_release(z, sampling=sampling, **sizes) if mechanism is None else mechanism.release(z, **sizes)
        return run_event(step, central_steps, besides)

    if sampling == "fixed_size":  # of which no tight PLD is known
        accountant = "rdp"
    return calibrate_noise_multiplier(target_epsilon, run_event=whole_run, delta=delta, accountant=accountant, cap=cap)


def calibrate_steps(target_epsilon: float, *, step_event: Event, delta: float, accountant: Accountant = "pld") -> int:
    """The most steps within the target (at most ten million)."""
    check_target(target_epsilon)

    def spent(steps: int) -> float:
        return event_epsilon(repeated(step_event, steps), delta=delta, accountant=accountant)

    if spent(1) > target_epsilon:
        best = f"the best is ε = {spent(1):.4g}, with a single step"
        raise UnreachableTarget(f"target_epsilon={target_epsilon:g} cannot be reached: {best}")
    return smallest_integer(lambda steps: spent(steps) > target_epsilon, start=2, most=LARGEST_STEPS) - 1


def round_up_noise(value: float) -> float:
    """The next number of six digits: a plan prints the noise that a run has, and no less than was asked for.

    >>> round_up_noise(0.61440001), round_up_noise(2.0)
    (0.614401, 2.0)
    """
    near = float(f"{value:.{_NOISE_DIGITS}g}")
    return near if near >= value else float(f"{near + 10.0 ** _last_digit(near):.6g}")


def _last_digit(value: float) -> int:
    """The power of ten of the last of six digits."""
    return math.floor(math.log10(value)) + 1 - _NOISE_DIGITS
