"""Noise that is there is found, and noise that is missing, in one tensor or between two rounds, is missed."""

import pytest
import torch

from sottovoce.audit.release_checks import NoiseCheck, NoiseMeter
from sottovoce.flat.layout import Layout

LAYOUT = Layout(("a", "b", "one"), ((40, 40), (300,), (1,)))


def measured(*, rounds: int, missing: str | None = None, again: bool = False, signal: float = 0.0) -> NoiseCheck:
    meter, generator = NoiseMeter(LAYOUT), torch.Generator().manual_seed(1)
    noise_P = LAYOUT.zeros()
    for step in range(rounds):
        if step == 0 or not again:
            noise_P = LAYOUT.zeros().normal_(generator=generator)
        released_P = noise_P.clone()
        if missing is not None:
            LAYOUT.views(released_P)[missing].zero_()
        released_P += signal * (1 + step)
        LAYOUT.clear_padding(released_P)
        meter.add(released_P * 0.1, std=0.1)
    return meter.found()


@pytest.mark.parametrize("signal", [0.0, 0.5])
def test_all_of_it(signal: float) -> None:
    found = measured(rounds=6, signal=signal)
    assert not found.is_missing
    assert found.chance > 1e-3


def test_a_tensor_without_noise() -> None:
    found = measured(rounds=2, missing="b", signal=0.1)
    assert found.is_missing
    assert (found.tensor, found.between_rounds) == ("b", False)
    assert found.share < 0.3


def test_a_single_number_without_noise_shows_after_some_rounds() -> None:
    assert measured(rounds=20, missing="one").is_missing


def test_noise_that_is_used_again() -> None:
    found = measured(rounds=2, again=True, signal=0.1)
    assert found.is_missing
    assert found.between_rounds
