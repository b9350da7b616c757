"""Errors between what was said and what was recognised, counted per utterance: all that follows is sums of counts.

Shapes: U utterances, 4 columns: units of the reference (words or characters), substitutions, deletions, insertions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jiwer
import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError

Counts = NDArray[np.int64]
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


def tally(counts_U4: Counts) -> Tally:
    return Tally(*counts_U4.sum(axis=0).tolist())


def count_words(references: Sequence[str], hypotheses: Sequence[str]) -> Counts:
    """Word errors of each utterance: [U, 4].

    >>> count_words(["the cat sat", ""], ["a cat", "mat"]).tolist()
    [[3, 1, 1, 0], [0, 0, 0, 1]]
    """
    return _count([text.split() for text in references], [text.split() for text in hypotheses])


def count_characters(references: Sequence[str], hypotheses: Sequence[str]) -> Counts:
    """Character errors of each utterance, the single spaces between words among them: [U, 4]."""
    return _count(
        [list(" ".join(text.split())) for text in references], [list(" ".join(text.split())) for text in hypotheses]
    )


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """The word error rate of a corpus: all errors over all words of the references.

    >>> word_error_rate(["the cat sat"], ["a cat"])
    0.6666666666666666
    """
    rate = tally(count_words(references, hypotheses)).rate
    if rate is None:
        raise InputError(f"no word in any of {len(references)} references: there is no error rate")
    return rate


def _count(references: list[list[str]], hypotheses: list[list[str]]) -> Counts:
    assert len(references) == len(hypotheses), (len(references), len(hypotheses))
    counts_U4 = np.zeros((len(references), 4), dtype=np.int64)
    counts_U4[:, 0] = [len(units) for units in references]
    # Older releases of jiwer refuse an empty reference; all that a hypothesis can do to one is insert.
    counts_U4[:, 3] = [0 if said else len(heard) for said, heard in zip(references, hypotheses, strict=True)]
    spoken = np.flatnonzero(counts_U4[:, 0])
    if not len(spoken):
        return counts_U4
    # jiwer's types know only strings, but with the texts as lists of units already it has nothing to transform.
    process: Any = jiwer.process_words
    said, heard = [references[i] for i in spoken], [hypotheses[i] for i in spoken]
    output = process(said, heard, reference_transform=_as_given, hypothesis_transform=_as_given)
    for row, steps in zip(spoken, output.alignments, strict=True):
        for step in steps:
            if step.type != "equal":
                length = max(step.ref_end_idx - step.ref_start_idx, step.hyp_end_idx - step.hyp_start_idx)
                counts_U4[row, _COLUMNS[step.type]] += length
    return counts_U4


def _as_given(units: list[list[str]]) -> list[list[str]]:
    return units
