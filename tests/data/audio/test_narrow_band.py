"""Speech of a narrow band: ears that hear as much of it as of any other, training that knows it, and who is told."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from numpy.typing import NDArray
from scipy.signal import firwin, oaconvolve
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.augment import NarrowBandSettings, draw_bands, empty_bands
from sottovoce.data.audio.features import (
    FeatureSettings,
    filter_hertz,
    frame_lengths,
    log_mel,
    normalise_filters,
    raise_floor,
)
from sottovoce.data.audio.narrow_band import format_narrow_count, is_narrow_band
from sottovoce.data.audio.waveforms import pack_waveforms, pad_waveforms
from sottovoce.data.corpora.listing import AUDIO_SUFFIXES
from sottovoce.models.log_mel import PAPER_FEATURES, extract_log_mel, narrow_log_mel, normalised_log_mel

Samples = NDArray[np.int16]
ANY_BAND = FeatureSettings(normalise="filter", floor_db=40.0)
EARS = [
    PAPER_FEATURES,
    FeatureSettings(normalise="filter"),
    FeatureSettings(floor_db=40.0),
    ANY_BAND,
]
HERTZ_F = torch.from_numpy(filter_hertz()).float()


def spoken(samples: int = 24_000, *, seed: int = 0, loudness: float = 3_000) -> Samples:
    """Noise of all frequencies in syllables, between pauses: what varies like speech does."""
    rng = np.random.default_rng(seed)
    syllables = np.repeat(rng.uniform(0, 1, -(-samples // 1_600)) ** 3, 1_600)[:samples]
    return (loudness * syllables * rng.normal(0, 1, samples)).clip(-32_768, 32_767).astype(np.int16)


def through_8_khz(samples: Samples, *, rate: int = 16_000) -> Samples:
    """A recording at `rate`, written at 8 kHz and 16 bits, and at 16 kHz again."""
    low = np.rint(soxr.resample(samples / 32_768, rate, 8_000) * 32_768) / 32_768
    return np.rint(soxr.resample(low, 8_000, 16_000) * 32_768).clip(-32_768, 32_767).astype(np.int16)


def heard(samples: Samples, ears: FeatureSettings) -> Tensor:
    return normalised_log_mel(torch.from_numpy(samples)[None], torch.tensor([len(samples)]), features=ears)[0]


# What ears make of it.


@pytest.mark.parametrize("ears", EARS, ids=str)
def test_an_utterance_is_heard_the_same_in_any_batch_and_however_it_lies(ears: FeatureSettings) -> None:
    clips = [spoken(24_000), spoken(9_000, seed=1, loudness=30), spoken(399, seed=2), spoken(16_000, seed=3)]
    lines, ends = (extract_log_mel(recorded(clips), features=ears) for recorded in (pad_waveforms, pack_waveforms))
    for own, (clip, frames) in enumerate(zip(clips, lines.frames_U.tolist(), strict=True)):
        alone_TF = heard(clip, ears)
        # Rounding, of sums in another order where there is padding among them; and of one frame, 316 times that much.
        torch.testing.assert_close(lines.features_UTF[own, :frames], alone_TF, rtol=0, atol=5e-4)
        torch.testing.assert_close(ends.features_UTF[own, :frames], alone_TF, rtol=0, atol=5e-4)
        assert not lines.features_UTF[own, frames:].any()
        assert not ends.features_UTF[own, frames:].any()


@pytest.mark.parametrize("ears", EARS, ids=str)
@pytest.mark.parametrize("value", [0, 1, -30_000])
def test_constant_short_and_empty_clips_stay_finite(value: int, ears: FeatureSettings) -> None:
    clips = [np.full(samples, value, dtype=np.int16) for samples in (16_000, 400, 7, 1, 0)]
    found = extract_log_mel(pad_waveforms(clips), features=ears)
    assert found.features_UTF.isfinite().all()
    assert not found.features_UTF[4].any()
    assert found.features_UTF[0].abs().max() < 10


def test_the_papers_ears_are_those_from_before() -> None:
    """To the bit, without an option and with the defaults."""
    recordings = pad_waveforms([spoken(), spoken(9_000)])
    assert torch.equal(
        extract_log_mel(recordings).features_UTF, extract_log_mel(recordings, features=FeatureSettings()).features_UTF
    )


def test_filters_have_no_mean_and_those_that_vary_one_scale() -> None:
    features_1TF = log_mel(torch.from_numpy(spoken())[None], torch.tensor([24_000]))[0]
    found_TF = normalise_filters(features_1TF, torch.tensor([features_1TF.shape[1]]))[0].double()
    assert found_TF.mean(0).abs().max() < 1e-5
    variance_F = found_TF.square().mean(0)
    assert float((variance_F**2).sum() / variance_F.sum()) == pytest.approx(1, abs=1e-4)


def test_what_rounding_leaves_in_an_empty_band_is_not_blown_up() -> None:
    """Filters above 4.4 kHz hold what rounding to 16 bits left: it must not look like speech."""
    loud_TF = heard(through_8_khz(spoken(loudness=8_000)), ANY_BAND)
    above, below = loud_TF[:, HERTZ_F > 4_400], loud_TF[:, (HERTZ_F > 300) & (HERTZ_F < 3_400)]
    assert above.abs().max() < 1e-5  # all of it lies below the floor
    assert float(below.square().mean()) > 0.5
    quiet_TF = heard(through_8_khz(spoken(loudness=100)), FeatureSettings(normalise="filter"))
    assert quiet_TF[:, HERTZ_F > 4_400].square().mean() < 0.2 * quiet_TF[:, HERTZ_F < 3_400].square().mean()


def apart(one: Samples, other: Samples, ears: FeatureSettings) -> float:
    """How differently two recordings sound in the band that every recording has."""
    inside_F = (HERTZ_F > 300) & (HERTZ_F < 3_400)
    return float((heard(one, ears) - heard(other, ears))[:, inside_F].square().mean().sqrt())


def test_what_is_heard_of_speech_hangs_neither_on_its_band_nor_on_its_loudness() -> None:
    wide = spoken(loudness=2_000)
    louder, narrow = (wide.astype(int) * 3).astype(np.int16), through_8_khz(wide)
    assert max(apart(wide, louder, ANY_BAND), apart(wide, narrow, ANY_BAND)) < 0.2
    assert apart(wide, narrow, PAPER_FEATURES) > 0.4


def test_what_a_line_does_to_each_filter_is_not_heard() -> None:
    """Where there is some noise in the pauses; in digital silence there is nothing that a line could change."""
    noisy = spoken(loudness=2_000) + np.random.default_rng(9).normal(0, 30, 24_000)
    tilted = 0.5 * noisy + 2 * oaconvolve(noisy, firwin(31, 2_000, fs=16_000))[15:-15]
    one, other = noisy.astype(np.int16), tilted.astype(np.int16)
    assert apart(one, other, FeatureSettings(normalise="filter")) < 0.1
    assert apart(one, other, PAPER_FEATURES) > 0.3


def test_a_floor_hangs_on_the_loudest_and_not_on_how_much_silence_there_is() -> None:
    clip = spoken()
    padded = np.concatenate([clip, np.zeros(48_000, dtype=np.int16)])
    found = []
    for samples in (clip, padded):
        features_1TF, frames_1 = log_mel(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
        found.append(raise_floor(features_1TF, frames_1, decibels=30.0)[0, :140])
    assert torch.equal(*found)
    loudest = found[0][:, (HERTZ_F > 300) & (HERTZ_F < 3_400)].max()
    assert float(loudest - found[0].min()) == pytest.approx(3 * math.log(10), abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "told_of"),
    [
        (lambda: FeatureSettings(normalise="channel"), "normalise='channel', expected utterance or filter"),  # type: ignore[arg-type]
        (lambda: FeatureSettings(floor_db=0.0), "floor_db=0.0, expected a positive number"),
        (lambda: FeatureSettings(floor_db=math.inf), "floor_db=inf"),
        (lambda: NarrowBandSettings(share=1.5), "share=1.5, expected a share"),
        (lambda: NarrowBandSettings(telephone=-0.1), "telephone=-0.1"),
        (lambda: NarrowBandSettings(lowest_hz=5_000, highest_hz=4_000), "in this order"),
        (lambda: NarrowBandSettings(lowest_hz=0), "positive numbers"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: Callable[[], object], told_of: str) -> None:
    with pytest.raises(InputError, match=told_of.replace(".", r"\.")):
        wrong()


# As an augmentation.


def test_bands_are_drawn_as_often_as_asked_and_within_their_bounds() -> None:
    settings = NarrowBandSettings(share=0.6, telephone=0.25, lowest_hz=3_500, highest_hz=6_000)
    low_B, high_B = draw_bands(4_000, settings=settings, generator=torch_stream(1)).T
    wide_B, telephone_B = high_B.isinf(), (low_B == 300) & (high_B == 3_400)
    others_B = high_B[~wide_B & ~telephone_B]
    # Counts of 4,000: six standard deviations are 0.05 at most.
    assert float(wide_B.float().mean()) == pytest.approx(0.4, abs=0.05)
    assert float(telephone_B.float().mean()) == pytest.approx(0.15, abs=0.05)
    assert 3_500 <= float(others_B.min()) < 3_600
    assert 5_900 < float(others_B.max()) <= 6_000
    assert not low_B[~telephone_B].any()


@pytest.mark.parametrize("ears", EARS, ids=str)
def test_who_hears_all_keeps_every_bit(ears: FeatureSettings) -> None:
    features = extract_log_mel(pad_waveforms([spoken(), spoken(9_000)]), features=ears)
    bands_U2 = torch.tensor([[0.0, math.inf], [0.0, 4_000.0]])
    found_UTF = narrow_log_mel(features.features_UTF, features.frames_U, bands_U2, features=ears)
    assert torch.equal(found_UTF[0], features.features_UTF[0])
    assert not torch.equal(found_UTF[1], features.features_UTF[1])
    assert not found_UTF[1, int(features.frames_U[1]) :].any()  # padding stays zero


@pytest.mark.parametrize("ears", EARS, ids=str)
def test_a_narrowed_utterance_is_nearly_what_its_copy_through_8_khz_is(ears: FeatureSettings) -> None:
    """Nearer, by far, than the utterance as it was."""
    wide = spoken(loudness=1_000)
    frames_1 = frame_lengths(torch.tensor([len(wide)]))
    truth_TF, before_TF = heard(through_8_khz(wide), ears), heard(wide, ears)
    found_TF = narrow_log_mel(before_TF[None], frames_1, torch.tensor([[0.0, 3_900.0]]), features=ears)[0]
    away, was = ((x_TF - truth_TF).square().mean().sqrt() for x_TF in (found_TF, before_TF))
    assert float(away) < 0.4 * float(was)


def test_an_empty_band_is_as_low_as_the_utterance_gets() -> None:
    features_BTF = torch.arange(24.0).view(2, 3, 4)
    bands_B2 = torch.tensor([[150.0, 350.0], [0.0, math.inf]])
    hertz_F = torch.tensor([100.0, 200.0, 300.0, 400.0])
    found_BTF = empty_bands(features_BTF, torch.tensor([2, 3]), bands_B2, hertz_F=hertz_F)
    assert found_BTF[0].tolist() == [[0, 1, 2, 0], [0, 5, 6, 0], [8, 9, 10, 11]]  # the last is padding
    assert torch.equal(found_BTF[1], features_BTF[1])


# Who is told.


def recordings() -> list[Path]:
    root = os.environ.get("SOTTOVOCE_DATA")
    if root is None:
        pytest.skip("SOTTOVOCE_DATA is not set: no real speech to listen to")
    found: list[Path] = []
    for corpus in sorted(path for path in Path(root).iterdir() if path.is_dir()):
        files = sorted(path for path in corpus.rglob("*") if path.suffix in AUDIO_SUFFIXES)
        found += files[:: max(1, len(files) // 60)]
    assert found, f"no recordings under {root}"
    return found


def decoded(path: Path) -> Samples:
    sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
    mono = soxr.resample(sound.mean(axis=1), rate, 16_000)
    return np.rint(mono * 32_768).clip(-32_768, 32_767).astype(np.int16)


def test_no_sample_of_ordinary_speech_is_called_narrow_and_its_copies_through_8_khz_are() -> None:
    paths = recordings()
    samples = [decoded(path) for path in paths]
    assert [path for path, own in zip(paths, samples, strict=True) if is_narrow_band(own)] == []
    # But for those that are clipped, which fills every band: at least nine in ten.
    copies = [is_narrow_band(through_8_khz(own)) for own in samples]
    assert sum(copies) >= 0.9 * len(copies)


def test_what_cannot_be_told_is_not_called_narrow() -> None:
    for samples in (np.zeros(16_000), np.ones(16_000), np.zeros(100), np.zeros(0), 3 * np.sin(np.arange(16_000))):
        assert not is_narrow_band(samples.astype(np.int16))
    assert not is_narrow_band(spoken())
    assert is_narrow_band(through_8_khz(spoken()))


def test_a_line_is_worth_one_recording_in_a_hundred() -> None:
    assert (
        format_narrow_count([])
        == format_narrow_count([False] * 400)
        == format_narrow_count([True] * 3 + [False] * 397)
        == ""
    )
    assert format_narrow_count([True] * 312 + [False] * 88).startswith("312 of 400 recordings hold nothing above 4 kHz")
    assert format_narrow_count([True]).startswith("1 of 1 recordings")
