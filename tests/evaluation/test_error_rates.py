"""Error counts against cases by hand, jiwer and the edit distance; the bootstrap over speakers, and the spread."""

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.evaluation import error_rates
from sottovoce.evaluation.error_rates import (
    bootstrap_interval,
    compute_rates,
    compute_wer,
    count_character_errors,
    count_word_errors,
    measure_spread,
    sum_by_owner,
    sum_counts,
)

sentences = st.lists(st.sampled_from(["a", "b", "ab", "ba", "c"]), max_size=7).map(" ".join)
pairs = st.lists(st.tuples(sentences, sentences), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "counts"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", [6, 0, 0, 0]),
        ("the cat sat on the mat", "the bat sat the mat", [6, 1, 1, 0]),  # cat→bat, "on" lost
        ("the cat", "so the cat is", [2, 0, 0, 2]),
        ("the cat", "", [2, 0, 2, 0]),
        ("", "the cat", [0, 0, 0, 2]),
        ("", "", [0, 0, 0, 0]),
        ("  the   cat ", "the cat", [2, 0, 0, 0]),
    ],
)
def test_words_by_hand(reference: str, hypothesis: str, counts: list[int]) -> None:
    assert count_word_errors([reference], [hypothesis]).tolist() == [counts]


def test_characters_by_hand() -> None:
    # kitten → sitting: k→s, e→i, +g. "a b" → "ab" loses the space.
    assert count_character_errors(["kitten", "a b"], ["sitting", "ab"]).tolist() == [[6, 2, 0, 1], [3, 0, 1, 0]]


@given(pairs)
def test_agrees_with_jiwer(texts: list[tuple[str, str]]) -> None:
    texts = [(reference, hypothesis) for reference, hypothesis in texts if reference] or [("a", "b")]
    references, hypotheses = map(list, zip(*texts, strict=True))
    for count, process in (
        (count_word_errors, jiwer.process_words),
        (count_character_errors, jiwer.process_characters),
    ):
        found, expected = sum_counts(count(references, hypotheses)), process(references, hypotheses)
        assert found.substitutions == expected.substitutions
        assert found.deletions == expected.deletions
        assert found.insertions == expected.insertions
        assert found.length == expected.hits + expected.substitutions + expected.deletions


@given(pairs)
def test_each_utterance_has_the_fewest_errors(texts: list[tuple[str, str]]) -> None:
    references, hypotheses = map(list, zip(*texts, strict=True))
    for (length, substituted, deleted, inserted), reference, hypothesis in zip(
        count_word_errors(references, hypotheses).tolist(), references, hypotheses, strict=True
    ):
        assert length == len(reference.split())
        assert length - deleted + inserted == len(hypothesis.split())
        assert substituted + deleted + inserted == edit_distance(reference.split(), hypothesis.split())


def edit_distance(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return len(a) + len(b)
    row = np.arange(len(b) + 1)
    for i, x in enumerate(a, start=1):
        above, row = row, np.full(len(b) + 1, i)
        for j, y in enumerate(b, start=1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y))
    return int(row[-1])


def test_rate_of_a_corpus_is_that_of_all_its_words() -> None:
    # Two errors in five words; the mean of the utterances' rates would be (1/1 + 1/4) / 2.
    assert compute_wer(["a", "a b c d"], ["b", "a b c"]) == 2 / 5
    assert compute_wer(["a", ""], ["a", "b c"]) == 2.0, "what is heard in silence counts"


def test_no_reference_words_have_no_rate() -> None:
    with pytest.raises(InputError, match="no word in any of 2 references"):
        compute_wer(["", " "], ["a", ""])


def counts(lengths: list[int], errors: list[int]) -> np.ndarray:
    return np.array([[length, wrong, 0, 0] for length, wrong in zip(lengths, errors, strict=True)], dtype=np.int64)


def crowd(rng: np.random.Generator, *, speakers: int) -> np.ndarray:
    """Speakers of very different skill and talkativeness; the true rate is 0.2 whatever the length."""
    lengths = rng.integers(5, 200, speakers)
    return counts(lengths.tolist(), rng.binomial(lengths, rng.beta(2, 8, speakers)).tolist())


