"""The other way round: from a target ε to the noise, the steps or the population that reach it.

ε falls with noise and population and grows with steps and sampling rate, so each answer is where ε crosses the
target. Searches run on a coarser PLD grid; that only ever overstates ε, so an answer that passed the search passes the
careful account. Noise, which runs are made with, is then found by the careful account itself.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal

from sottovoce.errors import InputError
from sottovoce.privacy.accounting import pld_epsilon, rdp_epsilon
from sottovoce.privacy.correlated import Correlated
from sottovoce.privacy.events import (
    LARGEST_POPULATION,
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

# "pld" is the tight ε (RDP where there is no PLD). "rdp" is what the ledger can follow step by step: calibrate by it
# when a run must spend all its steps within an `epsilon_budget`.
Accountant = Literal["pld", "rdp"]

_SMALLEST_NOISE, _LARGEST_NOISE = 2.0**-12, 2.0**20
_ROUGH_NOISE, _NOISE_DIGITS = 1e-3, 6
_POPULATION_PRECISION = 1e-3


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
    _check_target(target_epsilon)

    def roughly(z: float) -> float:
        return event_epsilon(run_event(z), delta=delta, accountant=accountant)

    @cache
    def spent(z: float) -> float:
        return event_epsilon(run_event(z), delta=delta, accountant=accountant, cap=cap)

    high = 1.0
    while roughly(high) > target_epsilon:
        high *= 4
        if high > _LARGEST_NOISE:
            raise _unreachable(target_epsilon, roughly(_LARGEST_NOISE), f"noise_multiplier={_LARGEST_NOISE:g}")
    low = high / 4
    while roughly(low) <= target_epsilon:
        high, low = low, low / 4
        if low < _SMALLEST_NOISE:
            return high
    if accountant == "pld":  # a careful one takes a second: most of the way goes by quick ones
        high = low = crossing(roughly, low, high, target=target_epsilon, precision=_ROUGH_NOISE)
        while spent(low) <= target_epsilon:
            high, low = low, low * (1 - 4 * _ROUGH_NOISE)
    digit = 10.0 ** (1 - _NOISE_DIGITS)
    exact = crossing(spent, low, high, target=target_epsilon, precision=digit / 10)
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
    _check_target(target_epsilon)

    def fits(steps: int) -> bool:
        return event_epsilon(repeated(step_event, steps), delta=delta, accountant=accountant) <= target_epsilon

    if not fits(1):
        one = event_epsilon(step_event, delta=delta, accountant=accountant)
        raise _unreachable(target_epsilon, one, "a single step")
    return _largest(fits, low=1, high=LARGEST_STEPS)


def population_for(
    target_epsilon: float,
    *,
    sigma_dp: float,
    sampling_rate: float,
    central_steps: int,
    delta: float,
    max_cohort: int | None = None,
    accountant: Accountant = "pld",
    measured: Callable[[int], Measured | None] = lambda cohort: None,
) -> tuple[int, int]:
    """The smallest population (to 0.1 %) for which the recipe reaches the target, and its cohort.

    σ_DP, q and T stay; the cohort is qK up to `max_cohort`, and from there on only the population grows. `measured` is
    what such a run measures besides with cohorts of so many.
    """
    _check_target(target_epsilon)

    def cohort_of(population: int) -> int:
        cohort = max(1, round(sampling_rate * population))
        return cohort if max_cohort is None else min(cohort, max_cohort)

    def spent(population: int) -> float:
        cohort = cohort_of(population)
        step, asked = poisson_release(sigma_dp * cohort, sampling_rate=cohort / population), measured(cohort)
        besides = None if asked is None else asked.event(population_size=population, cohort_size=cohort)
        return event_epsilon(run_event(step, central_steps, besides), delta=delta, accountant=accountant)

    high = low = math.ceil(1 / sampling_rate)
    if spent(low) <= target_epsilon:
        return low, cohort_of(low)
    while spent(high) > target_epsilon:
        low, high = high, high * 10
        if high > LARGEST_POPULATION:
            at = f"population_size={low} and cohort_size={cohort_of(low)}"
            raise _unreachable(target_epsilon, spent(low), at)
    population = crossing(
        lambda size: spent(math.ceil(size)), low, high, target=target_epsilon, precision=_POPULATION_PRECISION
    )
    return math.ceil(population), cohort_of(math.ceil(population))


def crossing(spent: Callable[[float], float], low: float, high: float, *, target: float, precision: float) -> float:
    """Where ε falls to the target between `low` (above it) and `high` (within), from the side that is within."""
    from scipy.optimize import brentq  # here: half a second to load, and few calibrate

    log_low, log_high = math.log(low), math.log(high)

    def excess(log_x: float) -> float:
        # The ends are known by value: exp(log(x)) is not quite x, which matters where ε jumps.
        x = low if log_x <= log_low else high if log_x >= log_high else math.exp(log_x)
        return math.log(max(spent(x), 1e-300)) - math.log(target)

    found = math.exp(brentq(excess, log_low, log_high, xtol=precision / 4))
    found *= 1 + precision / 2
    while spent(found) > target:
        found *= 1 + precision / 2
    return min(found, high)


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


def _largest(fits: Callable[[int], bool], *, low: int, high: int) -> int:
    """The largest count up to `high` that fits, given that `low` does and that fitting never comes back."""
    step = low
    while low < high:
        step = min(2 * step, high)
        if not fits(step):
            break
        low = step
    else:
        return high
    above = step
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if fits(middle) else (low, middle)
    return low


SMALLEST_TARGET = 1e-30  # nothing can be told below it


def _check_target(target_epsilon: float) -> None:
    if not (math.isfinite(target_epsilon) and target_epsilon >= SMALLEST_TARGET):
        raise InputError(f"target_epsilon={target_epsilon}: expected a positive number, {SMALLEST_TARGET:g} or more")


def _unreachable(target: float, best: float, at: str) -> InputError:
    return InputError(f"target_epsilon={target:g} cannot be reached: the best is ε = {best:.4g}, with {at}")
