"""A score knows what it is a score of, and is written under that name."""

import math

import pytest

from sottovoce.evaluation.measures import LOSS, MEASURES, WER, Measure, Score


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_lower_is_better_and_what_is_not_finite_never_is(measure: Measure) -> None:
    one, two = Score(measure, 1.0), Score(measure, 2.0)
    assert one.is_better_than(None)
    assert one.is_better_than(two)
    assert not two.is_better_than(one)
    assert not one.is_better_than(one), "an equal one does not take the best one's place"
    for nothing in (math.nan, math.inf):
        assert not Score(measure, nothing).is_better_than(None)
        assert not Score(measure, nothing).is_better_than(two)


def test_scores_by_different_measures_do_not_compare() -> None:
    with pytest.raises(AssertionError, match="different measures"):
        Score(LOSS, 0.1).is_better_than(Score(WER, 0.2))


def test_what_is_written_down_names_its_measure_and_comes_back() -> None:
    """Run folders since the first have these keys."""
    assert WER.entry("dev", Score(WER, 0.25)) == {"dev_wer": 0.25}
    assert LOSS.entry("best", Score(LOSS, 3.5)) == {"best_loss": 3.5}
    for measure in MEASURES.values():
        for score in (None, Score(measure, 0.5)):
            assert measure.read("best", measure.entry("best", score)) == score
        assert measure.read("best", measure.entry("best", Score(measure, math.nan))) is None, "JSON has no such number"


def test_a_rate_is_shown_in_per_cent_and_a_loss_as_a_number() -> None:
    assert str(Score(WER, 0.0834)) == "WER 8.3%"
    assert str(Score(LOSS, 12.3456)) == "loss 12.346"
