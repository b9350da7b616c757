"""People who were tested on, in words that do not tell who they are."""

from sottovoce.evaluation.evaluate import pooled
from sottovoce.training.testing import hide_names


def test_small_groups_are_put_together_until_they_are_five() -> None:
    """Six women and four men; nine with one accent and one with another, whom 'all but the nine' would show."""
    assert pooled(["f"] * 6 + ["m"] * 4, smallest=5) == ["others"] * 10
    assert pooled(["f"] * 6 + ["m"] * 5 + ["x"], smallest=5) == ["f"] * 6 + ["others"] * 6
    assert pooled(["a", "b", "c", "d", "e"] + ["f"] * 5, smallest=5) == ["others"] * 5 + ["f"] * 5
    assert pooled(["a", "b", "b"], smallest=1) == ["a", "b", "b"]


def test_the_order_of_pseudonyms_is_not_that_of_the_corpus() -> None:
    """By chance it is, once in 30! times."""
    before = [{"speaker": f"name {n}", "wer": n / 100, "words": n} for n in range(30)]
    tests = [{"per_speaker": [dict(one) for one in before], "spread": {}} for _ in range(2)]
    hide_names(tests)
    first, second = (test["per_speaker"] for test in tests)
    assert first == second
    assert [one["speaker"] for one in first] == [f"speaker {n}" for n in range(1, 31)]
    rates = [one["wer"] for one in first]
    assert rates != sorted(rates)
    assert sorted(rates) == [one["wer"] for one in before]
