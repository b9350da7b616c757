"""Where a speaker sits and what records them: reverberation, microphone, background noise, level.

Everything linear happens in one product of spectra: voice at espeak's rate ─rfft─► cut to the bins below 8 kHz
(resampling) × room × microphone ─irfft─► 16 kHz; then noise at the room's SNR, level, 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE

Samples = NDArray[np.float32]
Record = Callable[[NDArray[np.int16], np.random.Generator], NDArray[np.int16]]

NOISES = ("hiss", "pink", "traffic", "hum", "babble")
# 20 ms is 441 samples at espeak's 22,050 Hz and 320 at 16,000 Hz. A vocal tract of n/32 of the usual length stretches
# the wave by as much (lower formants and pitch, slower speech): 10 n samples instead of 320.
BLOCK = 441
PEAK = 0.95
MARGIN_SECONDS = (0.08, 0.45)  # of room before and after the speech
REVERB_CUT = 0.7  # of the RT60 is kept: 42 dB of decay, below any crowd's noise


@dataclass(frozen=True, slots=True)
class Room:
    """One user's recording conditions. Reverberation energy lies `direct_db` below the direct sound."""

    rt60_seconds: float
    direct_db: float
    noise: str
    snr_db: float
    level_db: float  # of the speech, relative to full scale
    low_cut_hz: float
    high_cut_hz: float
    tilt_db: float  # per octave, around 1 kHz
    peak_hz: float
    peak_db: float
    seed: int


