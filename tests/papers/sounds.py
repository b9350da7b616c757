"""Sounds whose measures are known."""

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE

SECONDS = 10
TIME = np.arange(SECONDS * SAMPLE_RATE) / SAMPLE_RATE


def as_samples(waveform: NDArray[np.float64]) -> NDArray[np.int16]:
    assert np.abs(waveform).max() < 1, "it would be clipped"
    return np.round(waveform * 32768).astype(np.int16)


def noise(*, rms: float = 0.1, name: str = "noise") -> NDArray[np.float64]:
    return stream(1, name).normal(size=len(TIME)) * rms


def sine(hertz: float, *, rms: float = 0.1) -> NDArray[np.float64]:
    return np.sqrt(2) * rms * np.sin(2 * np.pi * hertz * TIME)


def voice(hertz: float, *, rms: float = 0.1) -> NDArray[np.float64]:
    """Thirty harmonics, weaker by 1/k, in phases that keep the peaks low."""
    waves = sum(np.sin(2 * np.pi * hertz * k * TIME + k * k) / k for k in range(1, 31))
    return waves * rms / np.std(waves)
