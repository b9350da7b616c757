"""The losses of many clients at once, of one model that they share or of a model each.

Clients who share a model (FedSGD) are one large batch. Clients with a model each have tensors with a leading client
axis: a step of LSTMs takes a GPU as long for one client as for many, and cuDNN takes one set of weights at a time. Here
one product serves a step of all clients, and each has gradients of its own.

Shapes: N clients, W utterances of the client with most, U utterances, T or S steps, F bins, D width, R rivals of a
step, G gates, X = K·T predictions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.features import HOP_SAMPLES
from sottovoce.data.audio.waveforms import Features
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models import lstm
from sottovoce.models.cpc.loss import contrast, contrastive_losses, rival_steps
from sottovoce.models.cpc.settings import Settings, parameter_shapes
from sottovoce.models.family import Parameters
from sottovoce.models.speech_lstm import lstm_cells, stacked_frames
from sottovoce.models.stacks import Weights, line_places, stacked_linear, stacked_weights, to_lines

USUAL_SECONDS = 30.0  # of the longest utterance, where memory is planned
SCORE_BYTES = 14  # each as it is computed, as it is weighed, and its gradient


def join_draws(drawn_N: Sequence[Tensor | None]) -> Tensor:
    """Everybody's rivals, one behind the other; where somebody has fewer steps, whatever."""
    drawn = [places_USR for places_USR in drawn_N if places_USR is not None]
    steps = max(places_USR.shape[1] for places_USR in drawn)
    return torch.cat([F.pad(places_USR, (0, 0, 0, steps - places_USR.shape[1])) for places_USR in drawn])


def shared_losses(
    parameters: Parameters,
    features: Features,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    draws: Tensor,
) -> Tensor:
    """The mean loss of each client's utterances, [N]; `rows_U` says whose each is. None has a loss of zero."""
    loss_U = contrastive_losses(*contrast(parameters, features, settings=settings, draws=draws), scale=settings.scale)
    return client_means(loss_U, rows_U=rows_U, clients=clients)


def client_means(loss_U: Tensor, *, rows_U: Sequence[int], clients: int) -> Tensor:
    """Of each client's utterances, [N]."""
    whose_UN = F.one_hot(torch.tensor(rows_U), clients).to(loss_U.dtype)
    shares_UN = whose_UN / whose_UN.sum(dim=0).clamp(min=1)
    return loss_U @ shares_UN.to(loss_U.device, non_blocking=True)


def shared_bytes(settings: Settings, *, seconds: float, steps: int) -> float:
    """What a client with `seconds` of speech takes besides the weights."""
    encoder = settings.encoder
    a_second = SAMPLE_RATE / HOP_SAMPLES / encoder.stack
    inputs = encoder.stack * encoder.values + 2 * encoder.dense_layers * encoder.dense_width
    numbers = inputs + 10 * encoder.lstm_layers * encoder.lstm_width + 3 * settings.ahead * encoder.dense_width
    scores = settings.ahead * a_second * min(seconds, USUAL_SECONDS)
    return seconds * a_second * (2 * numbers + SCORE_BYTES * scores)


# A model each.


def stacked_losses(
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
    z_NWTD = to_lines(frames_UTF, places_U, clients * width).view(clients, width, *frames_UTF.shape[1:])
    for layer in range(encoder.dense_layers):
        z_NWTD = stacked_linear(weights, f"encoder.dense.{layer}", z_NWTD).relu()
    scores_BKST = _score_steps(weights, z_NWTD, _lstm_steps(weights, z_NWTD, settings=settings), settings=settings)
    device, steps = z_NWTD.device, z_NWTD.shape[2]
    lengths_U = (features.frames_U // encoder.stack).to(device, non_blocking=True)
    rivals_USR = rival_steps(draws[:, :steps].to(device, non_blocking=True), lengths_U, steps)
    scores_UKST = scores_BKST.index_select(0, places_U.to(device, non_blocking=True))
    loss_U = contrastive_losses(scores_UKST, rivals_USR, lengths_U, scale=settings.scale)
    return client_means(loss_U, rows_U=rows_U, clients=clients)


def _lstm_steps(weights: Weights, x_NWTD: Tensor, *, settings: Settings) -> Tensor:
    clients, width, steps, _ = x_NWTD.shape
    for cell in lstm_cells(weights, "encoder.lstm", layers=settings.encoder.lstm_layers):
        bias_N1G = (cell.input_bias + cell.recurrent_bias)[:, None]
        gates_NMG = torch.baddbmm(bias_N1G, x_NWTD.flatten(1, 2), cell.input.mT)
        gates_TNWG = gates_NMG.view(clients, width, steps, -1).permute(2, 0, 1, 3).contiguous()
        x_NWTD = lstm.recur(gates_TNWG, cell.recurrent).permute(1, 2, 0, 3)
    return x_NWTD


def _score_steps(weights: Weights, z_NWTD: Tensor, c_NWTD: Tensor, *, settings: Settings) -> Tensor:
    """As `loss.score_steps`, [N·W, K, S, T]."""
    steps, predicted = z_NWTD.shape[2], []
    for layer in range(settings.ahead):
        before_NWTD = F.pad(c_NWTD, (0, 0, layer + 1, 0))[:, :, :steps]
        predicted.append(stacked_linear(weights, f"prediction.{layer}", before_NWTD))
    predicted_BXD = torch.stack(predicted, dim=2).flatten(2, 3).flatten(0, 1)
    return torch.bmm(predicted_BXD, z_NWTD.flatten(0, 1).mT).view(len(predicted_BXD), settings.ahead, steps, steps)


def stacked_bytes(settings: Settings, *, seconds: float, steps: int) -> float:
    """As `shared_bytes`: LSTMs of our own keep more, the gates and cells of every step."""
    encoder = settings.encoder
    kept = encoder.lstm_layers * 14 * encoder.lstm_width
    return shared_bytes(settings, seconds=seconds, steps=steps) + 2 * kept * seconds * (
        SAMPLE_RATE / HOP_SAMPLES / encoder.stack
    )
