"""The feature extractors of pretrained Hugging Face speech models, batched, on the samples' device, given in float32.

Each gives what the class of that name in transformers gives for every utterance alone, whatever else is in the batch.
Each computes in the precision of that class: Seamless in float64, the others in float32. A transform's rounding is of
the size of the loudest bin, and the logarithm of a silent filter shows it.
They need nothing of transformers: settings come from a model's `preprocessor_config.json`, defaults are that class's.
Utterances of too few frames for a deviation become zeros, where theirs become NaN or stop.

    U  utterances    N  samples    T  frames    F  features of a frame    K  samples of one Fourier transform
    B  bins of its spectrum
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import frame_lengths, frame_mask, log_mel
from sottovoce.data.corpora.corpus import SAMPLE_RATE

INT16_SCALE = 2.0**15  # Kaldi takes samples as 16-bit integers
VARIANCE_FLOOR = 1e-7  # of Wav2Vec2FeatureExtractor and SeamlessM4TFeatureExtractor
SEAMLESS_STRIDE = 2
WHISPER_LEAST_POWER = 1e-10
WHISPER_DECADES = 8.0  # what lies further below the loudest value of a window is raised to there
PARAKEET_LOG_GUARD = 2.0**-24
PARAKEET_DEVIATION_FLOOR = 1e-5
# Slaney's mel scale: straight up to 1 kHz, logarithmic above.
SLANEY_HZ_PER_MEL = 200.0 / 3.0
SLANEY_LOG_HZ, SLANEY_LOG_MEL = 1_000.0, 15.0
SLANEY_LOG_STEP = math.log(6.4) / 27.0

Extractor = Callable[[Tensor, Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class MelSettings:
    """A short-time Fourier transform with a Hann window in the middle of it, and how many mel filters follow."""

    fft_samples: int
    hop_samples: int
    window_samples: int
    is_periodic: bool
    mel_count: int


def extract_pretrained(samples_UN: Tensor, lengths_U: Tensor, *, processor: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Features [U, T, F] in float32 and how many frames of each utterance count, [U] on the host.

    `samples_UN` holds float32 in [-1, 1] at 16 kHz; what lies behind `lengths_U` (int64, on the host) is not looked at.
    `processor`: the content of `preprocessor_config.json`, or of `feature_extractor` in `processor_config.json`.

    >>> processor = {"feature_extractor_type": "SeamlessM4TFeatureExtractor"}
    >>> features_UTF, frames_U = extract_pretrained(torch.zeros(1, 16_000), torch.tensor([16_000]), processor=processor)
    >>> features_UTF.shape, frames_U.tolist()
    (torch.Size([1, 49, 160]), [49])
    """
    assert samples_UN.dim() == 2, f"samples must be [U, N], got {tuple(samples_UN.shape)}"
    assert samples_UN.dtype == torch.float32, f"float32 samples expected, got {samples_UN.dtype}"
    assert not lengths_U.is_cuda, "lengths must be on the host: reading them there must not wait for the device"
    is_inside = torch.compiler.is_exporting() or bool((lengths_U <= samples_UN.shape[1]).all())
    assert is_inside, "an utterance is longer than its row"
    kind = processor.get("feature_extractor_type")
    if not isinstance(kind, str) or kind not in _EXTRACTORS:
        raise InputError(f"preprocessor: feature_extractor_type={kind!r}, expected one of {', '.join(_EXTRACTORS)}")
    if (rate := processor.get("sampling_rate", SAMPLE_RATE)) != SAMPLE_RATE:
        raise InputError(f"preprocessor: sampling_rate={rate!r}, expected {SAMPLE_RATE}")
    with torch.autocast(device_type=samples_UN.device.type, enabled=False):
        return _EXTRACTORS[kind](samples_UN, lengths_U, processor)


