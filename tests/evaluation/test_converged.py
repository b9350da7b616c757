"""A run has converged if its dev score has not improved for a fifth of its steps, and if enough was seen to say so."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.evaluation import converged
from sottovoce.evaluation.converged import Converged, judge_convergence, judge_metrics

Scores = list[tuple[int, float | None]]


def every(pace: int, *values: float | None) -> Scores:
    return [(pace * n, value) for n, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("scores", "last_step", "expected"),
    [
        ([], 100, "not shown"),
        (every(25, 0.4, 0.3, 0.3, 0.3), 100, "not shown"),  # four evaluations are too few, whatever they say
        (every(25, 0.4, 0.3, 0.2, 0.1), 100, "not shown"),
        (every(20, 0.5, 0.4, 0.3, 0.2, 0.1), 100, "no"),
        (every(20, 0.5, 0.4, 0.3, 0.2, 0.3), 100, "not shown"),  # a fifth, but one evaluation says nothing
        (every(20, 0.5, 0.4, 0.3, 0.3, 0.3), 100, "yes"),  # an equal score is no improvement
        (every(10, *[0.5] * 7, 0.4, 0.5, 0.5), 100, "yes"),  # best at 80 of 100, exactly a fifth old
        (every(10, *[0.5] * 8, 0.4, 0.5), 100, "no"),
        (every(7, 0.5, 0.5, 0.5, 0.4, 0.5), 35, "not shown"),  # 0.2 × 35 is more than 7 in floats
        ([(0, 0.1), *every(20, 0.5, 0.4, 0.3, 0.2, 0.15)], 100, "no"),  # the start is no step of the run
        (every(10, 0.5, 0.4, 0.3, 0.2, 0.1, None, math.nan, math.inf), 80, "not shown"),  # it diverged
        (every(10, *[1.0] * 10), 100, "yes"),  # what never learns does not improve either: least_steps is for that
        (every(10, *[0.5] * 7, 0.4, 0.5, 0.5), 140, "yes"),  # steps after the last evaluation count as well
    ],
)
def test_what_is_said_of_a_run(scores: Scores, last_step: int, expected: Converged) -> None:
    assert judge_convergence(scores, last_step=last_step) == expected


def test_it_is_the_score_that_the_model_was_chosen_by() -> None:
    records = [
        {"step": step, "loss": 1.0, "dev_loss": loss, "dev_wer": 1 - step / 100}
        for step, loss in every(10, *[0.5] * 2, *[0.6] * 4)
    ]
    records.insert(3, {"step": 35, "loss": 1.0})
    assert judge_metrics(records, {"dev_loss": 0.5}, last_step=60) == "yes"
    assert judge_metrics(records, {"dev_wer": 0.4}, last_step=60) == "no"
    assert judge_metrics(records, {"dev_ctc_wer": 0.4}, last_step=60) == "not shown"
    assert judge_metrics(records, {}, last_step=60) == "not shown"


runs = st.lists(st.floats(0, 2), min_size=1, max_size=40)
paces = st.integers(1, 50)


@given(runs, paces)
def test_yes_means_that_the_last_fifth_brought_nothing(values: list[float], pace: int) -> None:
    scores, last = every(pace, *values), pace * len(values)
    early = [value for step, value in scores if 5 * step <= 4 * last]
    said = judge_convergence(scores, last_step=last)
    if said == "yes":
        assert min(early) == min(values)
    if said == "no":
        assert not early or min(values) < min(early)
    if len(values) >= 6:  # two evaluations or more are in the last fifth, or just before it
        assert (said == "no") == (not early or min(values) < min(early))


@given(runs, paces, st.integers(2, 9))
def test_a_unit_of_steps_changes_nothing(values: list[float], pace: int, times: int) -> None:
    said = judge_convergence(every(pace, *values), last_step=pace * len(values))
    assert judge_convergence(every(pace * times, *values), last_step=times * pace * len(values)) == said


@given(runs, paces)
def test_a_best_score_at_the_end_is_never_converged(values: list[float], pace: int) -> None:
    better = [*(value + 1 for value in values), 0.5]
    assert judge_convergence(every(pace, *better), last_step=pace * len(better)) != "yes"


@given(runs, paces, st.floats(0.2, 0.9))
def test_a_larger_share_is_more_to_ask(values: list[float], pace: int, share: float) -> None:
    scores, last = every(pace, *values), pace * len(values)
    if judge_convergence(scores, last_step=last, share=share) == "yes":
        assert judge_convergence(scores, last_step=last) == "yes"


@given(runs, paces)
def test_worse_scores_end_every_run(values: list[float], pace: int) -> None:
    """A quarter more of the run, two evaluations at least, and four more where there were none."""
    more = max(math.ceil(len(values) / 4), 5)
    scores = every(pace, *values, *[3.0] * more)
    assert judge_convergence(scores, last_step=pace * len(scores)) == "yes"


def test_examples_are_true() -> None:
    found = doctest.testmod(converged)
    assert found.attempted > 0
    assert found.failed == 0
