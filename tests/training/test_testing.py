"""People who were tested on, in words that do not tell who they are; and who may be quoted."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sottovoce.config import load_recipe
from sottovoce.evaluation.score import Selection, pool_small_groups
from sottovoce.training.testing import may_quote_store, pick_transcripts, pseudonymise_speakers


def test_small_groups_are_put_together_until_they_are_five() -> None:
    """Six women and four men; nine with one accent and one with another, whom 'all but the nine' would show."""
    assert pool_small_groups(["f"] * 6 + ["m"] * 4, smallest=5) == ["others"] * 10
    assert pool_small_groups(["f"] * 6 + ["m"] * 5 + ["x"], smallest=5) == ["f"] * 6 + ["others"] * 6
    assert pool_small_groups(["a", "b", "c", "d", "e"] + ["f"] * 5, smallest=5) == ["others"] * 5 + ["f"] * 5
    assert pool_small_groups(["a", "b", "b"], smallest=1) == ["a", "b", "b"]


def test_the_order_of_pseudonyms_is_not_that_of_the_corpus() -> None:
    """By chance it is, once in 30! times."""
    before = [{"speaker": f"name {n}", "wer": n / 100, "words": n} for n in range(30)]
    tests = [{"per_speaker": [dict(one) for one in before], "spread": {}} for _ in range(2)]
    pseudonymise_speakers(tests)
    first, second = (test["per_speaker"] for test in tests)
    assert first == second
    assert [one["speaker"] for one in first] == [f"speaker {n}" for n in range(1, 31)]
    rates = [one["wer"] for one in first]
    assert rates != sorted(rates)
    assert sorted(rates) == [one["wer"] for one in before]


@dataclass(frozen=True)
class Named:
    """What is asked of a store."""

    name: str


@pytest.mark.parametrize(
    ("recipe", "store", "shown"),
    [
        ("demo-clipping/no-noise", "synthetic-digits", True),
        ("demo-clipping/no-noise", "synthetic-crowd", False),  # another store under the recipe's name
        ("demo-clipping/no-noise", "patients", False),
        ("demo-real/no-noise", "synthetic-digits", False),  # real voices, whatever they call themselves
    ],
)
def test_only_voices_that_the_recipe_made_itself_are_quoted(recipe: str, store: str, shown: bool) -> None:
    found: Any = Named(store)
    assert may_quote_store(load_recipe(recipe, []), found) is shown


@pytest.mark.parametrize(("utterances", "kept"), [(80, [0, 10, 20, 30, 40, 50, 60, 70]), (3, [0, 1, 2]), (1, [0])])
def test_quotes_are_spread_evenly_and_none_is_taken_twice(utterances: int, kept: list[int]) -> None:
    rows = np.arange(utterances)
    texts = tuple(f"said {n}" for n in rows)
    chosen = Selection(rows=rows, references=texts, ids=texts, without_text=0, too_long=0)
    found = pick_transcripts(chosen, [f"heard {n}" for n in rows])
    assert found == [{"reference": f"said {n}", "hypothesis": f"heard {n}"} for n in kept]
