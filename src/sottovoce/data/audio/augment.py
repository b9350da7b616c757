"""Augmentation, batched, on the device of its input: SpecAugment and narrow bands on features; speed and noise on
waveforms. `time_domain` has the rest of what is done to waveforms.

Randomness is a torch.Generator argument. Draws are made on the generator's device and do not depend on the
utterances' lengths, so the same generator gives the same masks however a batch is padded. Nothing waits for the device.

    B  utterances    N  samples    T  frames    F  mel filters    M  masks
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import INT16_SCALE, TELEPHONE_HZ, frame_mask

SPEEDS = (0.9, 1.0, 1.1)
# Beyond these it is no longer speech; and 0 would be endless.
SLOWEST, FASTEST = 0.5, 2.0
# Zero crossings of the resampling filter on each side, and its cut-off as a share of the lower Nyquist frequency.
SINC_ZEROS = 12
SINC_CUTOFF = 0.95
MOST_MASKS = 1_000  # each is drawn and laid over the features, so their number is bounded


@dataclass(frozen=True, kw_only=True)
class SpecAugmentSettings:
    """How many bands are masked and how wide they may be; the defaults are the paper's. No time warping."""

    frequency_masks: int = 2
    frequency_width: int = 30
    time_masks: int = 10
    time_width: int = 50
    time_ratio: float = 0.1  # a time mask is also at most this share of its own utterance

    def __post_init__(self) -> None:
        for name in ("frequency_masks", "frequency_width", "time_masks", "time_width"):
            value = getattr(self, name)
            if value < 0:
                raise InputError(f"SpecAugment: {name}={value}, expected at least 0")
            if name.endswith("masks") and value > MOST_MASKS:
                raise InputError(f"SpecAugment: {name}={value}, expected at most {MOST_MASKS}")
        if not 0 <= self.time_ratio <= 1:
            raise InputError(f"SpecAugment: time_ratio={self.time_ratio}, expected a share from 0 to 1")


def draw_masks(batch_size: int, *, settings: SpecAugmentSettings, generator: torch.Generator) -> Tensor:
    """Uniform numbers [B, M, 2] (width, place) that decide the masks: frequency masks first, then time masks.

    `apply_masks` takes them, so that batches of several clients can be joined, each with its own generator's draws.
    """
    masks = settings.frequency_masks + settings.time_masks
    return torch.rand(batch_size, masks, 2, generator=generator, device=generator.device)


def apply_masks(
    features_BTF: Tensor, frame_lengths_B: Tensor, *, draws: Tensor, settings: SpecAugmentSettings
) -> Tensor:
    """Masks bands of normalised features with zero, their mean; padding is left as it is.

    `draws` (from `draw_masks`) decide them for each utterance: each width is uniform from 0 to its bound, each place
    uniform over all that fit into the utterance.
    """
    _, frames, filters = features_BTF.shape
    draws = draws.to(features_BTF.device, non_blocking=True)
    frequency_draws, time_draws = draws[:, : settings.frequency_masks], draws[:, settings.frequency_masks :]
    bound_B = (frame_lengths_B * settings.time_ratio).floor().clamp_max(settings.time_width)
    masked_BT = _bands(time_draws, extent_B=frame_lengths_B, bound_B=bound_B, size=frames)
    extent_B = torch.full_like(frame_lengths_B, filters)
    bound_B = extent_B.clamp_max(settings.frequency_width)
    masked_BF = _bands(frequency_draws, extent_B=extent_B, bound_B=bound_B, size=filters)
    inside_BT = frame_mask(frame_lengths_B, frames)
    return features_BTF.masked_fill((masked_BT[:, :, None] | masked_BF[:, None, :]) & inside_BT[:, :, None], 0.0)


def _bands(draws_BM2: Tensor, *, extent_B: Tensor, bound_B: Tensor, size: int) -> Tensor:
    """True inside any of the M bands: [B, size]. Widths are 0 … bound, and bands lie within [0, extent)."""
    # floor(u · (n + 1)) never reaches n + 1 for u < 1: float32 products of an integer with 1 − 2⁻²⁴ round down.
    width_BM = (draws_BM2[:, :, 0] * (bound_B[:, None] + 1)).floor()
    start_BM = (draws_BM2[:, :, 1] * (extent_B[:, None] - width_BM + 1)).floor()
    place = torch.arange(size, device=draws_BM2.device)
    return ((place >= start_BM[:, :, None]) & (place < (start_BM + width_BM)[:, :, None])).any(dim=1)


