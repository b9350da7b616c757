"""Lines through what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.base.errors import check_invariant


@dataclass(frozen=True)
class Line:
    """y = start + slope·x, and the largest distance of a point from it, as a share of the point."""

    start: float
    slope: float
    residual: float

    def at(self, x: float) -> float:
        return self.start + self.slope * x


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line with the least squares of *relative* errors: points over orders of magnitude count alike.

    >>> line = fit_line([1, 10, 100], [5, 23, 203])
    >>> round(line.start, 9), round(line.slope, 9), round(line.residual, 9)
    (3.0, 2.0, 0.0)
    """
    check_invariant(len(x) == len(y) >= 2, f"a line through {len(x)} and {len(y)} numbers")
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    check_invariant(bool((ys > 0).all()), "relative errors of numbers that are not positive")
    (start, slope), *_ = np.linalg.lstsq(np.stack([1 / ys, xs / ys], axis=1), np.ones(len(ys)), rcond=None)
    off = np.abs(start + slope * xs - ys) / ys
    return Line(float(start), float(slope), float(off.max()))
