"""The encoder: convolutions, pooling over time, bidirectional LSTMs, a small DNN, and a CTC head.

    features ─► CNN blocks ─► max over 4 frames ─► LSTMs ─► DNN ─► memory ─► linear ─► CTC's log-probabilities

Padding changes nothing: convolutions see an utterance's own frames mirrored at its end, pooling takes whole windows,
LSTMs run over each utterance's own steps. The released model does none of that, nor do we with `as_released`.

Shapes: U utterances, T frames (10 ms before the pooling, 40 ms after), F frequency bins, C channels, D width, V tokens.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.models import ctc, lstm
from sottovoce.models.crdnn.settings import DIRECTIONS, POOLING, Settings
from sottovoce.models.family import Parameters
from sottovoce.models.trainable import with_corrections

SLOPE = 0.01  # of the LeakyReLUs
EPS = 1e-5
MOMENTUM = 0.1  # of batch-norm's running statistics
BORDER = (1, 1, 1, 1)  # what a convolution takes away: a frame and a bin on each side


class Encoded(NamedTuple):
    """What the decoder attends to, the encoder steps of each utterance (on the host), and CTC's log-probabilities."""

    memory_UTD: Tensor
    lengths_U: Tensor
    ctc_log_probs_UTV: Tensor


def encode(parameters: Parameters, features: Features, *, settings: Settings, training: bool = False) -> Encoded:
    """In training, dropout draws from torch's own generator (`seeded_kernels`), and batch-norm uses the batch."""
    features_UTF = features.features_UTF
    lengths_U = step_lengths(features.frames_U, features_UTF.shape[1], settings)
    ends_U = None if settings.as_released else _ends(features.frames_U, features_UTF)
    return encode_frames(parameters, features_UTF, lengths_U, ends_U=ends_U, settings=settings, training=training)


def encode_frames(
    parameters: Parameters,
    features_UTF: Tensor,
    lengths_U: Tensor,
    *,
    ends_U: Tensor | None,
    settings: Settings,
    training: bool = False,
) -> Encoded:
    """The same of frames whose encoder steps are `lengths_U`; `ends_U` is where utterances end within the batch."""
    weights = with_corrections(parameters)
    dropout = settings.dropout if training else 0.0
    features_UTF = features_UTF.to(weights["ctc.weight"].dtype)
    x_UTD = convolve(weights, features_UTF, ends_U, settings=settings, dropout=dropout)
    own_U = torch.full_like(lengths_U, x_UTD.shape[1]) if settings.as_released else lengths_U.clamp(min=1)
    own_U = own_U.to(x_UTD.device, non_blocking=True)
    x_UTD = run_lstms(weights, x_UTD, own_U, settings=settings, dropout=dropout)
    memory_UTD = deepen(weights, x_UTD, own_U, settings=settings, training=training)
    return Encoded(memory_UTD, lengths_U, ctc_log_probs(weights, memory_UTD))


def ctc_log_probs(weights: Mapping[str, Tensor], memory_UTD: Tensor) -> Tensor:
    return ctc.log_softmax(F.linear(memory_UTD, weights["ctc.weight"], weights["ctc.bias"]))