@dataclass(frozen=True, kw_only=True)
class NarrowBandSettings:
    """A `share` of the utterances is limited to a narrower band than it was recorded with.

    `telephone` of these to a telephone's (300 to 3,400 Hz), the others to a highest frequency drawn evenly, in Hertz,
    between these bounds.
    """

    share: float = 0.5
    telephone: float = 0.5
    lowest_hz: float = 3_000.0
    highest_hz: float = 8_000.0

    def __post_init__(self) -> None:
        for name in ("share", "telephone"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise InputError(f"narrow_band: {name}={value}, expected a share from 0 to 1")
        if not 0 < self.lowest_hz <= self.highest_hz < math.inf:
            raise InputError(
                f"narrow_band: lowest_hz={self.lowest_hz} and highest_hz={self.highest_hz}, "
                "expected positive numbers in this order"
            )


def draw_bands(batch_size: int, *, settings: NarrowBandSettings, generator: torch.Generator) -> Tensor:
    """The lowest and the highest frequency of each utterance, in Hertz: [B, 2]; 0 and infinite where all is kept."""
    whether_B, which_B, place_B = torch.rand(3, batch_size, generator=generator, device=generator.device)
    narrow_B, telephone_B = whether_B < settings.share, which_B < settings.telephone
    drawn_B = settings.lowest_hz + place_B * (settings.highest_hz - settings.lowest_hz)
    low_B = torch.where(narrow_B & telephone_B, TELEPHONE_HZ[0], 0.0)
    high_B = torch.where(telephone_B, TELEPHONE_HZ[1], drawn_B).where(narrow_B, math.inf)
    return torch.stack([low_B, high_B], dim=1)


def empty_bands(features_BTF: Tensor, frame_lengths_B: Tensor, bands_B2: Tensor, *, hertz_F: Tensor) -> Tensor:
    """Features whose filters outside their utterance's band stay at its lowest value, as if there were its silence.

    `hertz_F` says where each filter is; padding is left as it is.
    """
    inside_BT1 = frame_mask(frame_lengths_B, features_BTF.shape[1])[:, :, None]
    lowest_B11 = features_BTF.where(inside_BT1, math.inf).amin((1, 2), keepdim=True)
    low_B1, high_B1 = bands_B2[:, :1], bands_B2[:, 1:]
    kept_B1F = ((hertz_F >= low_B1) & (hertz_F <= high_B1))[:, None]
    return features_BTF.where(kept_B1F | ~inside_BT1, lowest_B11)


def perturb_speed(
    waveforms_BN: Tensor, lengths_B: Tensor, *, generator: torch.Generator, speeds: Sequence[float] = SPEEDS
) -> tuple[Tensor, Tensor]:
    """Plays each utterance at one of `speeds`, drawn evenly: tempo and pitch change together, as on tape.

    Float samples and lengths come back; the batch is as long as its longest row at the slowest speed (times 10/9).
    """
    choice_B = torch.randint(len(speeds), (len(lengths_B),), generator=generator, device=generator.device)
    choice_B = choice_B.to(waveforms_BN.device, non_blocking=True)
    samples_BN = as_float(waveforms_BN).where(inside_lengths(lengths_B, waveforms_BN.shape[1]), 0.0)
    longest = math.ceil(waveforms_BN.shape[1] / Fraction(min(speeds)).limit_denominator(100))
    result_BN, result_B = samples_BN.new_zeros(len(lengths_B), longest), torch.zeros_like(lengths_B)
    # Every speed is computed for every row: the convolutions are cheap, and picking rows would wait for the device.
    for index, speed in enumerate(speeds):
        played_BN, played_B = change_speed(samples_BN, lengths_B, speed=speed)
        played_BN = torch.nn.functional.pad(played_BN, (0, longest - played_BN.shape[1]))
        result_BN = torch.where((choice_B == index)[:, None], played_BN, result_BN)
        result_B = torch.where(choice_B == index, played_B, result_B)
    return result_BN, result_B


def check_speeds(speeds: Sequence[float], *, where: str = "") -> None:
    """Refuse what is no longer speech."""
    if wrong := [speed for speed in speeds if not SLOWEST <= speed <= FASTEST]:
        raise InputError(f"{where}speeds has {wrong[0]}, expected numbers from {SLOWEST} to {FASTEST}")


def change_speed(samples_BN: Tensor, lengths_B: Tensor, *, speed: float) -> tuple[Tensor, Tensor]:
    """Utterances followed by silence, all at one speed, by windowed-sinc resampling: [B, ⌈N / speed⌉], new lengths."""
    ratio = Fraction(speed).limit_denominator(100)
    step_in, step_out = ratio.numerator, ratio.denominator
    if step_in == step_out:
        return samples_BN, lengths_B
    filters, reach = _resampling_filters(step_in, step_out)
    out_samples = -(-samples_BN.shape[1] * step_out // step_in)
    blocks = -(-out_samples // step_out)
    padding = (reach, blocks * step_in + reach - samples_BN.shape[1])
    padded_BN = torch.nn.functional.pad(samples_BN, padding)[:, None]
    # One output channel per phase: `step_out` samples come out for every `step_in` that go in.
    phases = torch.nn.functional.conv1d(padded_BN, filters.to(samples_BN.device), stride=step_in)
    played_BN = phases.transpose(1, 2).flatten(1)[:, :out_samples]
    played_B = -(-lengths_B * step_out // step_in)
    return played_BN.where(inside_lengths(played_B, out_samples), 0.0), played_B


def _resampling_filters(step_in: int, step_out: int) -> tuple[Tensor, int]:
    """Windowed-sinc filters [step_out, 1, taps] that turn `step_in` samples into `step_out`, and their reach."""
    cutoff = SINC_CUTOFF * min(1.0, step_out / step_in)  # in units of the input's Nyquist frequency
    reach = math.ceil(SINC_ZEROS / cutoff)
    taps = torch.arange(-reach, step_in + reach, dtype=torch.float64)
    centres = torch.arange(step_out, dtype=torch.float64)[:, None] * step_in / step_out
    offset = ((taps - centres) * cutoff).clamp(-SINC_ZEROS, SINC_ZEROS)
    window = torch.cos(offset * math.pi / (2 * SINC_ZEROS)).square()
    return (torch.sinc(offset) * window * cutoff).float()[:, None], reach


@dataclass(frozen=True, kw_only=True)
class NoiseSettings:
    """Noise is added at a signal-to-noise ratio drawn evenly, in decibels, between these bounds."""

    lowest_snr_db: float = 5.0
    highest_snr_db: float = 30.0

    def __post_init__(self) -> None:
        if not -math.inf < self.lowest_snr_db <= self.highest_snr_db < math.inf:
            raise InputError(
                f"noise: lowest_snr_db={self.lowest_snr_db} and highest_snr_db={self.highest_snr_db}, "
                "expected finite numbers in this order"
            )


def add_noise(
    waveforms_BN: Tensor, lengths_B: Tensor, *, settings: NoiseSettings, generator: torch.Generator
) -> Tensor:
    """Float samples with pink noise at a random ratio."""
    size = waveforms_BN.shape
    span = settings.highest_snr_db - settings.lowest_snr_db
    snr_db_B = torch.rand(size[0], generator=generator, device=generator.device) * span + settings.lowest_snr_db
    near = _on_device(generator, waveforms_BN.device)  # a number a sample: drawn where it is used
    noise_BN = pink_noise(size[0], size[1], generator=near)
    device = waveforms_BN.device
    return mix_at_snr(waveforms_BN, lengths_B, noise_BN=noise_BN.to(device), snr_db_B=snr_db_B.to(device))


def mix_at_snr(waveforms_BN: Tensor, lengths_B: Tensor, *, noise_BN: Tensor, snr_db_B: Tensor) -> Tensor:
    """Adds noise scaled to `snr_db_B` below each utterance's mean power; silence stays silence, padding stays zero."""
    inside_BN = inside_lengths(lengths_B, waveforms_BN.shape[1])
    samples_BN = as_float(waveforms_BN).where(inside_BN, 0.0)
    noise_BN = as_float(noise_BN).where(inside_BN, 0.0)
    # Both sums run over the same samples, so their ratio is the ratio of the mean powers.
    energy_B, noise_energy_B = samples_BN.square().sum(1), noise_BN.square().sum(1)
    wanted_B = energy_B * 10 ** (-snr_db_B / 10)
    gain_B = (wanted_B / noise_energy_B.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    return samples_BN + noise_BN * gain_B.where(noise_energy_B > 0, 0.0)[:, None]


def pink_noise(batch_size: int, samples: int, *, generator: torch.Generator) -> Tensor:
    """Gaussian noise [B, N] on the generator's device, its power falling as 1/f."""
    white_BN = torch.randn(batch_size, samples, generator=generator, device=generator.device)
    spectrum = torch.fft.rfft(white_BN)
    bins = torch.arange(spectrum.shape[1], device=white_BN.device).clamp_min(1)
    pink_BN: Tensor = torch.fft.irfft(spectrum * bins.rsqrt(), n=samples)
    return pink_BN


def _on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """The generator itself, or one on another kind of device that is seeded by it."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))


def inside_lengths(lengths_B: Tensor, samples: int) -> Tensor:
    """True where a sample belongs to its utterance: [B, N]."""
    return torch.arange(samples, device=lengths_B.device) < lengths_B[:, None]


def as_float(waveforms_BN: Tensor) -> Tensor:
    """Float32 samples in [-1, 1)."""
    return waveforms_BN * INT16_SCALE if waveforms_BN.dtype == torch.int16 else waveforms_BN.float()
