from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.synthetic.speakers import (
    LARGEST_SECONDS,
    LARGEST_SHARE,
    PRESETS,
    assign_splits,
    draw_amounts,
    draw_voice,
)

SHARES = {"train": 0.8, "dev": 0.1, "test": 0.1}


@given(users=st.integers(3, 400))
def test_splits_follow_their_shares_and_never_depend_on_later_users(users: int) -> None:
    assigned = assign_splits(users, SHARES)
    counts = Counter(assigned)
    assert all(abs(counts[name] - max(1, share * users)) <= 1.01 for name, share in SHARES.items() if users >= 10)
    assert all(counts[name] >= 1 for name in SHARES)
    assert assign_splits(users + 50, SHARES)[:users] == assigned


def test_splits_may_be_numbers_of_users() -> None:
    assert Counter(assign_splits(10, {"train": 7, "test": 3})) == {"train": 7, "test": 3}


@pytest.mark.parametrize(
    ("users", "splits", "message"),
    [
        (2, SHARES, "users=2: expected at least one for each of train, dev, test"),
        (5, {"train": 1.0, "dev": 0.0}, "expected a positive share"),
        (5, {}, "expected a positive share"),
    ],
)
def test_impossible_splits(users: int, splits: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        assign_splits(users, splits)


@given(users=st.integers(1, 300), mean=st.floats(1.0, 3600.0), seed=st.integers(0, 2**31))
def test_amounts_have_the_mean_asked_for_and_stay_within_limits(users: int, mean: float, seed: int) -> None:
    amounts = draw_amounts(range(seed, seed + users), spread=2.22, mean_seconds=mean)
    assert amounts.mean() == pytest.approx(mean, rel=1e-6)
    assert amounts.max() <= max(LARGEST_SHARE * users * mean, 10 * mean) * (1 + 1e-9)
    assert amounts.max() <= LARGEST_SECONDS


def test_amounts_are_heavy_tailed_like_common_voice() -> None:
    # Table 2 of Pelikan et al., English: mean 2.8, std 32.7 minutes. A log-normal with these two has
    # sigma = sqrt(log(1 + (32.7 / 2.8)^2)) = 2.22 and a median of 2.8 exp(-sigma^2 / 2) = 0.24 minutes.
    spread = np.sqrt(np.log(1 + (32.7 / 2.8) ** 2))
    assert PRESETS["crowd"].amount_spread == pytest.approx(spread, abs=0.005)
    minutes = draw_amounts(range(4000), spread=PRESETS["crowd"].amount_spread, mean_seconds=2.8 * 60) / 60
    assert 0.15 < np.median(minutes) < 0.5
    assert np.mean(minutes < 2.8) > 0.8
    # The upper tenth holds most of the speech.
    assert np.sort(minutes)[-400:].sum() > 0.6 * minutes.sum()


def test_crowd_is_varied_and_studio_is_not() -> None:
    crowd = [draw_voice(PRESETS["crowd"], language="en", seed=seed) for seed in range(400)]
    assert len({(voice.accent, voice.variant, voice.tract) for voice in crowd}) > 350
    assert 0.4 < np.mean([voice.gender == "female" for voice in crowd]) < 0.6
    assert len({voice.accent for voice in crowd}) == 8
    studio = [draw_voice(PRESETS["studio"], language="en", seed=seed) for seed in range(50)]
    assert {(voice.accent, voice.tract) for voice in studio} == {("en-us", 32)}