def make_recorder(room: Room, *, tract: int, longest_seconds: float) -> Record:
    """A function that records one utterance in `room`, from espeak's samples to 16 kHz ones.

    The spectra of the room are computed once per FFT length, and its noise once: each utterance gets another stretch.
    """
    impulse = draw_impulse_response(room)
    noise = draw_background(room, seconds=longest_seconds + 2.0)

    @cache
    def response(blocks: int) -> NDArray[np.complex64]:
        length = 10 * tract * blocks
        spectrum = fft.rfft(impulse, length) * compute_microphone_gain(room, _frequencies(length))
        # irfft divides by the short length where rfft summed over the long one.
        return np.asarray(spectrum * (length / (BLOCK * blocks)), dtype=np.complex64)

    def record(voice: NDArray[np.int16], rng: np.random.Generator) -> NDArray[np.int16]:
        blocks = fft.next_fast_len(-(-len(voice) // BLOCK) + len(impulse) // (10 * tract) + 1)
        transfer = response(blocks)
        spectrum = fft.rfft(voice.astype(np.float32), BLOCK * blocks)[: len(transfer)]
        wet = fft.irfft(spectrum * transfer, 10 * tract * blocks)
        spoken = round(len(voice) * 10 * tract / BLOCK)
        before, after = (round(seconds * SAMPLE_RATE) for seconds in rng.uniform(*MARGIN_SECONDS, size=2))
        wet = wet[: spoken + after]

        start = int(rng.integers(len(noise) - before - spoken - after))
        mixed = noise[start : start + before + spoken + after].copy()
        mixed *= _rms(wet[:spoken]) / _rms(mixed) * _gain(-room.snr_db + rng.normal(scale=1.5))
        mixed[before : before + len(wet)] += wet
        mixed *= _gain(room.level_db + rng.normal(scale=1.5)) / _rms(wet[:spoken])
        mixed *= min(1.0, PEAK / float(np.abs(mixed).max()))
        return np.rint(mixed * 32767).astype(np.int16)

    return record


def draw_impulse_response(room: Room) -> Samples:
    """The direct sound, then noise that decays by 60 dB in `rt60_seconds`, its treble twice as fast."""
    from scipy import signal  # here: most who import this, to know of the crowds, synthesise none

    rng = stream(room.seed, "impulse")
    delay = round(rng.uniform(0.002, 0.012) * SAMPLE_RATE)
    length = round(REVERB_CUT * room.rt60_seconds * SAMPLE_RATE)
    raw = rng.standard_normal(length, dtype=np.float32)
    decay = 10 ** (-3 * np.arange(length, dtype=np.float32) / (room.rt60_seconds * SAMPLE_RATE))
    bass = signal.lfilter([0.3], [1, -0.7], raw).astype(np.float32)
    tail = bass * decay + 0.5 * (raw - bass) * decay**2
    tail *= _gain(-room.direct_db) / np.sqrt(np.sum(tail**2))
    return np.concatenate([np.ones(1, np.float32), np.zeros(delay, np.float32), tail])


def compute_microphone_gain(room: Room, frequencies: Samples) -> Samples:
    """The microphone's gain at each frequency: band limits, a tilt and one resonance."""
    hertz = np.maximum(frequencies, np.float32(1.0))
    octaves = np.log2(hertz / 1000)
    decibels = room.tilt_db * np.clip(octaves, -3, 3)
    decibels += room.peak_db * np.exp(-2 * np.log2(hertz / room.peak_hz) ** 2)
    band = 1 / np.sqrt((1 + (room.low_cut_hz / hertz) ** 4) * (1 + (hertz / room.high_cut_hz) ** 12))
    # Fade out what lies just below 8 kHz, or cutting the spectrum there would ring.
    edge = np.clip((SAMPLE_RATE / 2 - hertz) / 400, 0, 1)
    return np.asarray(10 ** (decibels / 20) * band * edge, dtype=np.float32)


def draw_background(room: Room, *, seconds: float) -> Samples:
    """The room's noise as the microphone records it, with unit power and a little hiss of the electronics."""
    rng = stream(room.seed, "background")
    length = fft.next_fast_len(round(seconds * SAMPLE_RATE))
    white = rng.standard_normal(length, dtype=np.float32)
    frequencies = _frequencies(length)
    hertz = np.maximum(frequencies, np.float32(20.0))
    colour = {
        "hiss": np.ones_like(hertz),
        "pink": hertz**-0.5,
        "traffic": hertz**-1.0,
        "hum": hertz**-0.5,
        "babble": 1 / (1 + (hertz / 500) ** 1.5),
    }[room.noise]
    shaped = fft.irfft(fft.rfft(white) * (colour * compute_microphone_gain(room, frequencies)), length)
    noise = shaped / _rms(shaped)
    if room.noise == "babble":
        noise = _babble(noise, rng)
    elif room.noise == "traffic":
        noise = noise * _swell(length, rate=0.5, depth=0.5, rng=rng)
    elif room.noise == "hum":
        noise = 0.5 * noise + _hum(length, rng)
    noise = noise / _rms(noise) + 0.05 * white
    return np.asarray(noise / _rms(noise), dtype=np.float32)


def _babble(noise: Samples, rng: np.random.Generator) -> Samples:
    """A few talkers: speech-shaped noise, each with syllables (4 a second) of its own."""
    talkers = [
        np.roll(noise, int(rng.integers(len(noise)))) * _swell(len(noise), rate=4.0, depth=1.5, rng=rng)
        for _ in range(int(rng.integers(3, 7)))
    ]
    return np.asarray(np.sum(talkers, axis=0), dtype=np.float32)


def _swell(length: int, *, rate: float, depth: float, rng: np.random.Generator) -> Samples:
    """A gain that wanders `rate` times a second, log-normal with spread `depth`."""
    knots = rng.normal(scale=depth, size=int(2 * rate * length / SAMPLE_RATE) + 2)
    places = np.linspace(0, len(knots) - 1, length, dtype=np.float32)
    return np.asarray(np.exp(np.interp(places, np.arange(len(knots)), knots)), dtype=np.float32)


def _hum(length: int, rng: np.random.Generator) -> Samples:
    """The mains, 50 or 60 Hz, and its overtones."""
    mains = 50.0 if rng.random() < 0.5 else 60.0
    phase = np.float32(2 * np.pi * mains / SAMPLE_RATE) * np.arange(length, dtype=np.float32)
    total = np.zeros(length, np.float32)
    for order in (1, 2, 3, 4, 6):
        gain, shift = rng.uniform(0.2, 1.0) / order, rng.uniform(0, 2 * np.pi)
        total += np.float32(gain) * np.sin(order * phase + np.float32(shift))
    return total


def _rms(samples: Samples) -> float:
    return float(np.sqrt(np.mean(samples * samples))) + 1e-9


def _gain(decibels: float) -> float:
    return float(10 ** (decibels / 20))


def _frequencies(length: int) -> Samples:
    """The frequency of each bin of an rfft of `length` samples, in hertz."""
    return np.arange(length // 2 + 1, dtype=np.float32) * np.float32(SAMPLE_RATE / length)
