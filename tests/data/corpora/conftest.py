from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray


@pytest.fixture
def tone() -> NDArray[np.int16]:
    """A quarter of a second of 440 Hz at 16 kHz."""
    return np.rint(8_000 * np.sin(2 * np.pi * 440 * np.arange(4_000) / 16_000)).astype(np.int16)


@pytest.fixture
def write_tone(tone: NDArray[np.int16]) -> Callable[[Path], Path]:
    """Writes the tone to a file, whose folder it makes."""

    def write(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone, 16_000)
        return path

    return write
