"""Word and character error rates: counted by utterance, summed by speaker, with bootstrap intervals over speakers.

Shapes: U utterances, S speakers, D draws; 4 columns: units of the reference (words or characters), substitutions,
deletions, insertions.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jiwer
import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError

Counts = NDArray[np.int64]
Interval = tuple[float, float]

DRAWS = 1_000
CONFIDENCE = 0.95
# Three people drawn anew are nearly always the same three: what looks like an interval would be far too narrow.
FEWEST_SPEAKERS = 5
# Draws are made in blocks of so many speakers: a corpus of fifty thousand must not take a gigabyte.
BLOCK_SPEAKERS = 1 << 21
# What jiwer calls each kind of step; "equal" is none of them, and its releases name a substitution in two ways.
_COLUMNS = {"substitute": 1, "replace": 1, "delete": 2, "insert": 3}


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of some counts. `length` is what the error rate divides by: the units of the references."""

    length: int
    substitutions: int
    deletions: int
    insertions: int

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """Errors per unit of the references: above 1 where much was inserted, None where the references are empty."""
        return self.errors / self.length if self.length else None


def sum_counts(counts_U4: Counts) -> Tally:
    return Tally(*counts_U4.sum(axis=0).tolist())


def count_word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Counts:
    """Word errors of each utterance: [U, 4].

    >>> count_word_errors(["the cat sat", ""], ["a cat", "mat"]).tolist()
    [[3, 1, 1, 0], [0, 0, 0, 1]]
    """
    return _count([text.split() for text in references], [text.split() for text in hypotheses])


def count_character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Counts:
    """Character errors of each utterance, the single spaces between words among them: [U, 4]."""
    spelled, recognised = ([list(" ".join(text.split())) for text in texts] for texts in (references, hypotheses))
    return _count(spelled, recognised)


def compute_wer(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """The word error rate of a corpus: all errors over all words of the references.

    >>> compute_wer(["the cat sat"], ["a cat"])
    0.6666666666666666
    """
    rate = sum_counts(count_word_errors(references, hypotheses)).rate
    if rate is None:
        raise InputError(f"no word in any of {len(references)} references: there is no error rate")
    return rate


def _count(references: list[list[str]], hypotheses: list[list[str]]) -> Counts:
    assert len(references) == len(hypotheses), (len(references), len(hypotheses))
    counts_U4 = np.zeros((len(references), 4), dtype=np.int64)
    counts_U4[:, 0] = [len(units) for units in references]
    # Older releases of jiwer refuse an empty reference; all that a hypothesis can do to one is insert.
    counts_U4[:, 3] = [0 if said else len(found) for said, found in zip(references, hypotheses, strict=True)]
    spoken = np.flatnonzero(counts_U4[:, 0])
    if not len(spoken):
        return counts_U4
    # jiwer's types know only strings, but with the texts as lists of units already it has nothing to transform.
    process: Any = jiwer.process_words
    said, found = [references[i] for i in spoken], [hypotheses[i] for i in spoken]
    output = process(said, found, reference_transform=_as_given, hypothesis_transform=_as_given)
    for row, steps in zip(spoken, output.alignments, strict=True):
        for step in steps:
            if step.type != "equal":
                length = max(step.ref_end_idx - step.ref_start_idx, step.hyp_end_idx - step.hyp_start_idx)
                counts_U4[row, _COLUMNS[step.type]] += length
    return counts_U4


def _as_given(units: list[list[str]]) -> list[list[str]]:
    return units


def sum_by_owner(counts_U4: Counts, owners: NDArray[np.int64], *, owner_count: int) -> Counts:
    """The counts of each owner 0 … owner_count - 1 (a speaker, a group), from those of utterances or speakers."""
    sums = np.zeros((owner_count, counts_U4.shape[1]), dtype=np.int64)
    np.add.at(sums, owners, counts_U4)
    return sums


def bootstrap_interval(counts_S4: Counts, *, generator: np.random.Generator, draws: int = DRAWS) -> Interval | None:
    """A bootstrap confidence interval of the error rate (percentiles): speakers are resampled, with all they said.

    Utterances of one person are alike, so drawing utterances would make the interval too narrow. None where fewer
    than `FEWEST_SPEAKERS` have a reference.
    """
    if (counts_S4[:, 0] > 0).sum() < FEWEST_SPEAKERS:
        return None
    lengths_S, errors_S = counts_S4[:, 0], counts_S4[:, 1:].sum(axis=1)
    return percentile_interval(bootstrap_rates(lengths_S, errors_S, generator=generator, draws=draws))


def bootstrap_rates(
    lengths_S: NDArray[np.int64],
    errors_S: NDArray[np.int64] | NDArray[np.float64],
    *,
    generator: np.random.Generator,
    draws: int = DRAWS,
) -> NDArray[np.float64]:
    """The error rate of each of `draws` samples of as many speakers, drawn with replacement with all they said.

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


def percentile_interval(drawn_D: NDArray[np.float64], *, confidence: float = CONFIDENCE) -> Interval:
    """What holds `confidence` of the draws, with as many on either side."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn_D, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class SpeakerSpread:
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


def compute_rates(counts_S4: Counts) -> NDArray[np.float64]:
    """The error rate of each speaker; NaN for one without a reference."""
    lengths_S, errors_S = counts_S4[:, 0], counts_S4[:, 1:].sum(axis=1)
    return np.where(lengths_S > 0, errors_S / np.maximum(lengths_S, 1), np.nan)


def measure_spread(counts_S4: Counts) -> SpeakerSpread:
    """The spread over the speakers with a reference; there is at least one. `std` is the population's."""
    rates_S = np.sort(compute_rates(counts_S4[counts_S4[:, 0] > 0]))
    tenth = max(round(len(rates_S) / 10), 1)
    quantiles = np.quantile(rates_S, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]).tolist()
    best, worst = float(rates_S[:tenth].mean()), float(rates_S[-tenth:].mean())
    in_order: list[float] = [float(rates_S.mean()), float(rates_S.std()), *quantiles, best, worst]
    return SpeakerSpread(*in_order)
