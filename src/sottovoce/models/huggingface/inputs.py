"""What each kind of pretrained network takes: features, masks that count frames exactly, and the frames that come out.

Shapes: U utterances, N samples, T frames, F features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sottovoce.data.audio.augment import as_float
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.huggingface.front_ends import extract_pretrained
from sottovoce.models.huggingface.settings import Settings

RAW = ("wav2vec2", "hubert", "wavlm", "moonshine")  # take samples
MOONSHINE_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))  # kernel and stride
MOONSHINE_STRIDE = 64 * 3 * 2


def extract_features(recordings: Waveforms, *, settings: Settings, dtype: torch.dtype) -> Features:
    """The model's own features, with `silence_seconds` before and after every utterance."""
    found_UTF, frames_U = extract_lines(as_float(recordings.padded_UN), recordings.lengths_U.cpu(), settings)
    return Features(found_UTF.to(dtype), frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def extract_lines(samples_UN: Tensor, lengths_U: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The same of floats in lines, with lengths on the host: features [U, T, F] and their frames [U]."""
    silence = silence_samples(settings)
    samples_UN = torch.nn.functional.pad(samples_UN, (silence, silence))
    inside_UN = torch.arange(samples_UN.shape[1]) < (lengths_U + silence)[:, None]
    samples_UN = samples_UN.where(inside_UN.to(samples_UN.device, non_blocking=True), 0.0)
    found_UTF, frames_U = extract_pretrained(samples_UN, lengths_U + 2 * silence, processor=settings.of_processor)
    if settings.kind == "whisper":  # takes whole windows, whatever is in them
        frames_U = torch.full_like(frames_U, found_UTF.shape[1])
    return found_UTF, frames_U


def silence_samples(settings: Settings) -> int:
    return round(settings.silence_seconds * SAMPLE_RATE)


def network_inputs(
    features_UTF: Tensor, frames_U: Tensor, settings: Settings
) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """What the network takes, the frames that its group norms look at (None: all), and frames that come out (host)."""
    frames_U = frames_U.cpu()
    if bool((frames_U == features_UTF.shape[1]).all()):  # no mask to look at
        return _plain_inputs(features_UTF, settings), None, output_frames(frames_U, settings)
    return masked_inputs(features_UTF, frames_U, settings)


def _plain_inputs(features_UTF: Tensor, settings: Settings) -> dict[str, Tensor]:
    if settings.kind in RAW:
        return {"input_values": features_UTF[:, :, 0]}
    return {"input_features": features_UTF.mT if settings.kind == "whisper" else features_UTF}


def masked_inputs(
    features_UTF: Tensor, frames_U: Tensor, settings: Settings
) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """The same with a mask, whether it is needed or not: nothing depends on what the lengths are."""
    kind, inputs = settings.kind, _plain_inputs(features_UTF, settings)
    out_U = output_frames(frames_U, settings)
    if kind == "whisper":
        return inputs, None, out_U
    # Moonshine takes every 384th of a mask for its frames: so many ones that those are the frames that are left.
    counted_U = out_U * MOONSHINE_STRIDE if kind == "moonshine" else frames_U
    device = features_UTF.device
    mask_UT = torch.arange(features_UTF.shape[1], device=device) < counted_U.to(device, non_blocking=True)[:, None]
    inputs["attention_mask"] = mask_UT.long()
    norm_U = _first_frames(frames_U, settings)
    return inputs, None if norm_U is None else norm_U.to(device, non_blocking=True), out_U


def _first_frames(frames_U: Tensor, settings: Settings) -> Tensor | None:
    """Frames behind the first convolution, where group norms are; None for kinds that have none there."""
    if settings.kind == "moonshine":
        kernel, stride = MOONSHINE_CONVOLUTIONS[0]
    elif settings.kind in RAW and settings.of_model.get("feat_extract_norm", "group") == "group":
        kernel, stride = _convolutions(settings.of_model)[0]
    else:
        return None
    return _convolved(frames_U, kernel, stride)


def output_frames(frames_U: Tensor, settings: Settings) -> Tensor:
    """How many frames the encoder makes of so many frames of features."""
    kind, config = settings.kind, settings.of_model
    if kind == "whisper":
        return frames_U // 2
    if kind == "parakeet_ctc":
        encoder = config.get("encoder_config") or {}
        factor, kernel = encoder.get("subsampling_factor", 8), encoder.get("subsampling_conv_kernel_size", 3)
        stride = encoder.get("subsampling_conv_stride", 2)
        for _ in range(factor.bit_length() - 1):
            frames_U = (frames_U + 2 * ((kernel - 1) // 2) - kernel) // stride + 1
        return frames_U
    if kind == "moonshine":
        for kernel, stride in MOONSHINE_CONVOLUTIONS:
            frames_U = _convolved(frames_U, kernel, stride)
        return frames_U
    if kind in RAW:
        for kernel, stride in _convolutions(config):
            frames_U = _convolved(frames_U, kernel, stride)
    if config.get("add_adapter"):
        kernel, stride = config.get("adapter_kernel_size", 3), config.get("adapter_stride", 2)
        for _ in range(config.get("num_adapter_layers", 1 if kind == "wav2vec2-bert" else 3)):
            padded = frames_U + 2 * (stride // 2) if kind == "wav2vec2-bert" else frames_U + 2
            frames_U = (padded - kernel) // stride + 1
    return frames_U


def _convolutions(config: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
    kernels = config.get("conv_kernel", (10, 3, 3, 3, 3, 2, 2))
    strides = config.get("conv_stride", (5, 2, 2, 2, 2, 2, 2))
    return list(zip(kernels, strides, strict=True))


def _convolved(frames_U: Tensor, kernel: int, stride: int) -> Tensor:
    return ((frames_U - kernel) // stride + 1).clamp_min(0)


def feature_frames(samples: int, settings: Settings) -> int:
    """About how many frames of features so many samples give."""
    whole = samples + 2 * silence_samples(settings)
    if settings.kind in RAW:
        return whole
    hop = settings.of_processor.get("hop_length", 160) * settings.of_processor.get("stride", 1)
    return whole // int(hop)


def window_samples(settings: Settings) -> int | None:
    """The longest utterance that the model takes; None where there is no limit."""
    if settings.kind != "whisper":
        return None
    return int(settings.of_processor.get("chunk_length", 30)) * SAMPLE_RATE - 2 * silence_samples(settings)


def samples_per_frame(settings: Settings) -> int:
    """Of the encoder's output."""
    second = 100 * SAMPLE_RATE
    frames = int(output_frames(torch.tensor([feature_frames(second, settings)]), settings)[0])
    return round(second / frames / 32) * 32  # all are multiples of two milliseconds