def test_interval_is_the_same_for_the_same_stream_and_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_S4 = crowd(stream(1, "crowd"), speakers=50)
    first = bootstrap_interval(counts_S4, generator=stream(1, "draws"))
    assert first == bootstrap_interval(counts_S4, generator=stream(1, "draws"))
    assert first != bootstrap_interval(counts_S4, generator=stream(2, "draws"))
    monkeypatch.setattr(error_rates, "BLOCK_SPEAKERS", 700)
    assert first == bootstrap_interval(counts_S4, generator=stream(1, "draws"))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(200):
        bounds = bootstrap_interval(
            crowd(stream(trial, "crowd"), speakers=60), generator=stream(trial, "draws"), draws=300
        )
        assert bounds is not None
        covered += bounds[0] <= 0.2 <= bounds[1]
    # 95 % of 200 trials are 190, give or take 3; percentile intervals of 60 speakers run a little narrow.
    assert 178 <= covered <= 198


def test_interval_of_speakers_who_are_all_alike_is_a_point() -> None:
    assert bootstrap_interval(counts([10, 20, 40, 10, 30], [1, 2, 4, 1, 3]), generator=stream(1)) == pytest.approx(
        (0.1, 0.1)
    )


def test_interval_is_wider_over_speakers_than_over_utterances() -> None:
    # Ten utterances of each of 20 speakers who understand all or nothing: the utterances are not independent.
    by_speaker = counts([50] * 20, [50, 0] * 10)
    by_utterance = counts([5] * 200, [5] * 100 + [0] * 100)
    wide, narrow = (
        bootstrap_interval(by_speaker, generator=stream(1)),
        bootstrap_interval(by_utterance, generator=stream(1)),
    )
    assert wide is not None
    assert narrow is not None
    # Standard deviations sqrt(0.25/20) and sqrt(0.25/200): a ratio of 3.2.
    assert (wide[1] - wide[0]) / (narrow[1] - narrow[0]) == pytest.approx(np.sqrt(10), rel=0.15)


def test_too_few_speakers_have_no_interval() -> None:
    assert bootstrap_interval(counts([10] * 4, [1] * 4), generator=stream(1)) is None
    assert bootstrap_interval(counts([10] * 4 + [0], [1] * 4 + [3]), generator=stream(1)) is None, "one said nothing"


def test_draws_without_any_reference_are_passed_over() -> None:
    # Of 100 speakers 5 have a reference: (95/100)^100 = 0.6 % of the draws hold none of them.
    bounds = bootstrap_interval(counts([10] * 5 + [0] * 95, [1] * 5 + [0] * 95), generator=stream(1))
    assert bounds == pytest.approx((0.1, 0.1))


def test_spread_by_hand() -> None:
    # Rates 0, 0.1, …, 1 and one speaker without a reference, who has none.
    counts_S4 = counts([10] * 11 + [0], [*range(11), 2])
    found = measure_spread(counts_S4)
    assert found.mean == pytest.approx(0.5)
    assert found.std == pytest.approx(np.sqrt(0.1))  # (11² − 1) / 12 steps of 0.1, squared
    assert (found.min, found.p10, found.p25, found.median) == pytest.approx((0, 0.1, 0.25, 0.5))
    assert (found.p75, found.p90, found.max) == pytest.approx((0.75, 0.9, 1))
    assert (found.best_tenth, found.worst_tenth) == pytest.approx((0, 1))
    assert np.isnan(compute_rates(counts_S4)[-1])


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=4, max_size=4)), min_size=1))
def test_sums_over_owners_are_complete(rows: list[tuple[int, list[int]]]) -> None:
    owners = np.array([owner for owner, _ in rows])
    counts_U4 = np.array([row for _, row in rows])
    sums = sum_by_owner(counts_U4, owners, owner_count=4)
    assert sums.sum(axis=0).tolist() == counts_U4.sum(axis=0).tolist()
    assert sums[2].tolist() == counts_U4[owners == 2].sum(axis=0).tolist()
