"""The loss on speakers who are not trained on: what models are chosen by that write no text.

Beside it stand the other figures of the family, if it has any, such as contrastive accuracy.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.processes import ALONE, Processes, split_by_load
from sottovoce.data.audio.waveforms import Waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.loading import Speech, load_batch, load_speech, prefetch
from sottovoce.data.store import Store
from sottovoce.evaluation.recognise import Progress, choose_batch_seconds, place_for_evaluation, plan_batches
from sottovoce.evaluation.score import LONGEST_SECONDS, check_language, find_split
from sottovoce.models.family import extract_float32_features
from sottovoce.models.recogniser import Recogniser


def select_speech(
    recogniser: Recogniser, store: Store, *, split: str | None = None, longest_seconds: float = LONGEST_SECONDS
) -> Speech:
    """The utterances of `split` (of all by default) that there is a loss for, and how many have none, by reason."""
    check_language(recogniser, store)
    users = find_split(store, split)
    rows = np.arange(int(store.user_utterances[users.start]), int(store.user_utterances[users.stop]))
    return load_speech(
        store,
        rows,
        recogniser.tokens,
        family=recogniser.family,
        settings=recogniser.settings,
        longest_seconds=longest_seconds,
    )


def summarise_figures(speech: Speech, figures: Mapping[str, float]) -> dict[str, Any]:
    """What `evaluate --json` and `results.json` say of a model that writes no text."""
    users = np.unique(np.searchsorted(speech.store.user_utterances, speech.rows, side="right") - 1).tolist()
    people = [speech.store.user(row) for row in users]
    return {
        "store": speech.store.name,
        "splits": list(dict.fromkeys(user.split for user in people)),
        "utterances": len(speech.rows),
        "speakers": len({user.metadata.get("speaker", user.name) for user in people}),
        "audio_seconds": float(speech.lengths.sum()) / SAMPLE_RATE,
        "left_out": {reason: count for reason, count in speech.left_out.items() if count},
        **figures,
    }


def compute_loss(recogniser: Recogniser, recordings: Waveforms) -> Tensor:
    """The mean loss of `recordings`, without anything that chance decides."""
    family, settings = recogniser.family, recogniser.settings
    features = extract_float32_features(family, recordings, settings=settings)
    return family.loss(recogniser.parameters, features, settings=settings, draws=None)


def compute_figures(recogniser: Recogniser, recordings: Waveforms) -> dict[str, Tensor]:
    """What `recordings` are measured by, the mean loss first."""
    family, settings = recogniser.family, recogniser.settings
    if family.inspection.measure is None:
        return {"loss": compute_loss(recogniser, recordings)}
    return family.inspection.measure(
        recogniser.parameters, extract_float32_features(family, recordings, settings=settings), settings=settings
    )


def compute_mean_figures(
    recogniser: Recogniser,
    speech: Speech,
    *,
    device: torch.device | str = "cpu",
    batch_seconds: float | None = None,
    processes: Processes = ALONE,
    on_progress: Progress | None = None,
) -> dict[str, float]:
    """The mean loss of an utterance of `speech`, without dropout or masks; the same bits every time on a CPU.

    With what else its family measures. Where all `processes` call it with the same arguments, each takes its share,
    and the first one knows the means; the others get NaN. An utterance counts once, however long.
    """
    device = torch.device(device)
    own = split_by_load(speech.lengths, processes.world)[processes.rank]
    max_seconds = choose_batch_seconds(device) if batch_seconds is None else batch_seconds
    batches = plan_batches(speech.lengths[own], max_seconds=max_seconds, device=device)
    recogniser = place_for_evaluation(recogniser, device)
    sums: dict[str, Tensor] = {}
    done = 0
    shares = (replace(batch, rows=own[batch.rows]) for batch in batches)
    with torch.no_grad():
        for batch in prefetch(load_batch(speech, share, device=device) for share in shares):
            for name, mean in compute_figures(recogniser, batch).items():
                own_sum = len(batch) * mean.double()
                sums[name] = sums[name] + own_sum if name in sums else own_sum
            done += len(batch)
            if on_progress is not None:
                on_progress(done)
    gathered = [part for part in processes.gather({name: float(total) for name, total in sums.items()}) if part]
    if not processes.is_first:
        return {"loss": math.nan}
    return {name: math.fsum(part[name] for part in gathered) / len(speech.rows) for name in gathered[0]}
