"""How much a run does, counted before it begins: evaluations, checkpoints, bytes. Nothing here is measured."""

import math
from collections.abc import Iterable

BYTES = 4  # float32
# The two newest checkpoints, the best one, and the one that is being written (`checkpoint.prune`).
KEPT_CHECKPOINTS = 4
FRAMES_PER_SECOND = 100 / 3  # a model's, after its front: for counting operations, to a factor
FORWARD, TRAINING = 2, 6  # operations for each parameter and frame, backwards included in training


def evaluations(*, steps: int, every: int, at_start: bool) -> int:
    """How often the dev speakers are recognised: every so many steps, after the last, and before the first.

    >>> evaluations(steps=30, every=15, at_start=True), evaluations(steps=31, every=15, at_start=False)
    (3, 3)
    """
    return -(-steps // every) + at_start


def saves(*, steps: int, evaluate_every: int, checkpoint_every: int) -> int:
    """How many checkpoints are written: with each evaluation, every so many steps, and at the end.

    >>> saves(steps=30, evaluate_every=15, checkpoint_every=10), saves(steps=7, evaluate_every=5, checkpoint_every=5)
    (4, 2)
    """
    both = math.lcm(evaluate_every, checkpoint_every)
    regular = steps // evaluate_every + steps // checkpoint_every - steps // both
    return regular + bool(steps % evaluate_every and steps % checkpoint_every)


def checkpoint_bytes(trained: int, *, slots: int, frozen: int = 0) -> int:
    """What a run's folder holds at most: so many parameters, and `slots` numbers more for each of those trained.

    >>> checkpoint_bytes(10, slots=2, frozen=5)
    500
    """
    return BYTES * (KEPT_CHECKPOINTS * trained * (1 + slots) + frozen)


def operations(parameters: int, audio_seconds: float, *, each: int = TRAINING) -> float:
    """Floating-point operations for so much audio, to a factor of two or so: enough to see whether they are many."""
    return each * parameters * audio_seconds * FRAMES_PER_SECOND


def told_time(seconds: float) -> str:
    """Two digits that count, in the unit that suits.

    >>> told_time(42), told_time(600), told_time(7200), told_time(1e6)
    ('42 s', '10 min', '2 h', '280 h')
    """
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (math.inf, "h", 3600)):
        if seconds < limit:
            return f"{_two_digits(seconds / size)} {unit}"
    raise AssertionError("no time is infinite")


def told_bytes(size: float) -> str:
    """In decimal units, as disks are sold.

    >>> told_bytes(12_300_000), told_bytes(4_100_000_000)
    ('12 MB', '4.1 GB')
    """
    return f"{_two_digits(size / 1e9)} GB" if size >= 1e9 else f"{_two_digits(size / 1e6)} MB"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.10g}"


def total(values: Iterable[float | None]) -> float | None:
    """Their sum; None where one of them is not known."""
    found = list(values)
    return None if any(value is None for value in found) else sum(value for value in found if value is not None)
