"""Error counts against cases worked out by hand, against jiwer, and against the edit distance's definition."""

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.evaluation.wer import count_characters, count_words, tally, word_error_rate

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
    assert count_words([reference], [hypothesis]).tolist() == [counts]


def test_characters_by_hand() -> None:
    # kitten → sitting: k→s, e→i, +g. "a b" → "ab" loses the space.
    assert count_characters(["kitten", "a b"], ["sitting", "ab"]).tolist() == [[6, 2, 0, 1], [3, 0, 1, 0]]


@given(pairs)
def test_agrees_with_jiwer(texts: list[tuple[str, str]]) -> None:
    texts = [(reference, hypothesis) for reference, hypothesis in texts if reference] or [("a", "b")]
    references, hypotheses = map(list, zip(*texts, strict=True))
    for count, process in ((count_words, jiwer.process_words), (count_characters, jiwer.process_characters)):
        found, expected = tally(count(references, hypotheses)), process(references, hypotheses)
        assert found.substitutions == expected.substitutions
        assert found.deletions == expected.deletions
        assert found.insertions == expected.insertions
        assert found.length == expected.hits + expected.substitutions + expected.deletions


@given(pairs)
def test_each_utterance_has_the_fewest_errors(texts: list[tuple[str, str]]) -> None:
    references, hypotheses = map(list, zip(*texts, strict=True))
    for (length, substituted, deleted, inserted), reference, hypothesis in zip(
        count_words(references, hypotheses).tolist(), references, hypotheses, strict=True
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
    assert word_error_rate(["a", "a b c d"], ["b", "a b c"]) == 2 / 5
    assert word_error_rate(["a", ""], ["a", "b c"]) == 2.0, "what is heard in silence counts"


def test_no_reference_words_have_no_rate() -> None:
    with pytest.raises(InputError, match="no word in any of 2 references"):
        word_error_rate(["", " "], ["a", ""])
