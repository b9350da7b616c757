"""Which transcripts a run keeps for its report."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sottovoce.config import load_recipe
from sottovoce.evaluation.evaluate import Selection
from sottovoce.training.samples import samples, shows_texts


@dataclass(frozen=True)
class Named:
    """What is asked of a store."""

    name: str


@pytest.mark.parametrize(
    ("recipe", "store", "shown"),
    [
        ("demo/no-noise", "synthetic-digits", True),
        ("demo/no-noise", "synthetic-crowd", False),  # another store under the recipe's name
        ("demo/no-noise", "patients", False),
        ("demo-real/no-noise", "synthetic-digits", False),  # real voices, whatever they call themselves
    ],
)
def test_only_voices_that_the_recipe_made_itself_are_quoted(recipe: str, store: str, shown: bool) -> None:
    found: Any = Named(store)
    assert shows_texts(load_recipe(recipe, []), found) is shown


@pytest.mark.parametrize(("utterances", "kept"), [(80, [0, 10, 20, 30, 40, 50, 60, 70]), (3, [0, 1, 2]), (1, [0])])
def test_samples_are_spread_evenly_and_none_is_taken_twice(utterances: int, kept: list[int]) -> None:
    rows = np.arange(utterances)
    texts = tuple(f"said {n}" for n in rows)
    chosen = Selection(rows=rows, references=texts, ids=texts, without_text=0, too_long=0)
    found = samples(chosen, [f"heard {n}" for n in rows])
    assert found == [{"reference": f"said {n}", "hypothesis": f"heard {n}"} for n in kept]
