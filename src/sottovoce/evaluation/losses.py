"""The loss of a model on speakers who are not trained on: what it is chosen by where it writes nothing down."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sottovoce.audio.batches import plan_epoch
from sottovoce.evaluation.evaluate import LONGEST_SECONDS, check_language, users_of
from sottovoce.evaluation.prefetch import ahead
from sottovoce.evaluation.recognise import batch_seconds_on, placed
from sottovoce.models.family import recordings_heard
from sottovoce.models.saved import Recogniser
from sottovoce.models.speech import Speech, load_batch, load_speech
from sottovoce.models.utterances import Recordings
from sottovoce.processes import ALONE, Processes, deal
from sottovoce.store import Store


def usable_speech(recogniser: Recogniser, store: Store, *, split: str) -> Speech:
    """The utterances of `split` that `recogniser` has a loss for, and how many have none, by reason."""
    check_language(recogniser, store)
    users = users_of(store, split)
    rows = np.arange(int(store.user_utterances[users.start]), int(store.user_utterances[users.stop]))
    family, settings = recogniser.family, recogniser.settings
    return load_speech(
        store, rows, recogniser.tokens, family=family, settings=settings, longest_seconds=LONGEST_SECONDS
    )


def recordings_loss(recogniser: Recogniser, recordings: Recordings) -> Tensor:
    """The mean loss of `recordings`, without anything that chance decides."""
    family, settings = recogniser.family, recogniser.settings
    features = recordings_heard(family, recordings, settings=settings)
    return family.loss(recogniser.parameters, features, settings=settings, draws=None)


def mean_loss(
    recogniser: Recogniser,
    store: Store,
    *,
    split: str,
    device: torch.device | str = "cpu",
    batch_seconds: float | None = None,
    processes: Processes = ALONE,
) -> float:
    """The mean loss of an utterance of `split`, without dropout or masks; the same bits every time on a CPU.

    Where all `processes` call it with the same arguments, each takes its share, and the first one knows the mean; the
    others get NaN. An utterance counts once, however long, and whoever shares its batch.
    """
    speech, device = usable_speech(recogniser, store, split=split), torch.device(device)
    own = deal(speech.lengths, processes.world)[processes.rank]
    plan = plan_epoch(
        speech.lengths[own],
        max_seconds=batch_seconds_on(device) if batch_seconds is None else batch_seconds,
        seed=0,
        epoch=0,
        fixed_shapes=device.type == "cuda",  # as `recognise` does
        allow_overlong=True,
    )
    recogniser = placed(recogniser, device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    batches = (replace(batch, rows=own[batch.rows]) for batch in plan.batches)
    with torch.no_grad():
        for batch in ahead(load_batch(speech, batch, device=device) for batch in batches):
            total += len(batch) * recordings_loss(recogniser, batch).double()
    totals = processes.gather(float(total))
    return math.fsum(totals) / len(speech.rows) if processes.first else math.nan
