"""Synthetic corpora of absurd sizes, listed as `prepare synthetic` does: refused at once, or soon done."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from faulty.children import Case
from sottovoce.base.seeds import stream
from sottovoce.corpora import synthetic

WHAT = "sizes of synthetic corpora"
USERS = (-1, 0, 1, 3, 7, 40, 1_000, 1_000_001, 10**9, 10**12, 2**63, 10**30)
HOURS = (None, -1.0, 0.0, 5e-324, 1e-300, 1e-9, 1e-3, 0.1, 1.0, 40.0, 1e5, 1e9, 1e300, float("inf"), float("nan"))


def cases(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    for number in range(count):
        rng = stream(seed, WHAT, number)
        task = list(synthetic.PRESETS)[int(rng.integers(len(synthetic.PRESETS)))]
        users, hours = USERS[int(rng.integers(len(USERS)))], HOURS[int(rng.integers(len(HOURS)))]
        words = f"case {number}, {task} of users={users}, hours={hours}"
        yield Case(WHAT, words, partial(_listed, task, users, hours, seed, folder / "store"))


def _listed(task: str, users: int, hours: float | None, seed: int, out: Path) -> int:
    return len(synthetic.read(task, users=users, hours=hours, seed=seed, out=out).speakers)
