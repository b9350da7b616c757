"""The other way round: from a target ε to the noise or the steps that reach it.

ε falls with noise and grows with steps, so each answer is where ε crosses the
target. Searches run on a coarser PLD grid; that only ever overstates ε, so an answer that passed the search passes the
careful account. Noise, which runs are made with, is then found by the careful account itself.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import pld_epsilon, rdp_epsilon
from sottovoce.privacy.correlated import Correlated
from sottovoce.privacy.events import (
    LARGEST_STEPS,
    Event,
    Measured,
    Release,
    Sampling,
    check_sizes,
    check_whole,
    fixed_size_release,
    poisson_release,
    repeated,
    run_event,
)
from sottovoce.privacy.pld import CAREFUL, QUICK, PldCap
from sottovoce.privacy.rdp import check_delta
from sottovoce.privacy.search import Unreachable, falls_to, smallest_whole

# "pld" is the tight ε (RDP where there is no PLD). "rdp" is what the ledger can follow step by step: calibrate by it
# when a run must spend all its steps within an `epsilon_budget`.
Accountant = Literal["pld", "rdp"]

_SMALLEST_NOISE, _LARGEST_NOISE = 2.0**-12, 2.0**20
_ROUGH_NOISE, _NOISE_DIGITS = 1e-3, 6


def event_epsilon(event: Event, *, delta: float, accountant: Accountant = "pld", cap: PldCap = QUICK) -> float:
    """ε as the searches see it: quick, and never below the careful value."""
    check_delta(delta)
    by_pld = pld_epsilon(event, delta, cap=cap) if accountant == "pld" else None
    return rdp_epsilon(event, delta) if by_pld is None else by_pld


def noise_multiplier_for(
    target_epsilon: float,
    *,
    run_event: Callable[[float], Event],
    delta: float,
    accountant: Accountant = "pld",
    cap: PldCap = CAREFUL,
) -> float:
    """The smallest noise multiplier of six digits whose whole run, `run_event(z)`, stays within the target.

    Six digits, so that the number which a plan prints is the one that a run has, on this machine and on any other.

    >>> def run(z): return repeated(poisson_release(z, sampling_rate=0.0295), 2006)
    >>> noise_multiplier_for(4.5, run_event=run, delta=1e-9, accountant="rdp")
    2.02837
    """
    check_target(target_epsilon)

    def roughly(z: float) -> float:
        return event_epsilon(run_event(z), delta=delta, accountant=accountant)

    @cache
    def spent(z: float) -> float:
        return event_epsilon(run_event(z), delta=delta, accountant=accountant, cap=cap)

    def least_noise(spent: Callable[[float], float], *, start: float, factor: float, precision: float) -> float:
        return falls_to(
            target_epsilon,
            spent,
            start=start,
            factor=factor,
            precision=precision,
            least=_SMALLEST_NOISE,
            most=_LARGEST_NOISE,
            at=lambda z: f", with noise_multiplier={z:g}",
        )

    start, factor = 1.0, 4.0
    if accountant == "pld":  # a careful one takes a second: most of the way goes by quick ones
        start = least_noise(roughly, start=start, factor=factor, precision=_ROUGH_NOISE)
        factor = 1 + 4 * _ROUGH_NOISE
    exact = least_noise(spent, start=start, factor=factor, precision=10.0**-_NOISE_DIGITS)
    if exact == _SMALLEST_NOISE:
        return exact
    return _smallest_written(lambda z: spent(z) <= target_epsilon, near=exact)


@lru_cache(maxsize=64)  # the runs of a suite often share it, and it takes seconds
def noise_of_run(
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
    its count is part of the step (see `adaptive`). What is `measured` besides is part of ε, with the noise it has.
    With a `mechanism` it is the multiplier of the fresh noise that is then correlated.
    """
    check_sizes(population_size, cohort_size=cohort_size)
    check_whole("central_steps", central_steps, most=LARGEST_STEPS)

    besides = None
    if measured is not None:
        besides = measured.event(population_size=population_size, cohort_size=cohort_size, sampling=sampling)

    def whole_run(z: float) -> Event:
        step: Release
        if mechanism is not None:
            step = mechanism.release(z, population_size=population_size, cohort_size=cohort_size)
        elif sampling == "fixed_size":
            step = fixed_size_release(z, cohort_size=cohort_size, population_size=population_size)
        else:
            step = poisson_release(z, sampling_rate=cohort_size / population_size)
        return run_event(step, central_steps, besides)

    if sampling == "fixed_size":  # of which no tight PLD is known
        accountant = "rdp"
    return noise_multiplier_for(target_epsilon, run_event=whole_run, delta=delta, accountant=accountant, cap=cap)


def steps_for(target_epsilon: float, *, step_event: Event, delta: float, accountant: Accountant = "pld") -> int:
    """The most steps within the target (at most ten million)."""
    check_target(target_epsilon)

    def is_too_much(steps: int) -> bool:
        return event_epsilon(repeated(step_event, steps), delta=delta, accountant=accountant) > target_epsilon

    if is_too_much(1):
        one = event_epsilon(step_event, delta=delta, accountant=accountant)
        raise Unreachable(
            f"target_epsilon={target_epsilon:g} cannot be reached: the best is ε = {one:.4g}, with a single step"
        )
    return smallest_whole(is_too_much, start=2, most=LARGEST_STEPS) - 1


def _smallest_written(fits: Callable[[float], bool], *, near: float) -> float:
    """The smallest number of few digits that fits, around `near`: whichever way a search came there."""
    exponent = math.floor(math.log10(near)) + 1 - _NOISE_DIGITS

    def written(digits: int) -> float:
        return float(f"{digits}e{exponent}")

    digits = math.ceil(near / 10.0**exponent)
    while not fits(written(digits)):
        digits += 1
    while fits(written(digits - 1)):
        digits -= 1
    return written(digits)


def written_up(value: float) -> float:
    """The next number of six digits: noise that a plan prints is the noise that a run has, and no less than was asked.

    >>> written_up(0.61440001), written_up(2.0)
    (0.614401, 2.0)
    """
    near = float(f"{value:.{_NOISE_DIGITS}g}")
    return near if near >= value else float(f"{near + 10.0 ** (math.floor(math.log10(near)) + 1 - _NOISE_DIGITS):.6g}")


SMALLEST_TARGET = 1e-30  # nothing can be told below it


def check_target(target_epsilon: float) -> None:
    if not (math.isfinite(target_epsilon) and target_epsilon >= SMALLEST_TARGET):
        raise InputError(f"target_epsilon={target_epsilon}: expected a positive number, {SMALLEST_TARGET:g} or more")
