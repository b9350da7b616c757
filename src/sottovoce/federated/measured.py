"""What a client's model is measured by for its weight, as the weighting asks: nothing, its losses, or a WER.

Shapes: L local steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.evaluation.error_rates import compute_wer
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.federated.client import ClientRoom
from sottovoce.models.family import Parameters
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.settings import Weighting
from sottovoce.store import Store
from sottovoce.users.population import Client


def measured_loss(losses_L: Tensor, room: ClientRoom, *, weighting: Weighting) -> float | None:
    """The mean loss of a client's local steps, or of those of its last local epoch. Reading it waits for the device."""
    match weighting:
        case Weighting.LOSS:  # Gao et al., Eq. 9
            return float(losses_L.mean())
        case Weighting.LOSS_RELEASED:
            return float(last_epoch(losses_L, room).mean())
        case _:
            return None


def last_epoch(losses_L: Tensor, room: ClientRoom) -> Tensor:
    """Those of the last pass over a client's speech: all passes have as many batches, since their shapes are fixed."""
    epochs = room.local.local_epochs
    assert epochs is not None, "the recipe's check refuses this weighting without local epochs"
    return losses_L[-(len(losses_L) // epochs) :]


def measured_wer(
    parameters: Parameters, client: Client, room: ClientRoom, *, weighting: Weighting, device: torch.device
) -> float | None:
    """WER of a locally trained model on the client's held-out utterances (Gao et al., Eq. 10), or on shared ones."""
    match weighting:
        case Weighting.WER:
            if not len(client.held_out):
                raise InputError(f"client {client.id} has no held-out utterances to be weighted by")
            said = [room.store.utterance(row).text or "" for row in client.held_out.tolist()]
            return _wer(parameters, room, room.store, client.held_out, said, device=device)
        case Weighting.WER_RELEASED:
            shared = room.shared_dev
            assert shared is not None, "weighting=wer_released without shared speech"
            return _wer(parameters, room, shared.store, shared.rows, shared.texts, device=device)
        case _:
            return None


def _wer(
    parameters: Parameters,
    room: ClientRoom,
    store: Store,
    rows: NDArray[np.int64],
    said: Sequence[str],
    *,
    device: torch.device,
) -> float:
    whole = room.frozen.with_trained(parameters)
    recogniser = Recogniser(room.family, room.model, room.tokens, whole, store.language)
    return compute_wer(said, recognise_utterances(recogniser, store, rows, device=device))
