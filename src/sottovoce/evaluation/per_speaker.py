"""How errors are spread over people, and how sure a rate is that was measured on these people and not on others.

Shapes: S speakers, D draws; columns as in `wer`.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.evaluation.wer import Counts

DRAWS = 1_000
CONFIDENCE = 0.95
# Three people drawn anew are nearly always the same three: what looks like an interval would be far too narrow.
FEWEST_SPEAKERS = 5
# Draws are made in blocks of so many speakers: a corpus of fifty thousand must not take a gigabyte.
BLOCK_SPEAKERS = 1 << 21

Interval = tuple[float, float]


def sum_by(counts_U4: Counts, owners: NDArray[np.int64], *, owner_count: int) -> Counts:
    """The counts of each owner 0 … owner_count - 1 (a speaker, a group), from those of utterances or speakers."""
    sums = np.zeros((owner_count, counts_U4.shape[1]), dtype=np.int64)
    np.add.at(sums, owners, counts_U4)
    return sums


def interval(counts_S4: Counts, *, generator: np.random.Generator, draws: int = DRAWS) -> Interval | None:
    """A bootstrap confidence interval of the error rate (percentiles): speakers are drawn anew, with all they said.

    Utterances of one person are alike, so drawing utterances would make the interval too narrow. None where fewer
    than `FEWEST_SPEAKERS` have a reference.
    """
    if (counts_S4[:, 0] > 0).sum() < FEWEST_SPEAKERS:
        return None
    lengths_S, errors_S = counts_S4[:, 0], counts_S4[:, 1:].sum(axis=1)
    return percentiles(drawn_rates(lengths_S, errors_S, generator=generator, draws=draws))


def drawn_rates(
    lengths_S: NDArray[np.int64],
    errors_S: NDArray[np.int64] | NDArray[np.float64],
    *,
    generator: np.random.Generator,
    draws: int = DRAWS,
) -> NDArray[np.float64]:
    """The error rate of each of `draws` crowds of as many speakers, drawn anew from these with all they said.

    `errors_S` may be one model's less another's: who is drawn is then drawn for both, which is what pairs them.
    """
    speakers = len(lengths_S)
    rates: list[NDArray[np.float64]] = []
    block = max(BLOCK_SPEAKERS // speakers, 1)
    for first in range(0, draws, block):
        drawn = generator.integers(speakers, size=(min(block, draws - first), speakers))
        lengths, errors = lengths_S[drawn].sum(axis=1), errors_S[drawn].sum(axis=1)
        # A draw of nothing but speakers without a reference has no rate.
        rates.append(errors[lengths > 0] / lengths[lengths > 0])
    return np.concatenate(rates)


def percentiles(drawn_D: NDArray[np.float64], *, confidence: float = CONFIDENCE) -> Interval:
    """What holds `confidence` of the draws, with as many on either side."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn_D, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Spread:
    """How error rates differ between speakers, each counting once. Tenths are means over that share of them."""

    mean: float
    std: float
    min: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    max: float
    best_tenth: float
    worst_tenth: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def rates(counts_S4: Counts) -> NDArray[np.float64]:
    """The error rate of each speaker; NaN for one without a reference."""
    lengths_S, errors_S = counts_S4[:, 0], counts_S4[:, 1:].sum(axis=1)
    return np.where(lengths_S > 0, errors_S / np.maximum(lengths_S, 1), np.nan)


def spread(counts_S4: Counts) -> Spread:
    """The spread over the speakers with a reference; there is at least one. `std` is the population's."""
    rates_S = np.sort(rates(counts_S4[counts_S4[:, 0] > 0]))
    tenth = max(round(len(rates_S) / 10), 1)
    p10, p25, median, p75, p90 = np.quantile(rates_S, [0.1, 0.25, 0.5, 0.75, 0.9]).tolist()
    return Spread(
        mean=float(rates_S.mean()),
        std=float(rates_S.std()),
        min=float(rates_S[0]),
        p10=p10,
        p25=p25,
        median=median,
        p75=p75,
        p90=p90,
        max=float(rates_S[-1]),
        best_tenth=float(rates_S[:tenth].mean()),
        worst_tenth=float(rates_S[-tenth:].mean()),
    )
