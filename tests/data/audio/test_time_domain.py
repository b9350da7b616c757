"""Dropped frequencies and chunks: what they take away, what they leave, and how often."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.augment import NoiseSettings, add_noise, perturb_speed
from sottovoce.data.audio.time_domain import (
    NYQUIST_HZ,
    TAPS,
    DroppedChunks,
    DroppedFrequencies,
    augment_waveforms,
    drop_chunks,
    drop_frequencies,
    notch_filters,
)
from sottovoce.data.audio.waveforms import join_waveforms, pad_waveforms

RATE = 16_000
# A Blackman window of K taps smears an edge over 5.5 / K of the sample rate, half of it to each side.
SMEAR_HZ = 5.5 / TAPS * RATE / 2


def gains_db(filter_K: Tensor) -> tuple[Tensor, Tensor]:
    """The gain of a filter at many frequencies, by the Fourier transform: the oracle of what it does to a tone."""
    gains = torch.fft.rfft(filter_K.double(), n=1 << 16).abs()
    return torch.linspace(0, NYQUIST_HZ, len(gains), dtype=torch.float64), 20 * torch.log10(gains.clamp_min(1e-9))


@given(hertz=st.floats(0, NYQUIST_HZ), width_hz=st.sampled_from([800.0, 1_600.0]))
def test_a_notch_takes_its_band_out_and_nothing_else(hertz: float, width_hz: float) -> None:
    (filter_K,) = notch_filters(torch.tensor([hertz]), width_hz=width_hz)
    at_hz, gain_db = gains_db(filter_K)
    away_hz = (at_hz - hertz).abs()
    assert gain_db[away_hz.argmin()] < -50
    # Outside the band and what the window smears, a Blackman window leaves less than 2e-4, 74 dB down, of either edge.
    assert gain_db[away_hz > width_hz / 2 + SMEAR_HZ].abs().max() < 0.01


def tone(hertz: float, *, samples: int = RATE) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(samples, dtype=torch.float64) / RATE).float()


def test_samples_are_filtered_as_the_spectrum_says() -> None:
    """In the frequency domain: the spectrum of the samples times that of the utterance's filters, one after another."""
    settings = DroppedFrequencies(fewest=2, most=2)
    samples_BN = torch.randn(3, RATE, generator=torch_stream(5))
    lengths_B = torch.tensor([RATE, RATE, RATE])
    found_BN = drop_frequencies(samples_BN, lengths_B, settings=settings, generator=torch_stream(1))
    hertz_MB = torch.rand(1 + settings.most, 3, generator=torch_stream(1))[1:] * NYQUIST_HZ
    spectrum_BF = torch.fft.rfft(samples_BN.double(), n=2 * RATE)
    for hertz_B in hertz_MB:
        filters_BK = notch_filters(hertz_B, width_hz=settings.width_hz).double()
        whole_BN = torch.fft.irfft(spectrum_BF * torch.fft.rfft(filters_BK, n=2 * RATE), n=2 * RATE)
        expected_BN = whole_BN[:, TAPS // 2 : TAPS // 2 + RATE]  # what runs over the end is cut each time
        spectrum_BF = torch.fft.rfft(expected_BN, n=2 * RATE)
    # Sums of 101 products in float32, twice.
    assert torch.allclose(found_BN.double(), expected_BN, atol=2 * TAPS * 2**-24 * float(samples_BN.abs().max()))


def test_a_tone_in_the_band_goes_and_another_stays() -> None:
    filters_BK = notch_filters(torch.tensor([1_000.0, 1_000.0]), width_hz=800.0)
    tones_BN = torch.stack([tone(1_000), tone(3_000)])
    heard_BN = torch.nn.functional.conv1d(tones_BN[None], filters_BK[:, None], groups=2)[0]
    gone, stayed = heard_BN.abs().amax(1).tolist()
    assert gone < 0.5 * 10 ** (-50 / 20)
    assert stayed == pytest.approx(0.5, rel=1e-3)


@given(
    lengths=st.lists(st.integers(1, 6_000), min_size=1, max_size=4),
    fewest=st.integers(0, 2),
    more=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_chunks_are_as_many_and_as_long_as_asked_for(lengths: list[int], fewest: int, more: int, seed: int) -> None:
    settings = DroppedChunks(fewest=fewest, most=fewest + more)
    ones_BN, lengths_B = torch.ones(len(lengths), max(lengths)), torch.tensor(lengths)
    found_BN = drop_chunks(ones_BN, lengths_B, settings=settings, generator=torch_stream(seed))
    for row, length in zip(found_BN, lengths, strict=True):
        assert not row[length:].any()
        own = row[:length]
        assert set(own.tolist()) <= {0.0, 1.0}
        edges = torch.nn.functional.pad(own == 0, (1, 1)).long().diff()
        stretches = [b - a for a, b in zip((edges == 1).nonzero(), (edges == -1).nonzero(), strict=True)]
        assert len(stretches) <= settings.most
        assert all(int(stretch) >= min(1_000, length) for stretch in stretches), "chunks may overlap, never break"
        assert int((own == 0).sum()) <= 2_000 * settings.most
        assert stretches or fewest == 0


def test_numbers_and_lengths_reach_every_value_they_may() -> None:
    settings = DroppedChunks(fewest=0, most=1, shortest_seconds=3 / RATE, longest_seconds=5 / RATE)
    ones_BN, lengths_B = torch.ones(2_000, 9), torch.full((2_000,), 9)
    found_BN = drop_chunks(ones_BN, lengths_B, settings=settings, generator=torch_stream(1))
    assert set((9 - found_BN.sum(1)).long().tolist()) == {0, 3, 4, 5}
    assert set((found_BN == 0).long().argmax(1)[found_BN.sum(1) < 9].tolist()) == {0, 1, 2, 3, 4, 5, 6}
    nothing = DroppedFrequencies(fewest=0, most=0)
    assert torch.equal(drop_frequencies(ones_BN, lengths_B, settings=nothing, generator=torch_stream(1)), ones_BN)


def test_draws_do_not_depend_on_padding_and_padding_stays_silent() -> None:
    lengths_B = torch.tensor([8_000, 5_000])
    narrow_BN = torch.randn(2, 8_000, generator=torch_stream(2))
    wide_BN = torch.nn.functional.pad(narrow_BN, (0, 4_000), value=9.0)
    for drop, settings in ((drop_frequencies, DroppedFrequencies(fewest=1)), (drop_chunks, DroppedChunks(fewest=1))):
        one_BN, other_BN = (
            drop(given_BN, lengths_B, settings=settings, generator=torch_stream(3))  # type: ignore[operator]
            for given_BN in (narrow_BN, wide_BN)
        )
        assert torch.allclose(one_BN, other_BN[:, :8_000], atol=1e-6)
        assert not other_BN[:, 8_000:].any()
        assert not other_BN[1, 5_000:].any()


def test_what_was_there_before_keeps_its_draws() -> None:
    """Speed and noise come first, by the draws that they always had."""
    samples = [(3_000 * tone(300, samples=n)).to(torch.int16).numpy() for n in (9_000, 7_000)]
    batch, generator = pad_waveforms(samples, [[1, 2], [3]]), torch_stream(4)
    found = augment_waveforms(batch, speeds=(0.9, 1.1), noise=NoiseSettings(), generator=torch_stream(4))
    lines_UN, lengths_U = perturb_speed(batch.padded_UN, batch.lengths_U, generator=generator, speeds=(0.9, 1.1))
    assert torch.equal(found.padded_UN, add_noise(lines_UN, lengths_U, settings=NoiseSettings(), generator=generator))
    assert torch.equal(found.lengths_U, lengths_U)
    assert augment_waveforms(batch, generator=generator) is batch


def test_joined_waveforms_are_those_of_their_parts() -> None:
    parts = [
        pad_waveforms([tone(300, samples=n).mul(9_000).to(torch.int16).numpy() for n in lengths], texts)
        for lengths, texts in (([900, 170], [[1], [2, 3]]), ([4_001], [[4]]))
    ]
    joined = join_waveforms(parts)
    assert joined.lengths_U.tolist() == [900, 170, 4_001]
    assert joined.tokens_UL.tolist() == [[1, 0], [2, 3], [4, 0]]
    assert not (joined.starts_U % 160).any(), "on whole hops"
    assert int(joined.starts_U[1] - joined.starts_U[0]) >= 400, "a window for each"
    lines_UN = [row for part in parts for row in part.padded_UN]
    for start, length, row in zip(joined.starts_U.tolist(), joined.lengths_U.tolist(), lines_UN, strict=True):
        assert torch.equal(joined.samples_N[start : start + length], row[:length])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: DroppedChunks(fewest=3, most=2),
            "dropped_chunks: fewest=3 and most=2, expected numbers from 0 to",
        ),
        (lambda: DroppedChunks(shortest_seconds=0.2), "shortest_seconds=0.2 and longest_seconds=0.125"),
        (lambda: DroppedFrequencies(most=101), "dropped_frequencies: fewest=0 and most=101"),
        (lambda: DroppedFrequencies(width_hz=0), "width_hz=0, expected a number up to 8000"),
    ],
)
def test_impossible_settings_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()
