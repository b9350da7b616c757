"""Whether a run had converged: whether its dev score had stopped improving before the run ended.

A run has converged if its best dev score is at least a fifth of the run old: nothing improved in the last fifth of its
steps. Any lower score is an improvement, however little. The score is the one that the model was chosen by. What the
start model has is left out: a run that first gets worse than its start and then recovers has not converged.

To say so takes evaluations: at least five in all, two of them after the best. With fewer it is not shown. A score that
is not finite shows nothing, so a run that diverges does not converge by it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from sottovoce.evaluation.measures import MEASURES

Converged = Literal["yes", "no", "not shown"]
VERDICTS: tuple[Converged, ...] = ("yes", "no", "not shown")

UNIMPROVED_SHARE = 0.2
FEWEST_EVALUATIONS, FEWEST_AFTER_BEST = 5, 2


def judge_convergence(
    scores: Sequence[tuple[int, float | None]], *, last_step: int, share: float = UNIMPROVED_SHARE
) -> Converged:
    """Whether a run of `last_step` steps had converged, by its dev `scores`: (steps made, score), in this order.

    >>> scores = [(10, 0.9), (20, 0.5), (30, 0.4), (40, 0.42), (50, 0.41)]
    >>> judge_convergence(scores, last_step=50)
    'yes'
    >>> judge_convergence([*scores, (60, 0.39)], last_step=60), judge_convergence(scores[:4], last_step=40)
    ('no', 'not shown')
    """
    found = [(step, score) for step, score in scores if step > 0 and score is not None and math.isfinite(score)]
    if len(found) < FEWEST_EVALUATIONS:
        return "not shown"
    best_step, _ = min(found, key=lambda one: one[1])  # the first of equals
    if last_step - best_step < Fraction(str(share)) * last_step:  # exact: 0.2 × 35 is more than 7 in floats
        return "no"
    return "yes" if sum(step > best_step for step, _ in found) >= FEWEST_AFTER_BEST else "not shown"


def judge_metrics(records: Iterable[Mapping[str, Any]], model: Mapping[str, Any], *, last_step: int) -> Converged:
    """The same from the records of `metrics.jsonl`; `model`, of `results.json`, says what it was chosen by."""
    key = next((key for measure in MEASURES.values() if (key := measure.key("dev")) in model), None)
    found = [(record.get("step"), record.get(key)) for record in records] if key is not None else []
    # A folder may hold anything: what is no number shows nothing.
    scores = [(step, score) for step, score in found if isinstance(step, int) and isinstance(score, int | float)]
    return judge_convergence(scores, last_step=last_step)
