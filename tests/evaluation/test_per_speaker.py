"""The bootstrap over speakers, and the spread."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.seeds import stream
from sottovoce.evaluation import per_speaker
from sottovoce.evaluation.per_speaker import interval, rates, spread, sum_by


def counts(lengths: list[int], errors: list[int]) -> np.ndarray:
    return np.array([[length, wrong, 0, 0] for length, wrong in zip(lengths, errors, strict=True)], dtype=np.int64)


def crowd(rng: np.random.Generator, *, speakers: int) -> np.ndarray:
    """Speakers of very different skill and talkativeness; the true rate is 0.2 whatever the length."""
    lengths = rng.integers(5, 200, speakers)
    return counts(lengths.tolist(), rng.binomial(lengths, rng.beta(2, 8, speakers)).tolist())


def test_interval_is_the_same_for_the_same_stream_and_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_S4 = crowd(stream(1, "crowd"), speakers=50)
    first = interval(counts_S4, generator=stream(1, "draws"))
    assert first == interval(counts_S4, generator=stream(1, "draws"))
    assert first != interval(counts_S4, generator=stream(2, "draws"))
    monkeypatch.setattr(per_speaker, "BLOCK_SPEAKERS", 700)
    assert first == interval(counts_S4, generator=stream(1, "draws"))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(200):
        bounds = interval(crowd(stream(trial, "crowd"), speakers=60), generator=stream(trial, "draws"), draws=300)
        assert bounds is not None
        covered += bounds[0] <= 0.2 <= bounds[1]
    # 95 % of 200 trials are 190, give or take 3; percentile intervals of 60 speakers run a little narrow.
    assert 178 <= covered <= 198


def test_interval_of_speakers_who_are_all_alike_is_a_point() -> None:
    assert interval(counts([10, 20, 40, 10, 30], [1, 2, 4, 1, 3]), generator=stream(1)) == pytest.approx((0.1, 0.1))


def test_interval_is_wider_over_speakers_than_over_utterances() -> None:
    # Ten utterances of each of 20 speakers who understand all or nothing: the utterances are not independent.
    by_speaker = counts([50] * 20, [50, 0] * 10)
    by_utterance = counts([5] * 200, [5] * 100 + [0] * 100)
    wide, narrow = interval(by_speaker, generator=stream(1)), interval(by_utterance, generator=stream(1))
    assert wide is not None
    assert narrow is not None
    # Standard deviations sqrt(0.25/20) and sqrt(0.25/200): a ratio of 3.2.
    assert (wide[1] - wide[0]) / (narrow[1] - narrow[0]) == pytest.approx(np.sqrt(10), rel=0.15)


def test_too_few_speakers_have_no_interval() -> None:
    assert interval(counts([10] * 4, [1] * 4), generator=stream(1)) is None
    assert interval(counts([10] * 4 + [0], [1] * 4 + [3]), generator=stream(1)) is None, "one said nothing"


def test_draws_without_any_reference_are_passed_over() -> None:
    # Of 100 speakers 5 have a reference: (95/100)^100 = 0.6 % of the draws hold none of them.
    bounds = interval(counts([10] * 5 + [0] * 95, [1] * 5 + [0] * 95), generator=stream(1))
    assert bounds == pytest.approx((0.1, 0.1))


def test_spread_by_hand() -> None:
    # Rates 0, 0.1, …, 1 and one speaker without a reference, who has none.
    counts_S4 = counts([10] * 11 + [0], [*range(11), 2])
    found = spread(counts_S4)
    assert found.mean == pytest.approx(0.5)
    assert found.std == pytest.approx(np.sqrt(0.1))  # (11² − 1) / 12 steps of 0.1, squared
    assert (found.min, found.p10, found.p25, found.median) == pytest.approx((0, 0.1, 0.25, 0.5))
    assert (found.p75, found.p90, found.max) == pytest.approx((0.75, 0.9, 1))
    assert (found.best_tenth, found.worst_tenth) == pytest.approx((0, 1))
    assert np.isnan(rates(counts_S4)[-1])


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=4, max_size=4)), min_size=1))
def test_sums_over_owners_are_complete(rows: list[tuple[int, list[int]]]) -> None:
    owners = np.array([owner for owner, _ in rows])
    counts_U4 = np.array([row for _, row in rows])
    sums = sum_by(counts_U4, owners, owner_count=4)
    assert sums.sum(axis=0).tolist() == counts_U4.sum(axis=0).tolist()
    assert sums[2].tolist() == counts_U4[owners == 2].sum(axis=0).tolist()
