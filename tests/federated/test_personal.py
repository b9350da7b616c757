"""The guard of a personal part: what it decides by, and when it keeps the public model."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.federated.personal import PersonalTraining, decide


def counts(*errors: int, words: int = 10) -> Any:
    """So many substitutions in utterances of ten words."""
    return np.array([[words, wrong, 0, 0] for wrong in errors], dtype=np.int64).reshape(-1, 4)


def test_one_utterance_alone_never_decides() -> None:
    assert not decide(counts(9, 4, 4, 4), counts(0, 4, 4, 4), margin=1).is_kept
    assert decide(counts(9, 4, 4, 4), counts(0, 3, 4, 4), margin=1).is_kept


def test_less_than_four_utterances_keep_the_public_model() -> None:
    assert not decide(counts(9, 9, 9), counts(0, 0, 0), margin=0).is_kept
    assert "expected at least 4" in decide(counts(9, 9, 9), counts(0, 0, 0), margin=0).describe()
    assert decide(counts(9, 9, 9, 9), counts(0, 0, 0, 0), margin=0).is_kept


def test_nothing_to_try_on_keeps_the_public_model() -> None:
    found = decide(counts(), counts(), margin=1)
    assert (found.is_kept, found.words, found.needed) == (False, 0, 0.0)
    assert "too little" in found.describe()


def test_as_good_is_not_better_at_any_margin() -> None:
    assert not decide(counts(3, 2, 1, 1), counts(2, 3, 1, 1), margin=0).is_kept
    assert decide(counts(3, 2, 1, 1), counts(2, 2, 1, 1), margin=0).is_kept


@given(
    public=st.lists(st.integers(0, 10), min_size=4, max_size=8),
    personal=st.lists(st.integers(0, 10), min_size=8, max_size=8),
    margin=st.floats(0, 4),
)
def test_a_part_that_is_kept_makes_fewer_errors_and_a_wider_margin_keeps_fewer(
    public: list[int], personal: list[int], margin: float
) -> None:
    own = counts(*personal[: len(public)])
    found = decide(counts(*public), own, margin=margin)
    assert found.needed == pytest.approx(
        margin * np.sqrt(sum((a - b) ** 2 for a, b in zip(public, personal, strict=False)))
    )
    if found.is_kept:
        assert found.personal_errors < found.public_errors
        assert decide(counts(*public), own, margin=margin / 2).is_kept


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps": 0}, "personal: steps=0, expected at least 1"),
        ({"folds": 1}, "personal: folds=1, expected at least 2"),
        ({"margin": -1.0}, "personal: margin=-1.0, expected a finite number, at least 0"),
        ({"part": "lora(r=4),,"}, "personal: part='lora\\(r=4\\),,': expected lora"),
        ({"part": "biases, lora(r=none)"}, "trainable='lora\\(r=none\\)'"),
        ({"lr": 0.0}, "lr=0.0, expected a positive number"),
        ({"optimiser": {"name": "adamx"}}, "adamx"),
    ],
)
def test_settings_are_refused_in_one_line(given: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        PersonalTraining(**given)
