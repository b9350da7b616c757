"""Checks of the numbers that users set, and the one line they get when a number is wrong."""

import math

from sottovoce.base.errors import InputError


def check_range(owner: object, *names: str, low: float, below: float = math.inf) -> None:
    """Raises InputError unless the named settings of `owner` are numbers with low <= value < below."""
    for name in names:
        value = getattr(owner, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and low <= value < below):
            expected = f"at least {low}" + ("" if below == math.inf else f" and below {below}")
            raise InputError(f"{type(owner).__name__}: {name}={value!r}, expected a finite number, {expected}")


def check_count(owner: object, *names: str, low: int) -> None:
    """Raises InputError unless the named settings of `owner` are whole numbers of at least `low`."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InputError(f"{type(owner).__name__}: {name}={value!r}, expected a whole number, at least {low}")
