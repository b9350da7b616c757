"""Augmentation of waveforms, before features are made of them: speeds, noise, dropped frequencies, dropped chunks.

    samples ─► speed ─► noise ─► notch filters ─► silent chunks ─► features

Speeds, frequencies and chunks are those of SpeechBrain's `TimeDomainSpecAugment` (0.5.7), whose defaults are ours.
There one speed and one set of frequencies hold for a whole batch; here all of it is drawn for each utterance.

    B, U  utterances    N  samples    K  taps of a filter    M  frequencies or chunks
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from sottovoce.base.errors import InputError
from sottovoce.data.audio.augment import NoiseSettings, add_noise, as_float, inside_lengths, perturb_speed
from sottovoce.data.audio.waveforms import Waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE

NYQUIST_HZ = SAMPLE_RATE / 2
TAPS = 101  # of a notch filter: 54 dB in the middle of a band of 800 Hz
MOST_DROPPED = 100  # each is drawn and applied, so their number is bounded


def _check_numbers(what: str, fewest: int, most: int) -> None:
    if not 0 <= fewest <= most <= MOST_DROPPED:
        raise InputError(
            f"{what}: fewest={fewest} and most={most}, expected numbers from 0 to {MOST_DROPPED} in this order"
        )


@dataclass(frozen=True, kw_only=True)
class DroppedFrequencies:
    """How many bands of an utterance are filtered out, and how wide each is; they lie anywhere from 0 to 8 kHz."""

    fewest: int = 0
    most: int = 3
    width_hz: float = 800.0

    def __post_init__(self) -> None:
        _check_numbers("dropped_frequencies", self.fewest, self.most)
        if not 0 < self.width_hz <= NYQUIST_HZ:
            raise InputError(f"dropped_frequencies: width_hz={self.width_hz}, expected a number up to {NYQUIST_HZ:g}")


@dataclass(frozen=True, kw_only=True)
class DroppedChunks:
    """How many chunks of an utterance are silenced, and how long each is (1,000 to 2,000 samples)."""

    fewest: int = 0
    most: int = 5
    shortest_seconds: float = 0.0625
    longest_seconds: float = 0.125

    def __post_init__(self) -> None:
        _check_numbers("dropped_chunks", self.fewest, self.most)
        if not 0 < self.shortest_seconds <= self.longest_seconds < math.inf:
            raise InputError(
                f"dropped_chunks: shortest_seconds={self.shortest_seconds} and longest_seconds={self.longest_seconds}, "
                "expected positive numbers in this order"
            )


def augment_waveforms(
    batch: Waveforms,
    *,
    speeds: Sequence[float] = (),
    noise: NoiseSettings | None = None,
    dropped_frequencies: DroppedFrequencies | None = None,
    dropped_chunks: DroppedChunks | None = None,
    generator: torch.Generator,
) -> Waveforms:
    """The batch with all that is asked for; without any of it, as it is."""
    if not speeds and noise is None and dropped_frequencies is None and dropped_chunks is None:
        return batch
    lines_UN, lengths_U = batch.padded_UN, batch.lengths_U.to(batch.samples_N.device)
    if speeds:
        lines_UN, lengths_U = perturb_speed(lines_UN, lengths_U, generator=generator, speeds=speeds)
    if noise is not None:
        lines_UN = add_noise(lines_UN, lengths_U, settings=noise, generator=generator)
    if dropped_frequencies is not None:
        lines_UN = drop_frequencies(lines_UN, lengths_U, settings=dropped_frequencies, generator=generator)
    if dropped_chunks is not None:
        lines_UN = drop_chunks(lines_UN, lengths_U, settings=dropped_chunks, generator=generator)
    return batch.with_samples(lines_UN, lengths_U.cpu())


def drop_frequencies(
    waveforms_BN: Tensor, lengths_B: Tensor, *, settings: DroppedFrequencies, generator: torch.Generator
) -> Tensor:
    """Float samples without some bands of frequencies, each utterance without its own."""
    size = len(lengths_B)
    draws = torch.rand(1 + settings.most, size, generator=generator, device=generator.device).to(waveforms_BN.device)
    count_B, hertz_MB = _count(draws[0], settings.fewest, settings.most), draws[1:] * NYQUIST_HZ
    inside_BN = inside_lengths(lengths_B, waveforms_BN.shape[1])
    samples_BN = as_float(waveforms_BN).where(inside_BN, 0.0)
    for place, hertz_B in enumerate(hertz_MB):
        filters_BK = notch_filters(hertz_B, width_hz=settings.width_hz)
        # One channel, and so one filter, for each utterance. Filters are symmetric: nothing is moved in time.
        filtered_BN = conv1d(samples_BN[None], filters_BK[:, None], padding=TAPS // 2, groups=size)[0]
        samples_BN = filtered_BN.where(inside_BN & (place < count_B)[:, None], samples_BN)
    return samples_BN


def notch_filters(hertz_B: Tensor, *, width_hz: float) -> Tensor:
    """Filters [B, K] that take out a band of `width_hz` around `hertz_B` each, and let all else pass.

    What passes all less what passes the band: δ(n) − w(n)·(h·sinc(h·n) − l·sinc(l·n)), with the band's edges l and h as
    shares of the Nyquist frequency and Blackman's window w.
    """
    n_K = torch.arange(TAPS, dtype=torch.float64, device=hertz_B.device) - TAPS // 2
    window_K = torch.blackman_window(TAPS, periodic=False, dtype=torch.float64, device=hertz_B.device)
    centre_B1 = hertz_B.double()[:, None]
    low_B1 = ((centre_B1 - width_hz / 2) / NYQUIST_HZ).clamp_min(0.0)
    high_B1 = ((centre_B1 + width_hz / 2) / NYQUIST_HZ).clamp_max(1.0)
    band_BK = window_K * (high_B1 * torch.sinc(high_B1 * n_K) - low_B1 * torch.sinc(low_B1 * n_K))
    return ((n_K == 0).double() - band_BK).float()


def drop_chunks(
    waveforms_BN: Tensor, lengths_B: Tensor, *, settings: DroppedChunks, generator: torch.Generator
) -> Tensor:
    """Float samples with silence in some places, each utterance in its own; no chunk is longer than its utterance."""
    size = len(lengths_B)
    draws = torch.rand(1 + 2 * settings.most, size, generator=generator, device=generator.device)
    draws = draws.to(waveforms_BN.device)
    shortest, longest = (round(s * SAMPLE_RATE) for s in (settings.shortest_seconds, settings.longest_seconds))
    count_B = _count(draws[0], settings.fewest, settings.most)
    place_N = torch.arange(waveforms_BN.shape[1], device=waveforms_BN.device)
    silent_BN = ~inside_lengths(lengths_B, waveforms_BN.shape[1])
    for chunk, (length_B, start_B) in enumerate(zip(draws[1::2], draws[2::2], strict=True)):
        length_B = _count(length_B, shortest, longest).minimum(lengths_B)
        start_B = (start_B * (lengths_B - length_B + 1)).floor()
        end_B = torch.where(chunk < count_B, start_B + length_B, start_B)
        silent_BN |= (place_N >= start_B[:, None]) & (place_N < end_B[:, None])
    return as_float(waveforms_BN).masked_fill(silent_BN, 0.0)


def _count(uniform_B: Tensor, fewest: int, most: int) -> Tensor:
    """Whole numbers from `fewest` to `most`, all as likely, of uniform ones below 1."""
    return fewest + (uniform_B * (most - fewest + 1)).floor().long()