def step_lengths(frames_U: Tensor, frames: int, settings: Settings) -> Tensor:
    """Encoder steps of each utterance, on the host: whole windows, or as released its share of the batch, rounded."""
    if settings.as_released:
        return (frames_U * (frames // POOLING) / max(frames, 1)).round().long()
    return frames_U // POOLING


# Convolutions, on [U, C, T, F] that lies in memory as [U, T, F, C]: what norms and LSTMs want.


def convolve(
    weights: Mapping[str, Tensor], features_UTF: Tensor, ends_U: Tensor | None, *, settings: Settings, dropout: float
) -> Tensor:
    """The CNN blocks and the pooling over time: [U, T/4, F·C]. `ends_U` is where utterances end within the batch."""
    short = max(POOLING - features_UTF.shape[1], 0)  # a batch of less than one step
    x_UCTF = F.pad(features_UTF, (0, 0, 0, short))[:, None]
    for block in range(len(settings.channels)):
        for number in (1, 2):
            conv, norm = f"cnn.{block}.conv{number}", f"cnn.{block}.norm{number}"
            x_UCTF = F.conv2d(reflected(x_UCTF, ends_U), weights[f"{conv}.weight"], weights[f"{conv}.bias"])
            x_UTFC, gain_FC = x_UCTF.permute(0, 2, 3, 1), weights[f"{norm}.weight"]
            x_UTFC = F.leaky_relu(F.layer_norm(x_UTFC, gain_FC.shape, gain_FC, weights[f"{norm}.bias"], EPS), SLOPE)
            x_UCTF = x_UTFC.permute(0, 3, 1, 2)
        x_UCTF = F.max_pool2d(x_UCTF, (1, 2))
        if dropout:
            x_UCTF = _drop_planes(x_UCTF, dropout, bins=settings.as_released)
    x_UCTF = F.max_pool2d(x_UCTF, (POOLING, 1))
    return x_UCTF.permute(0, 2, 3, 1).flatten(2)


def _ends(frames_U: Tensor, features_UTF: Tensor) -> Tensor | None:
    """`frames_U` on the device of the batch; None where all are as long as it."""
    full = bool((frames_U == max(features_UTF.shape[1], POOLING)).all())
    return None if full else frames_U.to(features_UTF.device, non_blocking=True)


def reflected(x_UCTF: Tensor, ends_U: Tensor | None) -> Tensor:
    """A frame and a bin more on each side: mirrored at the borders, in time at each utterance's own end."""
    if ends_U is None:
        return F.pad(x_UCTF, BORDER, mode="reflect")
    return _Reflect.apply(x_UCTF, ends_U)  # type: ignore[no-any-return, no-untyped-call]


class _Reflect(torch.autograd.Function):
    """The batch reflected at its borders, and the frame behind each end then overwritten by the last but one before it.

    Only these frames are touched: in torch's own operations their few gradients would be copies of the whole batch.
    """

    @staticmethod
    def forward(ctx: Any, x_UCTF: Tensor, ends_U: Tensor) -> Tensor:
        found = F.pad(x_UCTF, BORDER, mode="reflect")
        rows_U = torch.arange(x_UCTF.shape[0], device=x_UCTF.device)
        found[rows_U, :, ends_U + 1] = found[rows_U, :, (ends_U - 2).clamp(min=0) + 1]
        ctx.save_for_backward(rows_U, ends_U)
        ctx.like = x_UCTF.shape, x_UCTF.stride()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows_U, ends_U = ctx.saved_tensors
        like = gradients[0].new_empty_strided(*ctx.like)  # only its shape is asked for
        gradient_UCTF = torch.ops.aten.reflection_pad2d_backward(gradients[0], like, BORDER)
        # What came to the frame behind an end belongs to the one that stood there.
        last = like.shape[2] - 1
        behind_U, inside_U11 = ends_U.clamp(max=last), (ends_U <= last)[:, None, None]
        moved_UCF = gradient_UCTF[rows_U, :, behind_U]
        gradient_UCTF[rows_U, :, behind_U] = torch.where(inside_U11, 0, moved_UCF)
        gradient_UCTF[rows_U, :, (ends_U - 2).clamp(min=0)] += torch.where(inside_U11, moved_UCF, 0)
        return gradient_UCTF, None


def _drop_planes(x_UCTF: Tensor, dropout: float, *, bins: bool) -> Tensor:
    """Whole channels dropped or, as released, whole frequency bins."""
    utterances, channels, _, frequencies = x_UCTF.shape
    shape = (utterances, 1, 1, frequencies) if bins else (utterances, channels, 1, 1)
    return x_UCTF * F.dropout(x_UCTF.new_ones(shape), dropout)


# LSTMs.


def run_lstms(
    weights: Mapping[str, Tensor],
    x_UTD: Tensor,
    lengths_U: Tensor,
    *,
    settings: Settings,
    dropout: float,
    recordable: bool = False,
) -> Tensor:
    """Bidirectional LSTMs over each utterance's own steps: [U, T, 2D]; behind its end values mean nothing.

    Torch's own are faster than ours, but on a GPU they cannot be recorded.
    """
    turned_UT = lstm.turned_places(lengths_U, x_UTD.shape[1])
    for layer in range(settings.rnn_layers):
        if layer:
            x_UTD = F.dropout(x_UTD, dropout, training=dropout > 0)
        stems = [f"rnn.{layer}.{direction}" for direction in DIRECTIONS]
        own = [lstm.Cell(*(weights[f"{stem}.{name}"] for name in lstm.NAMES)) for stem in stems]
        if recordable:
            x_UTD = lstm.bidirectional(x_UTD[None], turned_UT[None], lstm.stacked(own))[0]
        else:
            x_UTD = lstm.bidirectional_by_torch(x_UTD, turned_UT, own)
    return x_UTD


# The DNN.


def deepen(
    weights: Mapping[str, Tensor], x_UTD: Tensor, lengths_U: Tensor, *, settings: Settings, training: bool
) -> Tensor:
    """[U, T, D]; batch-norm counts each utterance's own steps."""
    dropout = settings.dropout if training else 0.0
    inside_UT1 = (torch.arange(x_UTD.shape[1], device=x_UTD.device) < lengths_U[:, None])[..., None]
    for layer in range(settings.dnn_layers):
        stem = f"dnn.{layer}"
        x_UTD = F.linear(x_UTD, weights[f"{stem}.linear.weight"], weights[f"{stem}.linear.bias"])
        x_UTD = _normalise(weights, f"{stem}.norm", x_UTD, inside_UT1, settings=settings, training=training)
        x_UTD = F.dropout(F.leaky_relu(x_UTD, SLOPE), dropout, training=dropout > 0)
    return x_UTD


def _normalise(
    weights: Mapping[str, Tensor], stem: str, x_UTD: Tensor, inside_UT1: Tensor, *, settings: Settings, training: bool
) -> Tensor:
    gain_D, bias_D = weights[f"{stem}.weight"], weights[f"{stem}.bias"]
    if settings.norm == "layer":
        return F.layer_norm(x_UTD, gain_D.shape, gain_D, bias_D, EPS)
    mean_D, variance_D = weights[f"{stem}.mean"], weights[f"{stem}.variance"]
    if training:
        kept, wide_UTD = (mean_D, variance_D), x_UTD.to(torch.promote_types(x_UTD.dtype, torch.float32))
        share_UT1 = inside_UT1.to(wide_UTD.dtype)
        count = share_UT1.sum()
        mean_D = (share_UT1 * wide_UTD).sum(dim=(0, 1)) / count
        variance_D = (share_UT1 * (wide_UTD - mean_D).square()).sum(dim=(0, 1)) / count
        seen = (mean_D.detach(), variance_D.detach() * count / (count - 1).clamp(min=1))
        for running_D, seen_D in zip(kept, seen, strict=True):
            x_UTD = _Move.apply(x_UTD, running_D, seen_D.to(running_D.dtype))  # type: ignore[no-untyped-call]
        mean_D, variance_D = mean_D.to(x_UTD.dtype), variance_D.to(x_UTD.dtype)
    # Noise may have made a variance negative.
    return (x_UTD - mean_D) * (gain_D * (variance_D.clamp(min=0) + EPS).rsqrt()) + bias_D


class _Move(torch.autograd.Function):
    """Returns x; the running statistic's "gradient" is how far it moves back in this step (`Training.statistics`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, running: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(running, seen)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        running, seen = ctx.saved_tensors
        return gradients[0], MOMENTUM * (running - seen), None