def _raw_samples(samples_UN: Tensor, lengths_U: Tensor, processor: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Wav2Vec2FeatureExtractor: the samples themselves as [U, N, 1], normalised if `do_normalize`."""
    mask_UN1 = _mask(samples_UN, lengths_U, samples_UN.shape[1])[:, :, None]
    features_UN1 = samples_UN[:, :, None]
    if processor.get("do_normalize", True):
        centred_UN1, variance_U11 = _centre(features_UN1, mask_UN1, lost=0)
        features_UN1 = centred_UN1 / (variance_U11 + VARIANCE_FLOOR).sqrt()
    return features_UN1.where(mask_UN1, _padding_value(processor)), lengths_U


def _stacked_filterbanks(samples_UN: Tensor, lengths_U: Tensor, processor: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """SeamlessM4TFeatureExtractor: Kaldi's filterbanks, each filter normalised, two frames to one: [U, ⌈T/2⌉, 2·F].

    Theirs are our own filterbanks of samples that were not scaled down, with the same floor. The last frame of an odd
    number is in the features, beside one of padding, but is not counted: their attention mask looks at the second.
    """
    mel_count = _whole(processor, "num_mel_bins", default=80)
    device_lengths_U = lengths_U.to(samples_UN.device, non_blocking=True)
    features_UTF, _ = log_mel(samples_UN * INT16_SCALE, device_lengths_U, mel_count=mel_count, dtype=torch.float64)
    features_UTF = features_UTF.float()  # theirs are rounded here too
    return stack_filterbanks(features_UTF, frame_lengths(lengths_U), processor)


def stack_filterbanks(features_UTF: Tensor, frames_U: Tensor, processor: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The same from filterbanks on: normalised, two frames to one."""
    if (stride := processor.get("stride", SEAMLESS_STRIDE)) != SEAMLESS_STRIDE:
        raise InputError(f"preprocessor: stride={stride!r}, expected {SEAMLESS_STRIDE}")
    mel_count = features_UTF.shape[2]
    mask_UT1 = _mask(features_UTF, frames_U, features_UTF.shape[1])[:, :, None]
    centred_UTF, variance_U1F = _centre(features_UTF, mask_UT1, lost=1)
    padding_value = _padding_value(processor)
    normalised_UTF = (centred_UTF / (variance_U1F + VARIANCE_FLOOR).sqrt()).where(mask_UT1, padding_value)
    even_UTF = pad(normalised_UTF, (0, 0, 0, normalised_UTF.shape[1] % 2), value=padding_value)
    return even_UTF.reshape(even_UTF.shape[0], even_UTF.shape[1] // 2, 2 * mel_count), frames_U // 2


def _whole_windows(samples_UN: Tensor, lengths_U: Tensor, processor: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """WhisperFeatureExtractor: log-mel values of one whole window (30 s) for each utterance, longer ones are cut.

    A frame counts if its middle is a sample of the utterance: ⌈length / hop⌉, as in their attention mask. As theirs,
    this goes by `chunk_length`, whatever `n_samples` and `nb_max_frames` of the same file say.
    """
    if (dither := processor.get("dither", 0.0)) != 0.0:
        raise InputError(f"preprocessor: dither={dither!r}, expected 0.0: features are not random")
    window_samples = _whole(processor, "chunk_length", default=30) * SAMPLE_RATE
    fft_samples = _whole(processor, "n_fft", default=400)
    settings = MelSettings(
        fft_samples=fft_samples,
        hop_samples=_whole(processor, "hop_length", default=160),
        window_samples=fft_samples,
        is_periodic=True,
        mel_count=_whole(processor, "feature_size", default=80),
    )
    whole_UN = pad(samples_UN[:, :window_samples], (0, max(window_samples - samples_UN.shape[1], 0)))
    whole_UN = whole_UN.where(_mask(whole_UN, lengths_U, window_samples), _padding_value(processor))
    # Their last frame, whose middle is the end of the window, is left out, and need not be made.
    frames = window_samples // settings.hop_samples
    power_UTF = _mel_power(whole_UN, settings, frames=frames, pad_mode="reflect")
    log_UTF = power_UTF.clamp_min_(WHISPER_LEAST_POWER).log10_()
    log_UTF = log_UTF.maximum(log_UTF.amax((1, 2), keepdim=True) - WHISPER_DECADES)
    frames_U = (lengths_U + settings.hop_samples - 1) // settings.hop_samples
    return ((log_UTF + 4.0) / 4.0).contiguous(), frames_U.clamp_max(frames)


def _guarded_log_mel(samples_UN: Tensor, lengths_U: Tensor, processor: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """ParakeetFeatureExtractor: log-mel values of pre-emphasised samples, each filter normalised; padding is zero."""
    settings = MelSettings(
        fft_samples=_whole(processor, "n_fft", default=512),
        hop_samples=_whole(processor, "hop_length", default=160),
        window_samples=_whole(processor, "win_length", default=400),
        is_periodic=False,
        mel_count=_whole(processor, "feature_size", default=80),
    )
    emphasis = processor.get("preemphasis", 0.97) or 0.0  # null: none
    emphasised_UN = torch.cat([samples_UN[:, :1], samples_UN[:, 1:] - emphasis * samples_UN[:, :-1]], dim=1)
    emphasised_UN = emphasised_UN.where(_mask(samples_UN, lengths_U, samples_UN.shape[1]), 0.0)
    frames = samples_UN.shape[1] // settings.hop_samples + 1
    power_UTF = _mel_power(emphasised_UN, settings, frames=frames, pad_mode="constant")
    frames_U = lengths_U // settings.hop_samples  # so that the last frame of the longest counts for none
    mask_UT1 = _mask(samples_UN, frames_U, frames)[:, :, None]
    centred_UTF, variance_U1F = _centre((power_UTF + PARAKEET_LOG_GUARD).log_(), mask_UT1, lost=1)
    return (centred_UTF / (variance_U1F.sqrt() + PARAKEET_DEVIATION_FLOOR)).contiguous(), frames_U


_EXTRACTORS: dict[str, Extractor] = {
    "Wav2Vec2FeatureExtractor": _raw_samples,
    "SeamlessM4TFeatureExtractor": _stacked_filterbanks,
    "WhisperFeatureExtractor": _whole_windows,
    "ParakeetFeatureExtractor": _guarded_log_mel,
}


def _mask(like: Tensor, lengths_U: Tensor, count: int) -> Tensor:
    """True inside each utterance, [U, count], on the device of `like`."""
    return frame_mask(lengths_U.to(like.device, non_blocking=True), count)


def _centre(features_UTF: Tensor, mask_UT1: Tensor, *, lost: int) -> tuple[Tensor, Tensor]:
    """Features less their mean over time, zero outside the mask, and their variance with `lost` degrees of freedom."""
    count_U11 = mask_UT1.sum(1, keepdim=True)
    mean_U1F = features_UTF.where(mask_UT1, 0.0).sum(1, keepdim=True) / count_U11.clamp_min(1)
    # Two passes: the mean is subtracted before squaring, so nothing cancels.
    centred_UTF = (features_UTF - mean_U1F).where(mask_UT1, 0.0)
    return centred_UTF, centred_UTF.square().sum(1, keepdim=True) / (count_U11 - lost).clamp_min(1)


def _mel_power(samples_UN: Tensor, settings: MelSettings, *, frames: int, pad_mode: str) -> Tensor:
    """Power in each mel filter of the first `frames` frames, whose middles are 0, hop, 2·hop ...: [U, T, F].

    On a processor this is theirs step by step, in float32, with their roundings. On a GPU, and in an exported graph,
    the spectrum is one matrix product, as in `sottovoce.data.audio.features` (cuFFT plans anew for every number of
    frames), whose rounding would be larger than theirs: there it is float64's.
    """
    window_K, waves_K2B, filters_FB = _constants(settings, samples_UN.device)
    half = settings.fft_samples // 2
    frames_UTK = pad(samples_UN, (half, half), mode=pad_mode).unfold(1, settings.fft_samples, settings.hop_samples)
    frames_UTK = frames_UTK[:, :frames]
    if samples_UN.is_cuda or torch.compiler.is_exporting():
        parts_UTB2 = (frames_UTK.double() @ waves_K2B).view(*frames_UTK.shape[:2], half + 1, 2)
        return (filters_FB.double() @ parts_UTB2.square().sum(3).mT).mT.float()
    spectrum_UTB = torch.fft.rfft(frames_UTK * window_K)
    # They take the root and square it again. Time lies innermost, so that sums over it are rounded as theirs are too.
    power_UTB = torch.view_as_real(spectrum_UTB).square().sum(3).sqrt().square()
    return (filters_FB @ power_UTB.mT).mT


@cache
def _constants(settings: MelSettings, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The window, the windowed waves of the Fourier transform (interleaved, float64), the mel filters; once a device.

    The window is float32's own, as theirs is.
    """
    size = settings.fft_samples
    missing = size - settings.window_samples
    if missing < 0:
        raise InputError(f"preprocessor: win_length={settings.window_samples}, expected at most n_fft={size}")
    hann = torch.hann_window(settings.window_samples, periodic=settings.is_periodic, dtype=torch.float32)
    window_K = pad(hann, (missing // 2, missing - missing // 2))
    steps = torch.outer(torch.arange(size), torch.arange(size // 2 + 1)) % size  # whole turns taken off exactly
    turns_KB = steps.double() * (2.0 * math.pi / size)
    waves_K2B = torch.stack([turns_KB.cos(), -turns_KB.sin()], dim=2).flatten(1) * window_K[:, None]
    filters_FB = slaney_filters(settings.mel_count, fft_samples=size).mT.contiguous().float()
    return window_K.to(device), waves_K2B.to(device), filters_FB.to(device)


def slaney_filters(mel_count: int, *, fft_samples: int) -> Tensor:
    """Triangles [B, F] of area one from 0 Hz to 8 kHz, evenly spaced on Slaney's mel scale, with sides straight in Hz.

    As `librosa.filters.mel` with its defaults.
    """
    top_hz = SAMPLE_RATE / 2
    top_mel = SLANEY_LOG_MEL + math.log(top_hz / SLANEY_LOG_HZ) / SLANEY_LOG_STEP
    edges_mel = torch.linspace(0.0, top_mel, mel_count + 2, dtype=torch.float64)
    above_hz = SLANEY_LOG_HZ * ((edges_mel - SLANEY_LOG_MEL) * SLANEY_LOG_STEP).exp()
    edges_hz = (edges_mel * SLANEY_HZ_PER_MEL).where(edges_mel < SLANEY_LOG_MEL, above_hz)
    bins_hz = torch.linspace(0.0, top_hz, fft_samples // 2 + 1, dtype=torch.float64)[:, None]
    rising = (bins_hz - edges_hz[:-2]) / (edges_hz[1:-1] - edges_hz[:-2])
    falling = (edges_hz[2:] - bins_hz) / (edges_hz[2:] - edges_hz[1:-1])
    return rising.minimum(falling).clamp_min(0.0) * (2.0 / (edges_hz[2:] - edges_hz[:-2]))


def _padding_value(processor: Mapping[str, Any]) -> float:
    """What stands behind an utterance's end; Wav2Vec2-BERT's file says 1."""
    return float(processor.get("padding_value", 0.0))


def _whole(processor: Mapping[str, Any], name: str, *, default: int) -> int:
    value = processor.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"preprocessor: {name}={value!r}, expected a positive whole number")
    return value
