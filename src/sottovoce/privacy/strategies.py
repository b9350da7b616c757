"""Strategies of correlated noise (matrix factorisation), and their sensitivity: what one user can move.

Step t adds z·C·y_t to the sum of clipped updates, with y = (strategy matrix)⁻¹ w and w_t independent N(0, I). The
matrix is lower triangular and Toeplitz: its first column says all of it. It begins with 1, so z is the multiplier of w.
What was added is partly taken back later, and the sums of all rounds so far (what a model is made of) are less noisy.

* `Banded` (Choquette-Choo et al. 2023): the column ends after `bands` entries. With a cycle of at least as many rounds
  between two chances to take part, no two rounds of one user meet, and sampling within the group amplifies.
* `Blt` (buffered linear Toeplitz; Dvijotham et al. 2024, McMahan et al. 2024): column_t = Σ_i scale_i·decay_i^(t−1),
  which never ends, but needs one buffer per decay alone to be made. Here a user is in every round of the own group.

The mathematics is in decisions/031.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError

Column = NDArray[np.float64]

MOST_BANDS, MOST_BUFFERS = 4096, 8


@dataclass(frozen=True, kw_only=True)
class Banded:
    """The first column of the strategy matrix, as far as it is not zero. It begins with 1."""

    column: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (1 <= len(self.column) <= MOST_BANDS and self.column[0] == 1 and np.isfinite(self.column).all()):
            raise InputError(
                f"banded: a column of {len(self.column)}: expected 1 and up to {MOST_BANDS - 1} finite numbers after it"
            )
        object.__setattr__(self, "column", tuple(float(value) for value in self.column))

    @property
    def bands(self) -> int:
        return len(self.column)


@dataclass(frozen=True, kw_only=True)
class Blt:
    """Decays in [0, 1) and positive scales that add up to 1 at most: the column is positive and never grows."""

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.decays) == len(self.scales) <= MOST_BUFFERS:
            raise InputError(
                f"blt: {len(self.decays)} decays and {len(self.scales)} scales: expected as many, 1 to {MOST_BUFFERS}"
            )
        if not all(0 <= decay < 1 for decay in self.decays):
            raise InputError(f"blt: decays={self.decays}: expected numbers from 0 to below 1")
        if not (all(scale > 0 for scale in self.scales) and sum(self.scales) <= 1):
            raise InputError(f"blt: scales={self.scales}: expected positive numbers that add up to 1 at most")
        object.__setattr__(self, "decays", tuple(float(decay) for decay in self.decays))
        object.__setattr__(self, "scales", tuple(float(scale) for scale in self.scales))

    @property
    def buffers(self) -> int:
        return len(self.decays)


Strategy = Banded | Blt


def first_column(strategy: Strategy, steps: int) -> Column:
    """The first column of the strategy matrix of so many steps, [T].

    >>> first_column(Blt(decays=(0.5,), scales=(0.25,)), 4).tolist()
    [1.0, 0.25, 0.125, 0.0625]
    """
    column = np.zeros(steps)
    if isinstance(strategy, Banded):
        column[: strategy.bands] = strategy.column[:steps]
        return column
    column[:1] = 1.0
    later = np.arange(max(steps - 1, 0))
    for decay, scale in zip(strategy.decays, strategy.scales, strict=True):
        column[1:] += scale * decay**later
    return column


def sensitivity(strategy: Strategy, *, rows: int, cycle: int) -> float:
    """How far one user can move `rows` rows of (strategy matrix)·(sums), in units of C.

    Guarantee: the largest norm over all ways in which a user whose rounds are at least `cycle` apart can take part, and
    all updates of norm C. It is reached by the same update in rounds 0, cycle, 2·cycle, …: later ones are cut off
    sooner, and the columns' inner products are not negative (Kalinin and Lampert 2024, Theorem 2), for which the
    column must be positive and never grow; or no two columns of one user meet, and nothing is asked. Else: InputError.
    """
    if rows < 0 or cycle < 1:
        raise InputError(f"rows={rows}, cycle={cycle}: expected rows of at least 0 and a cycle of at least 1")
    if rows == 0:
        return 0.0
    if isinstance(strategy, Banded) and strategy.bands > cycle and (growing := _grows(strategy.column)):
        raise InputError(
            f"banded: bands={strategy.bands} with cycle={cycle}: {growing}; expected no more bands than the cycle"
        )
    if isinstance(strategy, Banded) and rows >= strategy.bands == 1:
        return math.sqrt(-(-rows // cycle))
    return math.sqrt(float(_squared_sensitivities(strategy, _enough(rows), cycle)[rows - 1]))


def _grows(column: tuple[float, ...]) -> str | None:
    if min(column) < 0:
        return f"its column has {min(column):g}, and users' rounds could add up in more ways than are bounded"
    return "its column grows" if bool((np.diff(column) > 0).any()) else None


def _enough(rows: int) -> int:
    """The next power of two: a ledger asks for one more row every round."""
    return 1 << (rows - 1).bit_length()


@lru_cache(maxsize=32)
def _squared_sensitivities(strategy: Strategy, rows: int, cycle: int) -> Column:
    """Of the first 1, 2, …, `rows` rows."""
    return np.cumsum(sum_participations(first_column(strategy, rows), cycle) ** 2)


def sum_participations(column: Column, cycle: int, *, is_transposed: bool = False) -> Column:
    """The sum of the strategy matrix's columns 0, cycle, 2·cycle, …: who takes part whenever it is possible, [T].

    The transpose adds up, for each entry of the column, all later rounds of the user that it is in.
    """
    cycle = max(min(cycle, len(column)), 1)  # who has no second round has none however far it is
    rounds = -(-len(column) // cycle)
    padded = np.zeros(rounds * cycle)
    padded[: len(column)] = column
    blocks = padded.reshape(rounds, cycle)
    summed: Column = blocks[::-1].cumsum(axis=0)[::-1] if is_transposed else blocks.cumsum(axis=0)
    return summed.reshape(-1)[: len(column)]


def strategy_to_json(strategy: Strategy) -> dict[str, Any]:
    """A plain dict that `strategy_from_json` turns back into an equal strategy."""
    if isinstance(strategy, Banded):
        return {"kind": "banded", "column": list(strategy.column)}
    return {"kind": "blt", "decays": list(strategy.decays), "scales": list(strategy.scales)}


def strategy_from_json(data: dict[str, Any]) -> Strategy:
    """The strategy that `strategy_to_json` wrote; anything else is refused."""
    match data:
        case {"kind": "banded", "column": [*column], **rest} if not rest:
            return Banded(column=tuple(column))
        case {"kind": "blt", "decays": [*decays], "scales": [*scales], **rest} if not rest:
            return Blt(decays=tuple(decays), scales=tuple(scales))
    raise InputError(f"strategy {data!r}: expected banded with a column, or blt with decays and scales")
