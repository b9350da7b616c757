"""Measures of sounds that are known: tones, noise, and tones in noise at a known ratio."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.sounds import as_samples, noise, sine, voice

from sottovoce.base.seeds import stream
from sottovoce.papers import signals
from sottovoce.papers.signals import HEAD_SAMPLES, LPC_ORDER, MEASURES, WINDOW_SAMPLES, measure_signal

LOUDNESS, HNR, ENTROPY, SNR = range(len(MEASURES))
HANN = np.hanning(WINDOW_SAMPLES)
# So many independent samples give an energy that is as certain as that of a frame under the window.
EFFECTIVE = np.square(HANN).sum() ** 2 / (HANN**4).sum()


def energy_std_db(samples):
    """The standard deviation of the energy of so many samples of noise, in dB."""
    return 10 / math.log(10) * math.sqrt(2 / samples)


def test_loudness_is_the_root_mean_square():
    # 400 Hz fits sixteen times into a frame; a sample is off by half a step of 16 bits at most.
    assert measure_signal(as_samples(sine(400, rms=0.2)))[LOUDNESS] == pytest.approx(0.2, abs=0.5 / 32768)


def entropy_by_hand(frame):
    """Patterns named by the order in which sorting puts the three samples; equal ones stay as they are."""
    orders = np.argsort(np.lib.stride_tricks.sliding_window_view(frame, 3), axis=1, kind="stable")
    shares = [(orders == pattern).all(axis=1).mean() for pattern in permutations(range(3))]
    return -sum(share * math.log(share) for share in shares if share) / math.log(6)


@given(number=st.integers(0, 2**32), levels=st.integers(1, 9))
def test_permutation_entropy_agrees_with_sorting_also_where_samples_are_equal(number, levels):
    block = stream(number, "levels").integers(levels, size=WINDOW_SAMPLES + 160).astype(np.float64)
    found = signals.permutation_entropy(block)
    assert found == pytest.approx([entropy_by_hand(block[:640]), entropy_by_hand(block[160:])], abs=1e-12)


def test_permutation_entropy_is_low_for_a_tone_and_one_for_noise():
    assert signals.permutation_entropy(np.arange(WINDOW_SAMPLES) / 1000).tolist() == [0.0]
    # Of 80 triples in a tone's period 39 rise, 39 fall, and one turns at either end.
    shares = [39 / 80] * 2 + [1 / 80] * 2
    expected = -sum(share * math.log(share) for share in shares) / math.log(6)
    # A frame's 638 triples are not quite whole periods: each share is off by one triple at most.
    worst = sum(abs(math.log(share)) + 1 for share in shares) / 638 / math.log(6)
    assert measure_signal(as_samples(sine(200.001)))[ENTROPY] == pytest.approx(expected, abs=worst)
    # Of n draws from six equal shares the entropy is short of log 6 by 5 / 2n on average (Miller).
    bias = 5 / (2 * 638) / math.log(6)
    assert 1 - 2 * bias < measure_signal(as_samples(noise()))[ENTROPY] < 1


# The parabola between samples is good to a thousandth of the energy; a period of whole samples needs none.
@pytest.mark.parametrize(("hertz", "snr_db"), [(103, 0), (103, 5), (103, 10), (103, 20), (100, 20), (100, 30)])
def test_log_hnr_of_a_voice_in_noise_is_their_ratio(hertz, snr_db):
    noisy = voice(hertz) + noise(rms=0.1 * 10 ** (-snr_db / 20))
    periodic = 1 / (1 + 10 ** (-snr_db / 10))  # of the energy
    # The highest peak is taken, so the mean is off by up to what one frame is: in dB, d log(r / (1 − r)) = d(1 − r) /
    # (1 − r) / r, and 1 − r is the share of noise.
    assert measure_signal(as_samples(noisy))[HNR] == pytest.approx(snr_db, abs=energy_std_db(HEAD_SAMPLES) / periodic)


@pytest.mark.parametrize("snr_db", [5, 10, 20])
def test_blind_snr_of_a_tone_in_noise_is_what_its_autocorrelation_says(snr_db):
    noise_share = 10 ** (-snr_db / 10)
    lags = np.arange(LPC_ORDER + 1)
    known = np.cos(2 * np.pi * 150 * lags / 16_000) + noise_share * (lags == 0)
    (expected,) = signals.prediction_gain_db(known[None])
    # Ten weights can know two parts of a tone, not its noise, to a fifth: the residual is above the noise by that much.
    assert expected == pytest.approx(10 * math.log10((1 + noise_share) / noise_share / 1.2), abs=1)
    # Ten weights fitted to each frame take a share 10 / n of its noise with them; frames differ, their mean by little.
    bias = -10 * math.log10(1 - LPC_ORDER / EFFECTIVE)
    found = measure_signal(as_samples(sine(150) + noise(rms=0.1 * math.sqrt(noise_share))))[SNR]
    assert found == pytest.approx(expected + bias, abs=energy_std_db(EFFECTIVE) / 2)


def test_the_prediction_is_the_best_one():
    frame = (voice(120) + noise(rms=0.01))[:WINDOW_SAMPLES]
    windowed = frame * HANN
    # Least squares over the frame and the zeros around it, written out.
    padded = np.pad(windowed, LPC_ORDER)
    target = padded[LPC_ORDER:]
    past = np.stack([padded[LPC_ORDER - k : len(padded) - k] for k in range(1, LPC_ORDER + 1)], axis=1)
    weights = np.linalg.lstsq(past, target)[0]
    residual = target - past @ weights
    expected = 10 * math.log10((target @ target) / (residual @ residual))
    (found,) = signals.prediction_gain_db(signals.autocorrelations(frame[None]))
    # White noise of 1e-9 of the energy passes through the weights into the residual, which is `expected` dB smaller.
    added = signals.LPC_FLOOR * (1 + weights @ weights) * 10 ** (expected / 10)
    assert found == pytest.approx(expected, abs=10 * math.log10(1 + added))


def test_noise_is_not_voiced():
    found = measure_signal(as_samples(noise()))
    assert math.isnan(found[SNR])
    assert found[HNR] < 0


def test_silence_and_clips_below_a_frame_have_no_harmonics():
    silent = measure_signal(np.zeros(16_000, np.int16))
    assert silent[[LOUDNESS, ENTROPY]].tolist() == [0, 0]
    assert np.isnan(silent[[HNR, SNR]]).all()
    assert np.isnan(measure_signal(np.ones(WINDOW_SAMPLES - 1, np.int16))).all()
    assert measure_signal(np.ones(WINDOW_SAMPLES, np.int16))[LOUDNESS] == 1 / 32768


def test_a_pause_counts_for_loudness_and_not_for_the_snr():
    spoken = voice(120) + noise(rms=0.005)
    paused = np.where(np.arange(len(spoken)) < len(spoken) // 2, spoken, noise(rms=0.0001))
    whole, half = measure_signal(as_samples(spoken)), measure_signal(as_samples(paused))
    # Only the four frames across the edge are neither voice nor pause; half of all frames are one or the other.
    assert half[LOUDNESS] == pytest.approx(whole[LOUDNESS] / 2, rel=0.02)
    assert half[SNR] == pytest.approx(whole[SNR], abs=energy_std_db(EFFECTIVE))


def test_blocks_change_nothing(monkeypatch):
    samples = as_samples(voice(120) + noise(rms=0.02))[:30_000]
    whole = measure_signal(samples)
    monkeypatch.setattr(signals, "BLOCK_FRAMES", 7)
    assert measure_signal(samples) == pytest.approx(whole, rel=1e-12)
