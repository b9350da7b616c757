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

from sottovoce.data.corpora.corpus import SAMPLE_RATE

Floats = NDArray[np.float64]

WINDOW_SAMPLES = SAMPLE_RATE * 40 // 1000
HOP_SAMPLES = SAMPLE_RATE * 10 // 1000
INT16_SCALE = 1.0 / 32768.0
# Twenty seconds at once: however long a recording is, its frames take some 75 MB.
BLOCK_FRAMES = 2000

LOWEST_HZ, HIGHEST_HZ = 75, 400
SHORTEST_LAG, LONGEST_LAG = SAMPLE_RATE // HIGHEST_HZ, SAMPLE_RATE // LOWEST_HZ
HEAD_SAMPLES = WINDOW_SAMPLES - LONGEST_LAG - 1  # that fit into a frame at one lag past the longest too
# Far less than a single step of 16 bits, far more than rounding.
SILENCE = 1e-15
HNR_LIMIT_DB = 40.0
# Praat's own: how periodic a voiced frame is, and how loud beside the loudest one.
VOICED_CORRELATION, VOICED_LOUDNESS = 0.45, 0.03

LPC_ORDER = 10
# White noise 90 dB below the frame keeps the equations of a pure tone solvable.
LPC_FLOOR = 1e-9

PATTERNS = 6  # 3!, the orders of three samples


@dataclass(frozen=True)
class SignalMeasure:
    """One of the four, by the name it has in JSON; `definition` is shown wherever its value is."""

    name: str
    title: str
    unit: str
    definition: str


MEASURES = (
    SignalMeasure("loudness", "loudness", "RMS", "linear root mean square of a frame, full scale = 1"),
    SignalMeasure(
        "log_hnr",
        "log-HNR",
        "dB",
        "harmonics-to-noise ratio, 10·log10(r / (1 − r)), r the highest peak of a frame's normalised "
        f"cross-correlation with itself at {LOWEST_HZ}–{HIGHEST_HZ} Hz (Talkin 1995), "
        f"within ±{HNR_LIMIT_DB:.0f} dB, frames of digital silence left out",
    ),
    SignalMeasure(
        "permutation_entropy",
        "permutation entropy",
        "0–1",
        "entropy of the orders of three samples next to one another (order 3, delay 1) in a frame, divided by log 3!; "
        "equal samples count as rising",
    ),
    SignalMeasure(
        "blind_snr",
        "blind SNR",
        "dB",
        f"a frame's energy over that of its residual after linear prediction of order {LPC_ORDER} (autocorrelation, "
        f"Hann window), voiced frames only: r ≥ {VOICED_CORRELATION} and at least {100 * VOICED_LOUDNESS:.0f} % of the "
        "utterance's loudest",
    ),
)


def measure_signal(samples: NDArray[np.int16]) -> Floats:
    """The mean over frames of each of `MEASURES`; NaN where no frame has a value: too short, silent, never voiced."""
    if len(samples) < WINDOW_SAMPLES:
        return np.full(len(MEASURES), np.nan)
    loudness_T = np.concatenate([_loudness(block) for block in _blocks(samples)])
    rows, done = [], 0
    for block in _blocks(samples):
        frames_TN = _frames(block)
        frames_TN = frames_TN - frames_TN.mean(axis=1, keepdims=True)
        loud_T = loudness_T[done : done + len(frames_TN)] >= VOICED_LOUDNESS * loudness_T.max()
        done += len(frames_TN)
        harmonicity_T = harmonicity(frames_TN)
        voiced_T = loud_T & (harmonicity_T >= VOICED_CORRELATION)
        snr_T = np.full(len(frames_TN), np.nan)
        snr_T[voiced_T] = prediction_gain_db(autocorrelations(frames_TN[voiced_T]))
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


def harmonicity(frames_TN: Floats) -> Floats:
    """How alike a frame's head and what follows it a period later are, at best, between samples too: 1 if periodic.

    Every lag compares as many samples and has its own norm: a voice that swells is as periodic as a steady one.
    """
    head = scipy.fft.rfft(frames_TN[:, :HEAD_SAMPLES], n=WINDOW_SAMPLES)
    products_TL = scipy.fft.irfft(head.conj() * scipy.fft.rfft(frames_TN), n=WINDOW_SAMPLES)[:, : LONGEST_LAG + 2]
    running = np.pad(np.cumsum(np.square(frames_TN), axis=1), ((0, 0), (1, 0)))
    energy_TL = running[:, HEAD_SAMPLES:] - running[:, : LONGEST_LAG + 2]
    normal_TL = products_TL / np.sqrt(energy_TL[:, :1].clip(min=SILENCE) * energy_TL.clip(min=SILENCE))
    left, middle, right = (normal_TL[:, SHORTEST_LAG + shift : LONGEST_LAG + 1 + shift] for shift in (-1, 0, 1))
    is_peak = (middle >= left) & (middle > right)
    bend = np.where(is_peak, left - 2 * middle + right, -1.0)
    heights = np.where(is_peak, middle - (left - right) ** 2 / (8 * bend), 0.0)  # of the parabola through the three
    return np.where(energy_TL[:, 0] > SILENCE, heights.max(axis=1), np.nan)


def hnr_db(harmonicity_T: Floats) -> Floats:
    edge = 1 / (1 + 10 ** (HNR_LIMIT_DB / 10))
    share_T = harmonicity_T.clip(edge, 1 - edge)
    return np.asarray(10 * np.log10(share_T / (1 - share_T)))


def autocorrelations(frames_TN: Floats) -> Floats:
    """Of each frame under a Hann window, at the lags that linear prediction asks for."""
    windowed_TN = frames_TN * np.hanning(WINDOW_SAMPLES)
    pairs = ((windowed_TN[:, : WINDOW_SAMPLES - lag], windowed_TN[:, lag:]) for lag in range(LPC_ORDER + 1))
    return np.stack([np.einsum("tn,tn->t", *pair) for pair in pairs], axis=1)


def prediction_gain_db(correlations_TL: Floats) -> Floats:
    """Energy over residual energy, in dB, of the best linear prediction from the last ten samples."""
    known = correlations_TL / correlations_TL[:, :1]
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


def _mean(values_T: Floats) -> float:
    has_value_T = ~np.isnan(values_T)
    return float(values_T[has_value_T].mean()) if has_value_T.any() else np.nan
