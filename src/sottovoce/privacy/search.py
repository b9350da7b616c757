"""Where an ε that falls meets its target, and the smallest whole number for which something holds."""

import math
from bisect import bisect_left
from collections.abc import Callable

from sottovoce.base.errors import InputError


class Unreachable(InputError):
    """No number that may be tried brings ε to its target."""


def falls_to(
    target: float,
    spent: Callable[[float], float],
    *,
    start: float,
    factor: float,
    precision: float,
    least: float = math.inf,
    most: float = math.inf,
    at: Callable[[float], str] = lambda x: "",
) -> float:
    """The smallest x, to `precision`, with `spent(x)` ≤ target; `spent` falls with x.

    Brackets it from `start` by steps of `factor`, up to `most` or down to `least` (not below `start` unless given),
    and closes in by Brent's method. Where nothing will do it is `Unreachable`, and `at` says with what the best was.
    """
    low = high = start
    while spent(high) > target:
        low, high = high, high * factor
        if high > most:
            raise Unreachable(f"target_epsilon={target:g} cannot be reached: the best is ε = {spent(low):.4g}{at(low)}")
    while low == high:  # `start` is within the target
        if high <= least:
            return high
        low = max(high / factor, least)
        if spent(low) <= target:
            high = low
    return _crossing(spent, low, high, target=target, precision=precision)


def _crossing(spent: Callable[[float], float], low: float, high: float, *, target: float, precision: float) -> float:
    """Between `low` (above the target) and `high` (within), from the side that is within."""
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


def smallest_whole(holds: Callable[[int], bool], *, start: int, most: int = 2**62) -> int:
    """The smallest number from `start` on that `holds`, if all after it do; `most` + 1 where none up to `most` does.

    >>> smallest_whole(lambda n: n * n > 1000, start=1, most=100), smallest_whole(lambda n: False, start=1, most=9)
    (32, 10)
    """
    low, high = start, start
    while high < most and not holds(high):
        low, high = high + 1, min(2 * high, most)
    return bisect_left(range(high + 1), True, lo=low, key=holds)
