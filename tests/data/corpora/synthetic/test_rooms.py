from dataclasses import replace

import numpy as np
import pytest
from scipy import signal

from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.corpora.synthetic.rooms import NOISES, Room, draw_background, draw_impulse_response, make_recorder

ESPEAK_RATE = 22_050
# Nothing but the wave itself: no echo worth the name, a flat microphone, noise far below 16 bits.
CLEAN = Room(
    rt60_seconds=0.05, direct_db=90, noise="hiss", snr_db=120, level_db=-20, low_cut_hz=1, high_cut_hz=1e5,
    tilt_db=0, peak_hz=1000, peak_db=0, seed=1,
)  # fmt: skip


def tone(hertz: float, seconds: float = 2.0) -> np.ndarray:
    return np.rint(8000 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * ESPEAK_RATE)) / ESPEAK_RATE)).astype(
        np.int16
    )


def loudest_hertz(samples: np.ndarray) -> float:
    frequencies, power = signal.periodogram(samples.astype(float), SAMPLE_RATE)
    return float(frequencies[power.argmax()])


@pytest.mark.parametrize("hertz", [110.0, 1000.0, 5000.0])
@pytest.mark.parametrize("tract", [29, 32, 35])
def test_resampling_keeps_time_and_pitch(hertz: float, tract: int) -> None:
    recorded = make_recorder(CLEAN, tract=tract, longest_seconds=3)(tone(hertz), stream(1, "take"))
    # A tract of 35/32 the length lowers every frequency, and slows the speech, by 32/35.
    assert loudest_hertz(recorded) == pytest.approx(hertz * 32 / tract, rel=2e-3)
    margins = len(recorded) / SAMPLE_RATE - 2.0 * tract / 32
    assert 0.16 <= margins <= 0.9


def test_nothing_above_eight_kilohertz_folds_back() -> None:
    voice = tone(1000) + tone(9500)
    recorded = make_recorder(CLEAN, tract=32, longest_seconds=3)(voice, stream(1, "take")).astype(float)
    frequencies, power = signal.welch(recorded, SAMPLE_RATE, nperseg=2048)
    # 9,500 Hz would fold to 16,000 - 9,500 = 6,500 Hz.
    assert power[np.abs(frequencies - 6500) < 50].max() < 1e-5 * power[np.abs(frequencies - 1000) < 50].max()


@pytest.mark.parametrize("noise", NOISES)
def test_signal_to_noise_ratio_and_level_are_as_asked(noise: str) -> None:
    voice = (np.random.default_rng(0).normal(size=2 * ESPEAK_RATE) * 3000).astype(np.int16)
    noisy_room = replace(CLEAN, noise=noise, snr_db=12.0)
    clean, noisy = (make_recorder(room, tract=32, longest_seconds=3) for room in (CLEAN, noisy_room))
    ratios, levels = [], []
    for take in range(40):
        # The same take: same margins, so what differs is the noise (and the level, which `gain` takes out).
        speech = clean(voice, stream(take, "take")).astype(float)
        mixed = noisy(voice, stream(take, "take")).astype(float)
        gain = (speech @ mixed) / (speech @ speech)
        active = np.flatnonzero(np.abs(speech) > 10)
        spoken = gain * speech[active[0] : active[-1] + 1]
        ratios.append(20 * np.log10(spoken.std() / (mixed - gain * speech).std()))
        levels.append(20 * np.log10(spoken.std() / 32767))
    # Each take wanders by 1.5 dB around the speaker's own: the mean of 40 by 0.24.
    assert np.mean(ratios) == pytest.approx(12.0, abs=0.8)
    assert np.mean(levels) == pytest.approx(-20.0, abs=0.8)


def test_reverberation_decays_and_lies_below_the_direct_sound() -> None:
    room = replace(CLEAN, rt60_seconds=0.5, direct_db=6.0)
    impulse = draw_impulse_response(room)
    tail = impulse[1:]
    assert 10 * np.log10(np.sum(tail**2)) == pytest.approx(-6.0, abs=0.1)
    # Schroeder's backward integral: between -5 and -25 dB the slope gives the time for 60 dB.
    energy = 10 * np.log10(np.cumsum(tail[::-1] ** 2)[::-1] / np.sum(tail**2))
    reached = [np.argmax(energy < level) / SAMPLE_RATE for level in (-5, -25)]
    assert 3 * (reached[1] - reached[0]) == pytest.approx(0.5, rel=0.2)


def test_loud_recordings_are_turned_down_rather_than_clipped() -> None:
    recorded = make_recorder(replace(CLEAN, level_db=20), tract=32, longest_seconds=3)(tone(300), stream(1, "take"))
    assert int(np.abs(recorded.astype(int)).max()) <= 31_200


@pytest.mark.parametrize("noise", NOISES)
def test_noises_have_unit_power_and_differ_between_rooms(noise: str) -> None:
    one, other = (draw_background(replace(CLEAN, noise=noise, seed=seed), seconds=5) for seed in (1, 2))
    assert one.dtype == np.float32
    assert np.sqrt(np.mean(one**2)) == pytest.approx(1, rel=1e-3)
    assert not np.array_equal(one, other)
