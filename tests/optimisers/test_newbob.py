"""NewBob against SpeechBrain's rule, worked out by hand."""

import math

import pytest

from sottovoce.base.errors import InputError
from sottovoce.optimisers import Annealed, NewBob


def scales(rule: NewBob, scores: list[float]) -> list[float]:
    standing, found = Annealed(), []
    for score in scores:
        standing = rule.after(standing, score)
        found.append(standing.scale)
    return found


def test_the_rate_falls_after_each_score_that_is_hardly_better_than_the_last() -> None:
    """From 4.0: to 3.0 is a quarter better; to 2.995 a sixth of a per cent; to 3.1 it is worse; to 2.0 better again."""
    assert scales(NewBob(), [4.0, 3.0, 2.995, 3.1, 2.0]) == pytest.approx([1.0, 1.0, 0.8, 0.64, 0.64])


def test_exactly_so_much_better_is_enough() -> None:
    assert scales(NewBob(improvement=0.25, factor=0.5), [4.0, 3.0, 2.25, 2.0]) == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_no_improvement_and_is_not_compared_with(wrong: float) -> None:
    assert scales(NewBob(), [4.0, wrong, 3.0]) == [1.0, 0.8, 0.8]
    assert scales(NewBob(), [0.0, 0.0]) == [1.0, 0.8]


@pytest.mark.parametrize("wrong", [{"factor": 0.0}, {"factor": 1.0}, {"improvement": -0.1}, {"improvement": 1.0}])
def test_mistakes_are_one_line(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"NewBob: {next(iter(wrong))}="):
        NewBob(**wrong)
