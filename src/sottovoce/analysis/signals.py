"""What an utterance sounds like, in four numbers: loudness, log-HNR, permutation entropy and blind SNR.

Gao et al. (2022, §4.2) name these measures and leave most settings open; `MEASURES` says what is computed here.
All of them look at frames of 40 ms, three periods of the lowest voice, every 10 ms.

    N  samples    T  frames    L  lags
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from sottovoce.corpora.corpus import SAMPLE_RATE

Floats = NDArray[np.float64]

WINDOW_SAMPLES = SAMPLE_RATE * 40 // 1000
HOP_SAMPLES = SAMPLE_RATE * 10 // 1000
INT16_SCALE = 1.0 / 32768.0
# A minute at once: however long a recording is, its frames take a few dozen MB.
BLOCK_FRAMES = 6000

LOWEST_HZ, HIGHEST_HZ = 75, 400
SHORTEST_LAG, LONGEST_LAG = SAMPLE_RATE // HIGHEST_HZ, SAMPLE_RATE // LOWEST_HZ
FFT_SAMPLES = scipy.fft.next_fast_len(WINDOW_SAMPLES + LONGEST_LAG + 1, real=True)  # no lag wraps around
HNR_LIMIT_DB = 40.0
# Praat's own: how periodic a voiced frame is, and how loud beside the loudest one.
VOICED_CORRELATION, VOICED_LOUDNESS = 0.45, 0.03

LPC_ORDER = 10
# White noise 90 dB below the frame keeps the equations of a pure tone solvable.
LPC_FLOOR = 1e-9

PATTERNS = 6  # 3!, the orders of three samples


@dataclass(frozen=True)
class Measure:
    """One of the four, by the name it has in JSON; `definition` is shown wherever its value is."""

    name: str
    title: str
    unit: str
    definition: str


MEASURES = (
    Measure("loudness", "loudness", "RMS", "linear root mean square of a frame, full scale = 1"),
    Measure(
        "log_hnr",
        "log-HNR",
        "dB",
        "harmonics-to-noise ratio, 10·log10(r / (1 − r)), r the highest peak of a frame's autocorrelation at "
        f"{LOWEST_HZ}–{HIGHEST_HZ} Hz (Hann window, its own autocorrelation divided out; Boersma 1993), "
        f"within ±{HNR_LIMIT_DB:.0f} dB, frames of digital silence left out",
    ),
    Measure(
        "permutation_entropy",
        "permutation entropy",
        "0–1",
        "entropy of the orders of three samples next to one another (order 3, delay 1) in a frame, divided by log 3!; "
        "equal samples count as rising",
    ),
    Measure(
        "blind_snr",
        "blind SNR",
        "dB",
        f"a frame's energy over that of its residual after linear prediction of order {LPC_ORDER} (autocorrelation, "
        f"Hann window), voiced frames only: r ≥ {VOICED_CORRELATION} and at least {100 * VOICED_LOUDNESS:.0f} % of the "
        "utterance's loudest",
    ),
)


def describe(samples: NDArray[np.int16]) -> Floats:
    """The mean over frames of each of `MEASURES`; NaN where no frame has a value: too short, silent, never voiced."""
    if len(samples) < WINDOW_SAMPLES:
        return np.full(len(MEASURES), np.nan)
    loudness_T = np.concatenate([_loudness(block) for block in _blocks(samples)])
    rows, done = [], 0
    for block in _blocks(samples):
        correlations_TL = _autocorrelations(block)
        loud_T = loudness_T[done : done + len(correlations_TL)] >= VOICED_LOUDNESS * loudness_T.max()
        done += len(correlations_TL)
        audible_T = correlations_TL[:, 0] > 0
        harmonicity_T = np.where(audible_T, harmonicity(correlations_TL), np.nan)
        voiced_T = audible_T & loud_T & (harmonicity_T >= VOICED_CORRELATION)
        snr_T = np.full(len(correlations_TL), np.nan)
        snr_T[voiced_T] = prediction_gain_db(correlations_TL[voiced_T])
        rows.append(np.stack([hnr_db(harmonicity_T), permutation_entropy(block), snr_T]))
    return np.array([loudness_T.mean(), *(_mean(row_T) for row_T in np.concatenate(rows, axis=1))])


def permutation_entropy(block: Floats) -> Floats:
    """Of each frame: 0 for a rising line, log 2 / log 6 for what only rises or falls, 1 for white noise."""
    first, second, third = block[:-2], block[1:-1], block[2:]
    # Three comparisons give one of six numbers, the same for the same order of the three.
    code_N = 4 * (first <= second) + 2 * (second <= third) + (first <= third)
    starts_T = np.arange(0, len(block) - WINDOW_SAMPLES + 1, HOP_SAMPLES)
    entropy_T = np.zeros(len(starts_T))
    patterns = WINDOW_SAMPLES - 2
    for code in np.unique(code_N):
        running = np.concatenate([[0], np.cumsum(code_N == code)])
        share_T = (running[starts_T + patterns] - running[starts_T]) / patterns
        entropy_T -= share_T * np.log(share_T, where=share_T > 0, out=np.zeros_like(share_T))
    return np.asarray(entropy_T / np.log(PATTERNS))


def harmonicity(correlations_TL: Floats) -> Floats:
    """The highest peak of the normalised autocorrelation among the lags of a voice, between samples too; 0 without."""
    normal_TL = correlations_TL / np.maximum(correlations_TL[:, :1], np.finfo(np.float64).tiny) / _WINDOW_CORRELATION_L
    left, middle, right = (normal_TL[:, SHORTEST_LAG + shift : LONGEST_LAG + 1 + shift] for shift in (-1, 0, 1))
    is_peak = (middle >= left) & (middle > right)
    bend = np.where(is_peak, left - 2 * middle + right, -1.0)
    heights = np.where(is_peak, middle - (left - right) ** 2 / (8 * bend), 0.0)  # of the parabola through the three
    return np.asarray(heights.max(axis=1))


def hnr_db(harmonicity_T: Floats) -> Floats:
    edge = 1 / (1 + 10 ** (HNR_LIMIT_DB / 10))
    share_T = harmonicity_T.clip(edge, 1 - edge)
    return np.asarray(10 * np.log10(share_T / (1 - share_T)))


def prediction_gain_db(correlations_TL: Floats) -> Floats:
    """Energy over residual energy, in dB, of the best linear prediction from the last ten samples."""
    known = correlations_TL[:, : LPC_ORDER + 1] / correlations_TL[:, :1]
    known[:, 0] += LPC_FLOOR
    lags = np.abs(np.subtract.outer(np.arange(LPC_ORDER), np.arange(LPC_ORDER)))
    weights = np.linalg.solve(known[:, lags], known[:, 1:, None])[:, :, 0]
    residual_T = known[:, 0] - (weights * known[:, 1:]).sum(axis=1)
    return np.asarray(10 * np.log10(known[:, 0] / residual_T.clip(min=LPC_FLOOR)))


def _blocks(samples: NDArray[np.int16]) -> Iterator[Floats]:
    """Samples of so many whole frames at a time; the next block begins where its first frame does."""
    frames = (len(samples) - WINDOW_SAMPLES) // HOP_SAMPLES + 1
    for first in range(0, frames, BLOCK_FRAMES):
        count = min(BLOCK_FRAMES, frames - first)
        start = first * HOP_SAMPLES
        yield np.multiply(samples[start : start + (count - 1) * HOP_SAMPLES + WINDOW_SAMPLES], INT16_SCALE)


def _frames(block: Floats) -> Floats:
    return np.lib.stride_tricks.sliding_window_view(block, WINDOW_SAMPLES)[::HOP_SAMPLES]


def _loudness(block: Floats) -> Floats:
    return np.asarray(np.sqrt(np.square(_frames(block)).mean(axis=1)))


def _autocorrelations(block: Floats) -> Floats:
    """Of each frame, without its mean and under a Hann window, up to one lag past the longest."""
    frames_TN = _frames(block)
    return _correlate((frames_TN - frames_TN.mean(axis=1, keepdims=True)) * _WINDOW)


def _correlate(frames_TN: Floats) -> Floats:
    spectrum = scipy.fft.rfft(frames_TN, n=FFT_SAMPLES)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    return np.asarray(scipy.fft.irfft(power, n=FFT_SAMPLES)[:, : LONGEST_LAG + 2])


def _mean(values_T: Floats) -> float:
    has_value_T = ~np.isnan(values_T)
    return float(values_T[has_value_T].mean()) if has_value_T.any() else np.nan


_WINDOW = np.hanning(WINDOW_SAMPLES)
_WINDOW_CORRELATION_L = (_correlate(_WINDOW[None]) / np.square(_WINDOW).sum())[0]
