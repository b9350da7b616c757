"""From samples to encoder steps, of which none looks at what comes after its own last frame.

    samples ─► log-power, 256 bins every 10 ms ─► 3 frames side by side ─► dense layers, ReLU ─► LSTMs

A step ends with the window of its last frame: 15 ms of sound after the 30 ms that it stands for. Steps are computed one
by one, in chunks with a state that is carried on, or all at once, with the same result.

Shapes: U utterances, T frames or steps, F bins, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.augment import empty_bands
from sottovoce.data.audio.features import bin_hertz, frame_lengths, frame_mask, log_power
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.models import lstm
from sottovoce.models.family import Parameters
from sottovoce.models.log_mel import Narrow
from sottovoce.models.lstm import Cell, State
from sottovoce.models.speech_lstm.settings import Encoder, cell_names


def heard(recordings: Waveforms, *, settings: Encoder, dtype: torch.dtype = torch.float32) -> Features:
    """Normalised features [U, T, F] on the recordings' device, zero behind each utterance's end."""
    device, frames_U = recordings.samples_N.device, frame_lengths(recordings.lengths_U)
    features_UTF = line_features(
        recordings.padded_UN, recordings.lengths_U.to(device, non_blocking=True), settings=settings
    )
    longest_UTF = features_UTF[:, : int(frames_U.max()) if len(frames_U) else 0]
    return Features(longest_UTF.to(dtype), frames_U, recordings.tokens_UL, recordings.token_lengths_U)


def line_features(lines_UN: Tensor, lengths_U: Tensor, *, settings: Encoder) -> Tensor:
    features_UTF, frames_U = log_power(lines_UN, lengths_U)
    inside_UT1 = frame_mask(frames_U, features_UTF.shape[1])[:, :, None]
    return torch.where(inside_UT1, (features_UTF - settings.mean) / settings.deviation, 0.0)


def narrowed(features_UTF: Tensor, frames_U: Tensor, bands_U2: Tensor) -> Tensor:
    """The same had nothing been recorded outside `bands_U2`: bins are normalised alike whatever the others hold."""
    hertz_F = torch.from_numpy(bin_hertz()).to(features_UTF.device, torch.float32)
    return empty_bands(features_UTF, frames_U, bands_U2, hertz_F=hertz_F)


def narrow(_settings: Any) -> Narrow:
    return narrowed


def encode(weights: Parameters, features: Features, *, settings: Encoder) -> tuple[Tensor, Tensor]:
    """Encoder steps [U, T, D], at least one, and how many of them each utterance has, on the host."""
    encoded_UTD, _ = encode_frames(weights, features.features_UTF, settings=settings)
    return encoded_UTD, features.frames_U // settings.stack


def encode_frames(
    weights: Parameters, features_UTF: Tensor, state: State | None = None, *, settings: Encoder
) -> tuple[Tensor, State]:
    """The steps of some frames, whole stacks of which count, and the state behind them, from which others go on."""
    return in_context(weights, dense_steps(weights, features_UTF, settings=settings), state, settings=settings)


def dense_steps(weights: Parameters, features_UTF: Tensor, *, settings: Encoder) -> Tensor:
    """The dense layers' part: each step by itself, at least one."""
    x_UTD = stacked_frames(features_UTF.to(weights["encoder.dense.0.weight"].dtype), settings=settings)
    for layer in range(settings.dense_layers):
        name = f"encoder.dense.{layer}"
        x_UTD = F.linear(x_UTD, weights[f"{name}.weight"], weights[f"{name}.bias"]).relu()
    return x_UTD


def stacked_frames(features_UTF: Tensor, *, settings: Encoder) -> Tensor:
    """Frames side by side, as steps hear them: whole stacks, at least one."""
    missing = max(settings.stack - features_UTF.shape[1], 0)  # an utterance of less than one step
    steps = (features_UTF.shape[1] + missing) // settings.stack
    whole_UTF = F.pad(features_UTF, (0, 0, 0, missing))[:, : steps * settings.stack]
    return whole_UTF.reshape(len(whole_UTF), steps, -1)


def in_context(
    weights: Parameters, x_UTD: Tensor, state: State | None = None, *, settings: Encoder
) -> tuple[Tensor, State]:
    """The LSTMs' part: each step with all before it."""
    return lstm.forwards(x_UTD, cells(weights, "encoder.lstm", layers=settings.lstm_layers), state)


def cells(weights: Parameters, stem: str, *, layers: int) -> list[Cell]:
    return [Cell(*(weights[name] for name in names)) for names in cell_names(stem, layers=layers)]
