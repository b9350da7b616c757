"""Filterbanks against the two implementations that Kaldi users trust, and the promises made for padding."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import kaldi_native_fbank
import lhotse
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sottovoce.data.audio.features import (
    STREAMED_HZ,
    frame_count,
    frame_lengths,
    frame_mask,
    log_mel,
    log_power,
    mirror_start,
    normalise_features,
    sample_count,
)
from sottovoce.data.audio.waveforms import pad_waveforms


@pytest.fixture(scope="module")
def speech() -> list[NDArray[np.int16]]:
    root = os.environ.get("SOTTOVOCE_DATA")
    if root is None:
        pytest.skip("SOTTOVOCE_DATA is not set: no real speech to compare filterbanks on")
    paths = sorted(Path(root, "librispeech-mini").rglob("*.flac"))[::25]
    assert paths, "no recordings under $SOTTOVOCE_DATA/librispeech-mini"
    return [np.asarray(soundfile.read(path, dtype="int16")[0], dtype=np.int16) for path in paths]


def lhotse_features(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lhotse would rather have snip_edges=False
        extractor = lhotse.Fbank(lhotse.FbankConfig(snip_edges=True, high_freq=0.0))
    return np.asarray(extractor.extract((samples / 32768).astype(np.float32), 16_000))


def kaldi_features(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = 80
    extractor = kaldi_native_fbank.OnlineFbank(options)
    extractor.accept_waveform(16_000, (samples / 32768).astype(np.float32))
    extractor.input_finished()
    return np.stack([extractor.get_frame(i) for i in range(extractor.num_frames_ready)])


def streamed_features(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    """As sherpa-onnx computes them for a streaming recogniser, while speech may go on."""
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = 80
    options.mel_opts.high_freq = -400.0
    extractor = kaldi_native_fbank.OnlineFbank(options)
    extractor.accept_waveform(16_000, (samples / 32768).astype(np.float32))
    return np.array([extractor.get_frame(i) for i in range(extractor.num_frames_ready)])


def noisy_tone(samples: int, *, seed: int = 0, offset: float = 0.0) -> NDArray[np.int16]:
    rng = np.random.default_rng(seed)
    wave = 8_000 * np.sin(np.arange(samples) * 0.3) + rng.normal(0, 500, samples) + offset
    return wave.astype(np.int16)


def padded(
    clips: Sequence[NDArray[np.int16]], *, padded_samples: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    waveforms = pad_waveforms(clips, padded_samples=padded_samples)
    return waveforms.padded_UN, waveforms.lengths_U


def features_of(clips: Sequence[NDArray[np.int16]]) -> tuple[torch.Tensor, torch.Tensor]:
    return log_mel(*padded(clips))


def assert_like_references(clip: NDArray[np.int16], ours: torch.Tensor) -> None:
    for theirs in (lhotse_features(clip), kaldi_features(clip)):
        assert theirs.shape == tuple(ours.shape)
        difference = np.abs(ours.numpy() - theirs)
        # Float32 FFTs of different make: on 20 minutes of speech the two references differ from one another by more
        # than 1e-3 in 4 values of a million (quiet filters beside loud ones) and nowhere by more than 4e-3.
        assert np.quantile(difference, 0.9999) < 1e-3
        assert difference.max() < 1e-2


def test_equals_lhotse_and_kaldi_on_speech_in_one_batch(speech: list[NDArray[np.int16]]) -> None:
    features_BTF, frame_lengths_B = features_of(speech)
    for clip, features_TF, frames in zip(speech, features_BTF, frame_lengths_B.tolist(), strict=True):
        assert_like_references(clip, features_TF[:frames])


def test_streamed_filterbanks_equal_kaldis_on_speech_in_one_batch(speech: list[NDArray[np.int16]]) -> None:
    features_BTF, frame_lengths_B = log_mel(*mirror_start(*padded(speech)), highest_hz=STREAMED_HZ)
    for clip, features_TF, frames in zip(speech, features_BTF, frame_lengths_B.tolist(), strict=True):
        theirs = streamed_features(clip)
        assert theirs.shape == (frames, 80)
        difference = np.abs(features_TF[:frames].numpy() - theirs)
        assert np.quantile(difference, 0.9999) < 1e-3  # as above
        assert difference.max() < 1e-2


@pytest.mark.parametrize("samples", [280, 439, 440, 16_000, 16_119, 16_120])
def test_streamed_filterbanks_equal_kaldis_at_frame_boundaries(samples: int) -> None:
    clip, other = noisy_tone(samples, offset=3_000.0), noisy_tone(17_000, seed=1)
    features_BTF, frame_lengths_B = log_mel(*mirror_start(*padded([clip, other])), highest_hz=STREAMED_HZ)
    theirs = streamed_features(clip)
    assert len(theirs) == frame_lengths_B[0]
    np.testing.assert_allclose(features_BTF[0, : len(theirs)].numpy(), theirs, atol=1e-3)


@pytest.mark.parametrize("samples", [400, 559, 560, 16_000, 16_159, 16_160])
def test_equals_lhotse_and_kaldi_at_frame_boundaries_and_with_an_offset(samples: int) -> None:
    # An offset of a tenth of full scale: forgetting to remove it would change the lowest filters by several units.
    clip = noisy_tone(samples, offset=3_000.0)
    features_BTF, frame_lengths_B = features_of([clip])
    assert_like_references(clip, features_BTF[0])
    assert frame_lengths_B.tolist() == [features_BTF.shape[1]]


def test_filters_are_the_references_filters_for_another_count() -> None:
    clip = noisy_tone(8_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extractor = lhotse.Fbank(lhotse.FbankConfig(snip_edges=True, high_freq=0.0, num_filters=40))
    theirs = extractor.extract((clip / 32768).astype(np.float32), 16_000)
    waveforms_BN, lengths_B = padded([clip])
    np.testing.assert_allclose(log_mel(waveforms_BN, lengths_B, mel_count=40)[0][0].numpy(), theirs, atol=1e-3)


def test_int16_and_float_samples_give_the_same() -> None:
    waveforms_BN, lengths_B = padded([noisy_tone(9_000), noisy_tone(5_000, seed=1)])
    torch.testing.assert_close(
        log_mel(waveforms_BN, lengths_B)[0], log_mel(waveforms_BN / 32768, lengths_B)[0], atol=1e-4, rtol=0
    )


def test_autocast_around_it_changes_nothing() -> None:
    waveforms_BN, lengths_B = padded([noisy_tone(9_000)])
    expected = log_mel(waveforms_BN, lengths_B)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features_BTF = log_mel(waveforms_BN, lengths_B)[0]
    assert features_BTF.dtype == torch.float32
    assert torch.equal(features_BTF, expected)


@given(lengths=st.lists(st.integers(1, 5_000), min_size=1, max_size=4), extra=st.integers(0, 3_000))
@settings(max_examples=40, deadline=None)
def test_padding_and_what_lies_in_it_change_nothing(lengths: list[int], extra: int) -> None:
    clips = [noisy_tone(length, seed=length) for length in lengths]
    waveforms_BN, lengths_B = padded(clips, padded_samples=max(lengths) + extra)
    for row, length in zip(waveforms_BN, lengths, strict=True):
        row[length:] = 12_345
    features_BTF, frame_lengths_B = log_mel(waveforms_BN, lengths_B)
    normalised_BTF = normalise_features(features_BTF, frame_lengths_B)
    assert frame_lengths_B.tolist() == [frame_count(length) for length in lengths]
    for clip, row_TF, frames in zip(clips, normalised_BTF, frame_lengths_B.tolist(), strict=True):
        alone_BTF = normalise_features(*features_of([clip]))
        torch.testing.assert_close(row_TF[:frames], alone_BTF[0], atol=1e-4, rtol=1e-4)
        assert not row_TF[frames:].any()


@given(frames=st.integers(1, 10_000), more=st.integers(0, 159))
def test_sample_count_is_the_inverse_of_frame_count(frames: int, more: int) -> None:
    assert frame_count(sample_count(frames) + more) == frames


def test_lengths_on_tensors_agree_with_those_on_numbers() -> None:
    lengths = [0, 1, 399, 400, 559, 560, 16_000, 1_000_000]
    assert frame_lengths(torch.tensor(lengths)).tolist() == [frame_count(length) for length in lengths]


def test_normalised_utterances_have_zero_mean_and_unit_variance_over_frames_and_filters() -> None:
    features_BTF, frame_lengths_B = features_of([noisy_tone(16_000), noisy_tone(4_000, seed=1)])
    for row_TF, frames in zip(normalise_features(features_BTF, frame_lengths_B), frame_lengths_B.tolist(), strict=True):
        assert row_TF[:frames].mean().abs() < 1e-4
        torch.testing.assert_close(row_TF[:frames].square().mean(), torch.tensor(1.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("value", [0, 1, 32_767])
def test_constant_short_and_empty_clips_stay_finite(value: int) -> None:
    clips = [np.full(samples, value, dtype=np.int16) for samples in (16_000, 400, 7, 1, 0)]
    features_BTF, frame_lengths_B = features_of(clips)
    normalised_BTF = normalise_features(features_BTF, frame_lengths_B)
    assert frame_lengths_B.tolist() == [98, 1, 1, 1, 0]
    assert normalised_BTF.isfinite().all()
    assert not normalised_BTF[4].any()


def test_a_batch_of_clips_shorter_than_a_window_has_one_frame_each() -> None:
    features_BTF, frame_lengths_B = features_of([noisy_tone(100), noisy_tone(20)])
    assert features_BTF.shape == (2, 1, 80)
    assert frame_lengths_B.tolist() == [1, 1]


def test_frame_mask_marks_the_utterances_own_frames() -> None:
    assert frame_mask(torch.tensor([2, 0, 3]), 3).tolist() == [[True, True, False], [False] * 3, [True] * 3]


def test_log_power_is_the_spectrum_that_filterbanks_are_made_of() -> None:
    """Mean taken off each frame, pre-emphasis, Povey's window, 512 points; the bin at 0 Hz left out."""
    samples = np.random.default_rng(1).integers(-9000, 9000, size=1_000).astype(np.int16)
    found, frames = log_power(torch.from_numpy(samples)[None], torch.tensor([1_000]))
    assert frames.tolist() == [4]
    window = np.hanning(400) ** 0.85
    for number in range(4):
        frame = samples[160 * number : 160 * number + 400] / 32768
        centred = frame - frame.mean()
        emphasised = centred - 0.97 * np.concatenate([centred[:1], centred[:-1]])
        power = np.abs(np.fft.rfft(emphasised * window, 512))[1:] ** 2
        np.testing.assert_allclose(found[0, number], np.log(power), rtol=0, atol=1e-3)
    silence, _ = log_power(torch.zeros(1, 400, dtype=torch.int16), torch.tensor([400]))
    assert silence.eq(np.log(np.float32(1e-10))).all()
