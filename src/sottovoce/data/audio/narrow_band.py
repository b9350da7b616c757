"""Whether a recording is of a narrow band, as over a telephone: nothing above 4 kHz but what rounding leaves there.

Decided by the spectrum: a file's header says at which rate it was written, and not at which it was recorded.

    N  samples    W  windows    B  bins
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.store import Store

SPEECH_HZ, EMPTY_HZ = (300, 3_400), (4_400, 7_600)
WINDOW, MOST_WINDOWS = 512, 100  # spread over a recording, so that a long one takes no longer
MOST_RECORDINGS = 400  # of a store, spread likewise
ROUNDING = 1 / 12  # variance of what rounding to whole numbers adds
# Of 1,414 recordings at 16 kHz (FLAC, MP3, Opus) the emptiest has ten times as much there as rounding leaves, and one
# in 1.9 million of its speech; copies through 8 kHz have at most 1.3 times as much, unless they were clipped.
MOST_ROUNDING, LEAST_SHARE = 4.0, 1e-7
LEAST_SPEECH = 100.0  # times the rounding: what is nearly silent cannot be judged
LEAST_REPORTED = 0.01


def is_narrow_band(samples_N: NDArray[np.int16]) -> bool:
    """Whether there is speech, and nothing above 4 kHz.

    >>> is_narrow_band(np.random.default_rng(1).normal(0, 1000, 16_000).astype(np.int16))
    False
    """
    if len(samples_N) < WINDOW:
        return False
    last = len(samples_N) - WINDOW
    starts_W = np.linspace(0, last, min(MOST_WINDOWS, last // WINDOW + 1)).astype(np.int64)
    window = np.hanning(WINDOW)
    frames_WN = samples_N[starts_W[:, None] + np.arange(WINDOW)] * window
    power_B = np.square(np.abs(np.fft.rfft(frames_WN))).mean(axis=0) / np.square(window).sum()
    speech, above = _mean(power_B, SPEECH_HZ), _mean(power_B, EMPTY_HZ)
    return speech >= LEAST_SPEECH * ROUNDING and above <= max(MOST_ROUNDING * ROUNDING, LEAST_SHARE * speech)


def _mean(power_B: NDArray[np.float64], band: tuple[int, int]) -> float:
    first, last = (hertz * WINDOW // SAMPLE_RATE for hertz in band)
    return float(power_B[first : last + 1].mean())


def describe_store_band(store: Store, rows: NDArray[np.int64] | None = None) -> str:
    """What there is to say of the recordings `rows` of a store (all by default); empty where they are wide enough."""
    rows = np.arange(store.utterance_count) if rows is None else rows
    places = np.linspace(0, len(rows) - 1, min(MOST_RECORDINGS, len(rows))).astype(np.int64)
    return format_narrow_count(is_narrow_band(store.samples(row)) for row in rows[places].tolist())


def format_narrow_count(narrow: Iterable[bool]) -> str:
    """A warning for recognition and training; empty where hardly any recording is of a narrow band.

    >>> format_narrow_count([True, True, False])[:63]
    '2 of 3 recordings hold nothing above 4 kHz (telephone speech?):'
    """
    found = list(narrow)
    if sum(found) < max(1, LEAST_REPORTED * len(found)):
        return ""
    return (
        f"{sum(found):,} of {len(found):,} recordings hold nothing above 4 kHz (telephone speech?): a model that only "
        "heard wider speech may not understand them; see docs/recogniser.md, Narrow-band speech"
    )
