"""Recognition by several processes at once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.evaluation.recognise import Progress, recognise
from sottovoce.models.recogniser import Recogniser
from sottovoce.processes import Processes, deal
from sottovoce.store import Store


def recognise_together(
    recogniser: Recogniser,
    store: Store,
    rows: NDArray[np.int64],
    *,
    processes: Processes,
    on_collapse: Progress | None = None,
    **options: Any,
) -> list[str]:
    """What `recognise` gives, in the first process, where all of them call this with the same arguments.

    Elsewhere texts are empty. Utterances are dealt out by length. A text may differ from one process's only where
    padding, which depends on who shares a batch, decides between two tokens by its last bit.
    """
    shares = deal(store.audio_offsets[rows + 1] - store.audio_offsets[rows], processes.world)
    own = shares[processes.rank]
    collapses: list[int] = []
    heard = recognise(recogniser, store, rows[own], on_collapse=collapses.append, **options) if len(own) else []
    texts = [""] * len(rows)
    gathered = processes.gather((heard, collapses))
    for places, (found, _) in zip(shares, gathered, strict=processes.first):
        for place, text in zip(places.tolist(), found, strict=True):
            texts[place] = text
    counted = [count for _, counts in gathered for count in counts]
    if on_collapse is not None and counted:
        on_collapse(sum(counted))
    return texts
