"""What the docs say of narrow bands is what is kept, and copies over a telephone are what they are called."""

import json
from pathlib import Path

import narrow_band
import numpy as np
import pytest

from sottovoce.config import load_recipe

ROOT = Path(__file__).parents[2]


def test_the_docs_have_the_kept_table() -> None:
    assert narrow_band.table(json.loads(narrow_band.KEPT.read_text())) in (ROOT / "docs/recogniser.md").read_text()


def test_the_recipe_is_the_last_way() -> None:
    """`real/audiomnist-any-band` is what "all three" measures."""
    measured = load_recipe(narrow_band.RECIPE, narrow_band.WAYS["all three"])
    offered = load_recipe("real/audiomnist-any-band")
    assert offered.model_dump(exclude={"about"}) == measured.model_dump(exclude={"about"})


def test_a_telephone_has_its_band_its_level_and_its_noise() -> None:
    sound = np.random.default_rng(1).normal(0, 0.01, 16_000)
    heard = narrow_band.by_telephone(sound, np.random.default_rng(2))
    power = np.square(np.abs(np.fft.rfft(heard)))
    hertz = np.fft.rfftfreq(len(heard), 1 / 8_000)
    inside = power[(hertz > 400) & (hertz < 3_200)].mean()
    outside = power[(hertz < 150) | (hertz > 3_800)].mean()
    assert 10 * np.log10(inside / outside) == pytest.approx(30, abs=3)  # noise, and the steps of eight bits
    assert 10 * np.log10(np.square(heard).mean()) == pytest.approx(-26, abs=0.5)


def test_seeds_are_pooled_by_speaker() -> None:
    people = [[("ann", 0.5, 4), ("bob", 0.0, 2)], [("ann", 0.25, 4), ("bob", 1.0, 2)]]
    tests = [{"per_speaker": [{"speaker": n, "wer": w, "words": c} for n, w, c in own]} for own in people]
    assert narrow_band.pooled(tests)["per_speaker"] == [
        {"speaker": "ann", "words": 8, "wer": 0.375},
        {"speaker": "bob", "words": 4, "wer": 0.5},
    ]
