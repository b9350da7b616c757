"""How many equal clients count under noise: limits that follow from the definition."""

import math

import pytest
from effective_clients import count_effective_clients

from sottovoce.privacy.settings import Weighting


@pytest.mark.parametrize("weighting", [Weighting.WER, Weighting.WER_RELEASED])
def test_without_noise_all_of_them_count(weighting: Weighting) -> None:
    for wer in (0.0, 1.0):
        assert count_effective_clients(weighting, words=50, wer=wer, draws=20) == pytest.approx(10)


def test_by_equation_10_nearly_all_count_even_on_little_speech() -> None:
    """With a standard deviation s of ln ω, 1/Σω² is n·exp(−s²) in a large cohort, and more in a small one.

    Two utterances of ten words: s = √(0.16/20) = 0.089, so at least 10·exp(−0.008) = 9.92.
    """
    found = count_effective_clients(Weighting.WER, words=20, wer=0.2)
    assert 10 * math.exp(-0.16 / 20) <= found <= 10


def test_as_released_few_count_on_little_speech_and_nearly_all_on_much() -> None:
    little, much = (count_effective_clients(Weighting.WER_RELEASED, words=words, wer=0.2) for words in (600, 148_000))
    assert 1 < little < 4
    # s = 100·√(0.16/148,000) = 0.104: 10·exp(−0.0108) = 9.89
    assert 9.88 < much < 10
