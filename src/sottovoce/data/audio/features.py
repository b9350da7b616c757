"""Log-mel filterbanks and log-power spectra from waveforms, and their normalisation, batched, on the waveforms' device.

Filterbanks are equal to Kaldi's (and so to lhotse's `Fbank` and to kaldi-native-fbank) with these options: 16 kHz, 25
ms Povey window every 10 ms, snip_edges=True, dither=0, remove_dc_offset=True, preemph_coeff=0.97, power spectrum of a
512-point FFT, triangles on the HTK mel scale from 20 Hz to the Nyquist frequency, no energy term, samples in [-1, 1),
log floored at float32's machine epsilon. One exception: a clip shorter than one window gives one frame, not none.

Streaming recognisers of icefall and sherpa-onnx have others: filters up to 7.6 kHz (`STREAMED_HZ`), and windows around
the middle of their 10 ms, snip_edges=False. `mirror_start` lays before a recording what its first window lacks. At its
end only whole windows count: what would stand in for the rest of the last ones has not been said.

    B  utterances    N  samples    T  frames    F  mel filters, or bins
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import SAMPLE_RATE

Normalised = Literal["utterance", "filter"]
MEL_COUNT = 80
WINDOW_SAMPLES = SAMPLE_RATE * 25 // 1000
HOP_SAMPLES = SAMPLE_RATE * 10 // 1000
FFT_SAMPLES = 512
BIN_COUNT = FFT_SAMPLES // 2  # without the one at 0 Hz, of which each frame's mean was taken off
PRE_EMPHASIS = 0.97
LOWEST_HZ = 20.0
HIGHEST_HZ = SAMPLE_RATE / 2
STREAMED_HZ = 7_600.0
LEAD_SAMPLES = (WINDOW_SAMPLES - HOP_SAMPLES) // 2  # before a recording, so that its first window is around 5 ms
TELEPHONE_HZ = (300.0, 3_400.0)  # of all speech there is this much
LOG_FLOOR = torch.finfo(torch.float32).eps
LEAST_POWER = 1e-10  # of a bin; what rounding to 16 bits adds to each is a hundred times as much
INT16_SCALE = 1.0 / 32768.0
# Log-mel values of speech have a variance near 10; this only matters for constant input, which it maps to zeros.
VARIANCE_FLOOR = 1e-5


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """How log-mel features are floored and normalised; the defaults are the paper's.

    `normalise`: one mean for an utterance (`normalise_features`), or one for each `filter` (`normalise_filters`).
    `floor_db`: values are raised to so many decibels below the loudest of their utterance (`raise_floor`); None: to
    float32's machine epsilon.
    """

    normalise: Normalised = "utterance"
    floor_db: float | None = None

    def __post_init__(self) -> None:
        if self.normalise not in get_args(Normalised):
            raise InputError(f"features: normalise={self.normalise!r}, expected {' or '.join(get_args(Normalised))}")
        if self.floor_db is not None and not 0 < self.floor_db < math.inf:
            raise InputError(f"features: floor_db={self.floor_db}, expected a positive number")


def frame_count(samples: int) -> int:
    """How many frames `samples` samples give: only whole windows, but never none from a clip that has any sample.

    >>> frame_count(16_000), frame_count(400), frame_count(399), frame_count(0)
    (98, 1, 1, 0)
    """
    return min(samples, max(samples - WINDOW_SAMPLES, 0) // HOP_SAMPLES + 1)


def sample_count(frames: int) -> int:
    """The fewest samples that give `frames` full frames: the inverse of `frame_count`."""
    return WINDOW_SAMPLES + (frames - 1) * HOP_SAMPLES


def frame_lengths(lengths_B: Tensor) -> Tensor:
    """`frame_count` of each length, on the lengths' device."""
    return ((lengths_B - WINDOW_SAMPLES).clamp_min(0) // HOP_SAMPLES + 1).minimum(lengths_B)


def frame_mask(frame_lengths_B: Tensor, frames: int) -> Tensor:
    """True where a frame belongs to its utterance, False on padding: [B, T]."""
    return torch.arange(frames, device=frame_lengths_B.device) < frame_lengths_B[:, None]


def log_mel(
    waveforms_BN: Tensor,
    lengths_B: Tensor,
    *,
    mel_count: int = MEL_COUNT,
    highest_hz: float = HIGHEST_HZ,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Log-mel filterbanks [B, T, F] and the frames of each utterance [B]; frames of padding are left as they come.

    `waveforms_BN` holds int16 samples, or floats in [-1, 1). An utterance's frames never look past its own length,
    so they are the same in any batch. Nothing waits for the device; autocast is switched off inside. All is computed
    and returned in `dtype`.

    >>> features_BTF, frame_lengths_B = log_mel(torch.zeros(2, 16_000, dtype=torch.int16), torch.tensor([16_000, 300]))
    >>> features_BTF.shape, frame_lengths_B.tolist()
    (torch.Size([2, 98, 80]), [98, 1])
    """
    assert waveforms_BN.dim() == 2, f"waveforms must be [B, N], got {tuple(waveforms_BN.shape)}"
    is_integer = waveforms_BN.dtype == torch.int16
    assert is_integer or waveforms_BN.is_floating_point(), f"int16 or floats expected, got {waveforms_BN.dtype}"
    with torch.autocast(device_type=waveforms_BN.device.type, enabled=False):
        window, filters, waves = _constants(waveforms_BN.device, mel_count, is_integer, dtype, highest_hz)
        power = _power_spectrum(_inside(waveforms_BN, lengths_B, dtype), window, waves)
        features_BTF = (power @ filters).clamp_min_(LOG_FLOOR).log_()
    return features_BTF, frame_lengths(lengths_B)


def log_power(waveforms_BN: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Log-power spectra [B, T, 256] of the same frames, without the bin at 0 Hz, and the frames of each utterance [B].

    >>> log_power(torch.zeros(1, 16_000, dtype=torch.int16), torch.tensor([16_000]))[0].shape
    torch.Size([1, 98, 256])
    """
    with torch.autocast(device_type=waveforms_BN.device.type, enabled=False):
        window, _, waves = _constants(waveforms_BN.device, MEL_COUNT, waveforms_BN.dtype == torch.int16)
        power = _power_spectrum(_inside(waveforms_BN, lengths_B), window, waves)
        features_BTF = power.view(*power.shape[:2], -1, 2).sum(dim=3)[:, :, 1:].clamp_min_(LEAST_POWER).log_()
    return features_BTF, frame_lengths(lengths_B)


def mirror_start(waveforms_BN: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """`LEAD_SAMPLES` more before each utterance, its first ones backwards, and the lengths with them.

    >>> mirror_start(torch.arange(200)[None], torch.tensor([200]))[0][0, 118:123].tolist()
    [1, 0, 0, 1, 2]
    """
    inside_BN = torch.arange(waveforms_BN.shape[1], device=waveforms_BN.device) < lengths_B[:, None]
    samples_BN = waveforms_BN.where(inside_BN, 0)
    first_BN = torch.nn.functional.pad(samples_BN, (0, max(LEAD_SAMPLES - samples_BN.shape[1], 0)))[:, :LEAD_SAMPLES]
    return torch.cat([first_BN.flip(1), samples_BN], dim=1), lengths_B + LEAD_SAMPLES


def normalise_features(features_BTF: Tensor, frame_lengths_B: Tensor) -> Tensor:
    """Zero mean and unit variance for each utterance, over all its frames and filters together; padding becomes zero.

    The paper says "for each input sequence"; its released code takes one mean and one variance per utterance, not
    one per filter, so the shape of the spectrum stays. Constant utterances become zeros, those of no frame stay so.
    """
    mask_BT1 = frame_mask(frame_lengths_B, features_BTF.shape[1])[:, :, None]
    count_B11 = (frame_lengths_B.clamp_min(1) * features_BTF.shape[2]).to(features_BTF.dtype)[:, None, None]
    mean_B11 = features_BTF.where(mask_BT1, 0.0).sum((1, 2), keepdim=True) / count_B11
    # Two passes: the mean is subtracted before squaring, so nothing cancels and the variance is never negative.
    centred_BTF = (features_BTF - mean_B11).where(mask_BT1, 0.0)
    variance_B11 = centred_BTF.square().sum((1, 2), keepdim=True) / count_B11
    return centred_BTF * (variance_B11 + VARIANCE_FLOOR).rsqrt()


def normalise_filters(features_BTF: Tensor, frame_lengths_B: Tensor) -> Tensor:
    """Zero mean for each filter of an utterance, and one scale for all of them; padding becomes zero.

    What a microphone or a line does to a filter is a constant, which so is gone, and so is a band in which there is
    nothing. The scale is the deviation of those filters that vary: each filter's variance counts by that variance, so
    that empty ones neither count nor are blown up. Constant utterances become zeros, those of no frame stay so.
    """
    mask_BT1 = frame_mask(frame_lengths_B, features_BTF.shape[1])[:, :, None]
    count_B11 = frame_lengths_B.clamp_min(1).to(features_BTF.dtype)[:, None, None]
    mean_B1F = features_BTF.where(mask_BT1, 0.0).sum(1, keepdim=True) / count_B11
    centred_BTF = (features_BTF - mean_B1F).where(mask_BT1, 0.0)
    variance_B1F = centred_BTF.square().sum(1, keepdim=True) / count_B11
    total_B11 = variance_B1F.sum(2, keepdim=True)
    variance_B11 = variance_B1F.square().sum(2, keepdim=True) / total_B11.clamp_min(VARIANCE_FLOOR)
    return centred_BTF * (variance_B11 + VARIANCE_FLOOR).rsqrt()


def raise_floor(features_BTF: Tensor, frame_lengths_B: Tensor, *, decibels: float) -> Tensor:
    """Log energies of at least so many `decibels` below the loudest of their utterance, among filters of a telephone.

    The loudest, and no mean: silence around speech must not change its features, nor must what a wider band holds.
    """
    mask_BT1 = frame_mask(frame_lengths_B, features_BTF.shape[1])[:, :, None]
    loudest_B11 = features_BTF[:, :, _TELEPHONE].where(mask_BT1, math.log(LOG_FLOOR)).amax((1, 2), keepdim=True)
    return features_BTF.maximum(loudest_B11 - decibels * math.log(10) / 10)


def _inside(waveforms_BN: Tensor, lengths_B: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Samples in `dtype`, zero past each utterance's end, and at least one window of them."""
    samples_BN = waveforms_BN.to(dtype)
    inside_BN = torch.arange(samples_BN.shape[1], device=samples_BN.device) < lengths_B[:, None]
    samples_BN = samples_BN.where(inside_BN, 0.0)
    missing = WINDOW_SAMPLES - samples_BN.shape[1]
    return torch.nn.functional.pad(samples_BN, (0, missing)) if missing > 0 else samples_BN


def _power_spectrum(samples_BN: Tensor, window: Tensor, waves: Tensor) -> Tensor:
    """Squared real and imaginary parts of each frame's spectrum, interleaved: [B, T, 2 · bins].

    On a GPU the spectrum is one matrix product with the windowed `waves`: cuFFT takes 35 ms to plan for every new
    number of frames, which is what dynamic batches keep giving it. So it is in an exported graph: few runtimes have a
    Fourier transform.

    Kaldi takes the mean off each frame, then pre-emphasises it: (x[n] − m) − a·(x[n−1] − m) = (x[n] − a·x[n−1]) −
    (1 − a)·m. So the whole waveform is pre-emphasised once, and no frame is copied more than once. A frame's first
    sample, whose predecessor Kaldi takes from inside the frame, has weight zero in the Povey window.
    """
    emphasised_BN = torch.cat([samples_BN[:, :1], samples_BN[:, 1:] - PRE_EMPHASIS * samples_BN[:, :-1]], dim=1)
    mean_BT1 = samples_BN.unfold(1, WINDOW_SAMPLES, HOP_SAMPLES).mean(dim=2, keepdim=True)
    frames = torch.sub(emphasised_BN.unfold(1, WINDOW_SAMPLES, HOP_SAMPLES), mean_BT1, alpha=1 - PRE_EMPHASIS)
    if frames.is_cuda or torch.compiler.is_exporting():
        return (frames @ waves).square()
    spectrum = torch.fft.rfft(frames.mul_(window), n=FFT_SAMPLES)
    return torch.view_as_real(spectrum).square().flatten(2)


_CONSTANTS: dict[tuple[torch.device, int, bool, torch.dtype, float], tuple[Tensor, Tensor, Tensor]] = {}


def _constants(
    device: torch.device,
    mel_count: int,
    is_integer: bool,
    dtype: torch.dtype = torch.float32,
    highest_hz: float = HIGHEST_HZ,
) -> tuple[Tensor, Tensor, Tensor]:
    """The window, the mel filters and the windowed waves of the Fourier transform, made once a device.

    Scaling the window spares a pass over integer samples.
    """
    key = (device, mel_count, is_integer, dtype, highest_hz)
    scale = INT16_SCALE if is_integer else 1.0
    if key not in _CONSTANTS:
        filters = np.repeat(
            mel_filters(mel_count, highest_hz), 2, axis=0
        )  # once for the real, once for the imaginary part
        window = _povey_window() * scale
        arrays = (window, filters, window[:, None] * fourier_waves())
        first, second, third = (torch.from_numpy(array).to(dtype).to(device) for array in arrays)
        _CONSTANTS[key] = (first, second, third)
    return _CONSTANTS[key]


def compile_features(features: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`features` by torch.compile, which keeps windows and filters as constants.

    They are only declared constant here: that loads the compiler, which takes a second.
    """
    torch.compiler.assume_constant_result(_constants)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return torch.compile(features)


def _povey_window() -> NDArray[np.float64]:
    """Kaldi's own window: a Hann window, with both ends at zero, to the power 0.85."""
    return np.hanning(WINDOW_SAMPLES) ** 0.85


def fourier_waves() -> NDArray[np.float64]:
    """Cosines and sines of all bins, interleaved: [window, 2 · bins]."""
    turns = np.arange(WINDOW_SAMPLES)[:, None] * np.arange(FFT_SAMPLES // 2 + 1) / FFT_SAMPLES
    return np.stack([np.cos(2 * np.pi * turns), -np.sin(2 * np.pi * turns)], axis=2).reshape(WINDOW_SAMPLES, -1)


def mel_filters(mel_count: int, highest_hz: float = HIGHEST_HZ) -> NDArray[np.float64]:
    """Triangular filters [bins, F], evenly spaced and with straight sides on the mel scale, none on the last bin."""
    edges = np.linspace(_mel(LOWEST_HZ), _mel(highest_hz), mel_count + 2)
    bins = _mel(np.arange(FFT_SAMPLES // 2) * SAMPLE_RATE / FFT_SAMPLES)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.pad(np.minimum(rising, falling).clip(min=0.0), ((0, 1), (0, 0)))


def filter_hertz(highest_hz: float = HIGHEST_HZ) -> NDArray[np.float64]:
    """The frequency at which each of our filters is highest, [F].

    >>> filter_hertz()[[0, 39, 79]].round().tolist()
    [42.0, 1765.0, 7736.0]
    """
    edges = np.linspace(_mel(LOWEST_HZ), _mel(highest_hz), MEL_COUNT + 2)
    return 700.0 * np.expm1(edges[1:-1] / 1127.0)


def bin_hertz() -> NDArray[np.float64]:
    """The frequency of each bin of `log_power`."""
    return np.arange(1, BIN_COUNT + 1) * SAMPLE_RATE / FFT_SAMPLES


def _mel(hertz: NDArray[np.float64] | float) -> NDArray[np.float64]:
    return 1127.0 * np.log1p(np.asarray(hertz, dtype=np.float64) / 700.0)


_TELEPHONE = slice(*np.searchsorted(filter_hertz(), TELEPHONE_HZ).tolist())  # the filters in its band
