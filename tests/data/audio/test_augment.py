"""Masks keep within their bounds and their utterance; speed and noise do what their names say."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import soxr
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.augment import (
    NoiseSettings,
    SpecAugmentSettings,
    add_noise,
    apply_masks,
    change_speed,
    draw_masks,
    mix_at_snr,
    perturb_speed,
    pink_noise,
)

PAPER = SpecAugmentSettings()
RATE = 16_000


def spec_augment(
    features_BTF: torch.Tensor, lengths_B: torch.Tensor, *, settings: SpecAugmentSettings, generator: torch.Generator
) -> torch.Tensor:
    draws = draw_masks(len(features_BTF), settings=settings, generator=generator)
    return apply_masks(features_BTF, lengths_B, draws=draws, settings=settings)


def masked(frame_lengths: list[int], spec: SpecAugmentSettings, seed: int, *, filters: int = 80) -> torch.Tensor:
    """True where ones were zeroed. Padding holds ones as well, so touching it would show."""
    features_BTF = torch.ones(len(frame_lengths), max(frame_lengths), filters)
    return spec_augment(features_BTF, torch.tensor(frame_lengths), settings=spec, generator=torch_stream(seed)) == 0


def runs(marks: torch.Tensor) -> list[int]:
    """Lengths of the runs of True."""
    edges = torch.diff(marks.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return ((edges == -1).nonzero() - (edges == 1).nonzero()).flatten().tolist()


@given(frame_lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_masks_stay_within_their_number_width_and_utterance(frame_lengths: list[int], seed: int) -> None:
    for marks_TF, frames in zip(masked(frame_lengths, PAPER, seed), frame_lengths, strict=True):
        assert not marks_TF[frames:].any()
        whole_frames, whole_filters = marks_TF[:frames].all(dim=1), marks_TF[:frames].all(dim=0)
        # What is masked is a union of whole frames and whole filters, nothing else.
        if not whole_frames.all():
            assert torch.equal(marks_TF[:frames], whole_frames[:, None] | whole_filters[None, :])
            assert len(runs(whole_filters)) <= 2
            assert whole_filters.sum() <= 2 * 30
        assert len(runs(whole_frames)) <= 10
        assert whole_frames.sum() <= 10 * min(50, int(0.1 * frames + 1e-6))


@given(frame_lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_one_time_mask_is_at_most_a_tenth_of_its_own_utterance(frame_lengths: list[int], seed: int) -> None:
    spec = SpecAugmentSettings(frequency_masks=0, time_masks=1)
    for marks_TF, frames in zip(masked(frame_lengths, spec, seed), frame_lengths, strict=True):
        assert marks_TF.any(dim=1).sum() <= min(50, 0.1 * frames)


def test_widths_and_places_reach_every_value_they_may() -> None:
    # 4,000 draws of a width in 0 … 3 within 10 filters: every width, and every place of the widest, must occur.
    spec = SpecAugmentSettings(frequency_masks=1, frequency_width=3, time_masks=0)
    marks_BF = masked([1] * 4_000, spec, 7, filters=10)[:, 0]
    widths = marks_BF.sum(dim=1)
    assert widths.unique().tolist() == [0, 1, 2, 3]
    assert marks_BF[widths == 3].int().argmax(dim=1).unique().tolist() == list(range(8))
    # Uniform widths: each of the four has 1,000 ± 4 standard deviations of √(4000 · ¼ · ¾) = 27.
    assert all(abs(count - 1_000) < 110 for count in torch.bincount(widths).tolist())


def test_a_mask_wider_than_the_features_is_cut_to_them() -> None:
    spec = SpecAugmentSettings(frequency_masks=1, frequency_width=30, time_masks=0)
    assert masked([4] * 50, spec, 1, filters=8).shape == (50, 4, 8)


def test_same_generator_same_masks_whatever_the_padding() -> None:
    features_BTF = torch.randn(3, 500, 80, generator=torch_stream(1))
    lengths_B = torch.tensor([300, 200, 290])
    first = spec_augment(features_BTF, lengths_B, settings=PAPER, generator=torch_stream(2))
    again = spec_augment(features_BTF[:, :300], lengths_B, settings=PAPER, generator=torch_stream(2))
    other = spec_augment(features_BTF, lengths_B, settings=PAPER, generator=torch_stream(3))
    assert torch.equal(first[:, :300], again)
    assert not torch.equal(first, other)


def test_joined_batches_get_the_masks_they_would_get_alone() -> None:
    features_BTF, lengths_B = torch.randn(4, 200, 80, generator=torch_stream(1)), torch.tensor([200, 150, 180, 90])
    draws = torch.cat([draw_masks(2, settings=PAPER, generator=torch_stream(seed)) for seed in (5, 6)])
    joined = apply_masks(features_BTF, lengths_B, draws=draws, settings=PAPER)
    alone = [
        spec_augment(features_BTF[rows], lengths_B[rows], settings=PAPER, generator=torch_stream(seed))
        for rows, seed in ((slice(0, 2), 5), (slice(2, 4), 6))
    ]
    assert torch.equal(joined, torch.cat(alone))


def tone(hertz: float, samples: int = RATE) -> torch.Tensor:
    return torch.sin(2 * torch.pi * hertz * torch.arange(samples, dtype=torch.float64) / RATE).float()[None]


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_moves_a_tone_and_keeps_its_amplitude(speed: float) -> None:
    played_BN, played_B = change_speed(tone(1_000), torch.tensor([RATE]), speed=speed)
    assert played_B.tolist() == [int(np.ceil(RATE / speed))]
    expected = tone(1_000 * speed, played_BN.shape[1])
    inner = slice(100, -100)  # the ends meet silence, and ring
    torch.testing.assert_close(played_BN[:, inner], expected[:, inner], atol=2e-3, rtol=0)


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_agrees_with_soxr(speed: float) -> None:
    noise = torch.randn(1, RATE, generator=torch_stream(4))
    spectrum = torch.fft.rfft(noise)
    spectrum[:, 6_000:] = 0  # soxr's filter is steeper: compare where both pass
    band_BN = torch.fft.irfft(spectrum)
    played_BN, _ = change_speed(band_BN, torch.tensor([RATE]), speed=speed)
    theirs = torch.from_numpy(soxr.resample(band_BN[0].numpy(), speed * 10, 10, quality="VHQ"))
    inner = slice(200, min(len(theirs), played_BN.shape[1]) - 200)
    assert (played_BN[0, inner] - theirs[inner]).square().mean().sqrt() < 5e-3 * theirs.square().mean().sqrt()


def test_faster_speech_does_not_alias() -> None:
    played_BN, _ = change_speed(tone(7_900), torch.tensor([RATE]), speed=1.1)  # would come back at 7,310 Hz
    assert played_BN[0, 100:-100].abs().max() < 0.02


def test_every_utterance_gets_one_of_the_speeds_and_silence_behind_it() -> None:
    lengths_B = torch.tensor([8_000, 4_321, 1] * 20)
    waveforms_BN = torch.full((60, 8_000), 1_000, dtype=torch.int16)
    played_BN, played_B = perturb_speed(waveforms_BN, lengths_B, generator=torch_stream(9))
    used: set[tuple[int, int]] = set()
    for row, before, after in zip(played_BN, lengths_B.tolist(), played_B.tolist(), strict=True):
        fitting = [s for s in ((9, 10), (10, 10), (11, 10)) if -(-before * s[1] // s[0]) == after]
        assert fitting
        assert not row[after:].any()
        used.update(fitting if before == 8_000 else ())
    assert len(used) == 3
    again_BN, _ = perturb_speed(waveforms_BN, lengths_B, generator=torch_stream(9))
    assert torch.equal(played_BN, again_BN)


@given(snr_db=st.floats(-10, 60), length=st.integers(100, 4_000), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_noise_is_added_at_the_ratio_asked_for(snr_db: float, length: int, seed: int) -> None:
    speech_BN = tone(300, 4_000).clone()
    speech_BN[:, length:] = 0
    noise_BN = torch.randn(1, 4_000, generator=torch_stream(seed))
    lengths_B = torch.tensor([length])
    mixed_BN = mix_at_snr(speech_BN, lengths_B, noise_BN=noise_BN, snr_db_B=torch.tensor([snr_db]))
    added_BN = (mixed_BN - speech_BN).double()
    measured = 10 * torch.log10(speech_BN.double().square().sum() / added_BN.square().sum())
    assert measured.item() == pytest.approx(snr_db, abs=0.05)
    assert not mixed_BN[:, length:].any()


def test_silence_and_silent_noise_stay_finite() -> None:
    silence_BN, lengths_B, snr_db_B = torch.zeros(2, 500), torch.tensor([500, 0]), torch.tensor([10.0, 10.0])
    noise_BN = torch.ones(2, 500)
    assert not mix_at_snr(silence_BN, lengths_B, noise_BN=noise_BN, snr_db_B=snr_db_B).any()
    kept = mix_at_snr(noise_BN, torch.tensor([500, 500]), noise_BN=silence_BN, snr_db_B=snr_db_B)
    assert torch.equal(kept, noise_BN)


def test_pink_noise_loses_three_decibels_an_octave() -> None:
    noise_BN = pink_noise(8, 2**15, generator=torch_stream(3))
    power = torch.fft.rfft(noise_BN).abs().square().mean(dim=0)
    octaves = [power[2**k : 2 ** (k + 1)].mean() for k in range(6, 14)]
    steps = [10 * torch.log10(b / a).item() for a, b in pairwise(octaves)]
    # The mean of 1/f over [f, 2f) halves with every octave: −3.01 dB; 8 rows of at least 64 bins scatter by 0.2 dB.
    assert np.mean(steps) == pytest.approx(-3.01, abs=0.2)


def test_random_noise_is_reproducible_and_within_its_bounds() -> None:
    waveforms_BN = (tone(500, 8_000) * 10_000).to(torch.int16).repeat(64, 1)
    lengths_B = torch.full((64,), 8_000)
    spec = NoiseSettings(lowest_snr_db=5.0, highest_snr_db=15.0)
    noisy_BN = add_noise(waveforms_BN, lengths_B, settings=spec, generator=torch_stream(1))
    speech_BN = waveforms_BN / 32768
    snr_db = 10 * torch.log10(speech_BN.square().sum(1) / (noisy_BN - speech_BN).square().sum(1))
    assert snr_db.min() > 4.9
    assert snr_db.max() < 15.1
    assert snr_db.max() - snr_db.min() > 5
    assert torch.equal(noisy_BN, add_noise(waveforms_BN, lengths_B, settings=spec, generator=torch_stream(1)))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: SpecAugmentSettings(time_masks=-1), "SpecAugment: time_masks=-1, expected at least 0"),
        (lambda: SpecAugmentSettings(time_ratio=1.5), "time_ratio=1.5, expected a share"),
        (lambda: NoiseSettings(lowest_snr_db=20, highest_snr_db=10), "expected finite numbers in this order"),
        (lambda: NoiseSettings(highest_snr_db=math.inf), "expected finite numbers in this order"),
    ],
)
def test_impossible_settings_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()
