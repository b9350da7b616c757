"""Measures that models are chosen by, on speakers who are not trained on. Lower is always better.

In run folders a score stands under its measure's name (`dev_wer`, `best_loss`), so that whoever reads one knows what it
is a score of.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MeasureName = Literal["wer", "ctc_wer", "loss"]


@dataclass(frozen=True)
class Measure:
    """`title` is what it is called in a line, `in_full` in a sentence; `form` is how a value is shown."""

    name: MeasureName
    title: str
    in_full: str
    form: str

    @property
    def is_rate(self) -> bool:
        return self.form.endswith("%")

    def key(self, what: str) -> str:
        """What the score of `what` ("dev", "best") is written under."""
        return f"{what}_{self.name}"

    def entry(self, what: str, score: "Score | None") -> dict[str, float | None]:
        """The score of `what` as it is written down; None where there is none, or no finite one."""
        return {self.key(what): score.value if score is not None and math.isfinite(score.value) else None}

    def read(self, what: str, record: Mapping[str, Any]) -> "Score | None":
        """What `entry` has written."""
        value = record[self.key(what)]
        return None if value is None else Score(self, value)


WER = Measure("wer", "WER", "word error rate", ".1%")
# By the CTC head alone, of a model that searches with attention otherwise.
CTC_WER = Measure("ctc_wer", "WER by CTC", "word error rate by CTC", ".1%")
LOSS = Measure("loss", "loss", "mean loss of an utterance", ".3f")

MEASURES: Mapping[MeasureName, Measure] = {measure.name: measure for measure in (WER, CTC_WER, LOSS)}


@dataclass(frozen=True)
class Score:
    """How well a model does by one measure.

    >>> f"dev {Score(WER, 0.25)}"
    'dev WER 25.0%'
    """

    measure: Measure
    value: float

    def is_better_than(self, other: "Score | None") -> bool:
        """What is not finite is never better; of two that are equal, neither is better."""
        assert other is None or other.measure == self.measure, "scores by different measures do not compare"
        return math.isfinite(self.value) and (other is None or self.value < other.value)

    def __str__(self) -> str:
        return f"{self.measure.title} {self.value:{self.measure.form}}"


def score_from_figures(figures: Mapping[str, float]) -> tuple[Score, dict[str, float]]:
    """The loss among `figures` as a score, and the others as they are written down beside it."""
    return Score(LOSS, figures["loss"]), {f"dev_{name}": value for name, value in figures.items() if name != "loss"}
