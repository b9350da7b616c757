"""The guard of a personal part: what it decides by, and when it keeps the public model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.federated.personal import PersonalTraining, Trial, decide


def trial(*errors: int, words: int = 10, losses: Sequence[float] | None = None) -> Trial:
    """So many substitutions in utterances of ten words, and losses that say nothing where none are given."""
    counts = np.array([[words, wrong, 0, 0] for wrong in errors], dtype=np.int64).reshape(-1, 4)
    return Trial(counts, np.zeros(len(errors)) if losses is None else np.array(losses, dtype=np.float64))


def test_one_utterance_alone_never_decides() -> None:
    assert not decide(trial(9, 4, 4, 4), trial(0, 4, 4, 4), margin=1).is_kept
    assert decide(trial(9, 4, 4, 4), trial(0, 3, 4, 4), margin=1).is_kept
    public = trial(0, 0, 0, 0, losses=[9, 1, 1, 1])
    assert not decide(public, trial(0, 0, 0, 0, losses=[0, 1, 1, 1]), margin=1).is_kept
    assert decide(public, trial(0, 0, 0, 0, losses=[0, 0.5, 1, 1]), margin=1).is_kept


def test_less_than_four_utterances_keep_the_public_model() -> None:
    public, personal = trial(9, 9, 9, losses=[9, 9, 9]), trial(0, 0, 0, losses=[0, 0, 0])
    assert not decide(public, personal, margin=0).is_kept
    assert "expected at least 4" in decide(public, personal, margin=0).describe()
    assert decide(trial(9, 9, 9, 9), trial(0, 0, 0, 0), margin=0).is_kept


def test_nothing_to_try_on_keeps_the_public_model() -> None:
    found = decide(trial(), trial(), margin=1)
    assert (found.is_kept, found.words, found.needed) == (False, 0, 0.0)
    assert "too little" in found.describe()


def test_as_good_is_not_better_at_any_margin() -> None:
    assert not decide(trial(3, 2, 1, 1), trial(2, 3, 1, 1), margin=0).is_kept
    assert decide(trial(3, 2, 1, 1), trial(2, 2, 1, 1), margin=0).is_kept


def test_a_lower_loss_decides_only_where_there_are_no_more_errors() -> None:
    """A good model makes no errors in a few words, with a part and without."""
    public, lower = [0.4, 0.5, 0.3, 0.4], [0.1, 0.1, 0.2, 0.1]
    kept = decide(trial(0, 0, 0, 0, losses=public), trial(0, 0, 0, 0, losses=lower), margin=1)
    assert kept.is_kept
    assert (kept.public_loss, kept.personal_loss) == (pytest.approx(0.4), pytest.approx(0.125))
    assert kept.needed_loss == pytest.approx(np.sqrt(0.3**2 + 0.4**2 + 0.1**2 + 0.3**2) / 4)
    assert not decide(trial(0, 0, 0, 0, losses=public), trial(1, 0, 0, 0, losses=lower), margin=1).is_kept
    higher = decide(trial(0, 0, 0, 0, losses=lower), trial(0, 0, 0, 0, losses=public), margin=0)
    assert not higher.is_kept
    assert "or no more errors and a loss lower by more than" in higher.describe()
    # Fewer errors suffice, whatever the loss: one that is too sure of itself has a high one.
    assert decide(trial(4, 4, 4, 4, losses=lower), trial(0, 0, 0, 0, losses=public), margin=1).is_kept


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_decides_nothing(bad: float) -> None:
    public, personal = [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]
    for one, other in ((public, [*personal[:3], bad]), ([*public[:3], bad], personal)):
        found = decide(trial(0, 0, 0, 0, losses=one), trial(0, 0, 0, 0, losses=other), margin=0)
        assert not found.is_kept
        assert None in found.as_json().values()
        assert decide(trial(2, 2, 2, 2, losses=one), trial(0, 0, 0, 0, losses=other), margin=1).is_kept


@given(
    public=st.lists(st.integers(0, 10), min_size=4, max_size=8),
    personal=st.lists(st.integers(0, 10), min_size=8, max_size=8),
    losses=st.lists(st.floats(0, 10), min_size=16, max_size=16),
    margin=st.floats(0, 4),
)
def test_a_part_that_is_kept_makes_no_more_errors_and_a_wider_margin_keeps_fewer(
    public: list[int], personal: list[int], losses: list[float], margin: float
) -> None:
    count = len(public)
    before = trial(*public, losses=losses[:count])
    after = trial(*personal[:count], losses=losses[8 : 8 + count])
    found = decide(before, after, margin=margin)
    assert found.needed == pytest.approx(
        margin * np.sqrt(sum((a - b) ** 2 for a, b in zip(public, personal, strict=False)))
    )
    if found.is_kept:
        assert found.personal_errors <= found.public_errors
        assert found.personal_errors < found.public_errors or found.personal_loss < found.public_loss
        assert decide(before, after, margin=margin / 2).is_kept


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
