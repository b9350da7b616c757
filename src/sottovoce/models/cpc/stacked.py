"""Many clients' models at once, every tensor with a leading client axis: what `contrast` does, batched.

A step of LSTMs takes a GPU as long for one client as for many, and cuDNN takes one set of weights at a time. Here one
product serves a step of all clients, and each has gradients of its own.

Shapes: N clients, W utterances of the client with most, U utterances, T steps, F bins, D width, R rivals of a step,
G gates, X = K·T predictions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.features import HOP_SAMPLES
from sottovoce.data.audio.waveforms import Features
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models import lstm
from sottovoce.models.cpc import shared
from sottovoce.models.cpc.loss import losses as utterance_losses
from sottovoce.models.cpc.loss import rival_steps
from sottovoce.models.cpc.settings import Settings, parameter_shapes
from sottovoce.models.family import Parameters
from sottovoce.models.speech_lstm.network import cells, stacked_frames
from sottovoce.models.stacks import Weights, in_lines, line_places, linear, stacked_weights


def losses(
    parameters: Parameters,
    features: Features,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    draws: Tensor,
) -> Tensor:
    """The mean loss of each client's utterances, [N]; `rows_U` says whose each is. None has a loss of zero."""
    weights, encoder = stacked_weights(parameters, clients, parameter_shapes(settings)), settings.encoder
    frames_UTF = stacked_frames(features.features_UTF.to(weights["encoder.dense.0.weight"].dtype), settings=encoder)
    places_U, width = line_places(rows_U, clients)
    z_NWTD = in_lines(frames_UTF, places_U, clients * width).view(clients, width, *frames_UTF.shape[1:])
    for layer in range(encoder.dense_layers):
        z_NWTD = linear(weights, f"encoder.dense.{layer}", z_NWTD).relu()
    scores_BKST = scores_of(weights, z_NWTD, in_context(weights, z_NWTD, settings=settings), settings=settings)
    device, steps = z_NWTD.device, z_NWTD.shape[2]
    lengths_U = (features.frames_U // encoder.stack).to(device, non_blocking=True)
    rivals_USR = rival_steps(draws[:, :steps].to(device, non_blocking=True), lengths_U, steps)
    scores_UKST = scores_BKST.index_select(0, places_U.to(device, non_blocking=True))
    loss_U = utterance_losses(scores_UKST, rivals_USR, lengths_U, scale=settings.scale)
    return shared.means(loss_U, rows_U=rows_U, clients=clients)


def in_context(weights: Weights, x_NWTD: Tensor, *, settings: Settings) -> Tensor:
    clients, width, steps, _ = x_NWTD.shape
    for cell in cells(weights, "encoder.lstm", layers=settings.encoder.lstm_layers):
        bias_N1G = (cell.input_bias + cell.recurrent_bias)[:, None]
        gates_NMG = torch.baddbmm(bias_N1G, x_NWTD.flatten(1, 2), cell.input.mT)
        gates_TNWG = gates_NMG.view(clients, width, steps, -1).permute(2, 0, 1, 3).contiguous()
        x_NWTD = lstm.recur(gates_TNWG, cell.recurrent).permute(1, 2, 0, 3)
    return x_NWTD


def scores_of(weights: Weights, z_NWTD: Tensor, c_NWTD: Tensor, *, settings: Settings) -> Tensor:
    """As `loss.scores_of`, [N·W, K, S, T]."""
    steps, told = z_NWTD.shape[2], []
    for layer in range(settings.ahead):
        before_NWTD = F.pad(c_NWTD, (0, 0, layer + 1, 0))[:, :, :steps]
        told.append(linear(weights, f"prediction.{layer}", before_NWTD))
    told_BXD = torch.stack(told, dim=2).flatten(2, 3).flatten(0, 1)
    return torch.bmm(told_BXD, z_NWTD.flatten(0, 1).mT).view(len(told_BXD), settings.ahead, steps, steps)


def bytes_of(settings: Settings, *, seconds: float, steps: int) -> float:
    """As `shared.bytes_of`: LSTMs of our own keep more, the gates and cells of every step."""
    encoder = settings.encoder
    kept = encoder.lstm_layers * 14 * encoder.lstm_width
    return shared.bytes_of(settings, seconds=seconds, steps=steps) + 2 * kept * seconds * (
        SAMPLE_RATE / HOP_SAMPLES / encoder.stack
    )
