"""Clients who share one model: the losses of a whole cohort as one large batch, as FedSGD allows.

Shapes: N clients, U utterances of all of them, S steps, R rivals of a step.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.data.audio.features import BIN_COUNT, HOP_SAMPLES
from sottovoce.data.audio.waveforms import Features
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.cpc.contrast import contrasted
from sottovoce.models.cpc.loss import losses as utterance_losses
from sottovoce.models.cpc.settings import Settings
from sottovoce.models.family import Parameters

USUAL_SECONDS = 30.0  # of the longest utterance, where memory is planned
SCORE_BYTES = 14  # each as it is computed, as it is weighed, and its gradient


def join(drawn_N: Sequence[Tensor | None]) -> Tensor:
    """Everybody's rivals, one behind the other; where somebody has fewer steps, whatever."""
    drawn = [places_USR for places_USR in drawn_N if places_USR is not None]
    steps = max(places_USR.shape[1] for places_USR in drawn)
    return torch.cat([F.pad(places_USR, (0, 0, 0, steps - places_USR.shape[1])) for places_USR in drawn])


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
    loss_U = utterance_losses(*contrasted(parameters, features, settings=settings, draws=draws), scale=settings.scale)
    return means(loss_U, rows_U=rows_U, clients=clients)


def means(loss_U: Tensor, *, rows_U: Sequence[int], clients: int) -> Tensor:
    """Of each client's utterances, [N]."""
    whose_UN = F.one_hot(torch.tensor(rows_U), clients).to(loss_U.dtype)
    shares_UN = whose_UN / whose_UN.sum(dim=0).clamp(min=1)
    return loss_U @ shares_UN.to(loss_U.device, non_blocking=True)


def bytes_of(settings: Settings, *, seconds: float, steps: int) -> float:
    """What a client with `seconds` of speech takes besides the weights."""
    encoder = settings.encoder
    a_second = SAMPLE_RATE / HOP_SAMPLES / encoder.stack
    heard = encoder.stack * BIN_COUNT + 2 * encoder.dense_layers * encoder.dense_width
    numbers = heard + 10 * encoder.lstm_layers * encoder.lstm_width + 3 * settings.ahead * encoder.dense_width
    scores = settings.ahead * a_second * min(seconds, USUAL_SECONDS)
    return seconds * a_second * (2 * numbers + SCORE_BYTES * scores)
