"""Where all clients stand on their time lines: a run's memory of who took part how often. Private, all of it.

Shapes: K clients of the population, T turns of all of them together.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.errors import InputError, check_invariant
from sottovoce.federated.client import ClientRoom
from sottovoce.privacy.sampling import Indices


@dataclass(frozen=True, eq=False)
class Schedule:
    """How many turns each client has, and the seconds that are used up after each turn, behind a 0 for each client."""

    turns_K: Indices
    seconds: NDArray[np.float64]

    @property
    def firsts_K(self) -> Indices:
        """Where each client's 0 is."""
        return np.concatenate([[0], np.cumsum(self.turns_K + 1)[:-1]])

    def seconds_used(self, turns_K: Indices) -> float:
        return float(self.seconds[self.firsts_K + np.minimum(turns_K, self.turns_K)].sum())


def schedule_of(room: ClientRoom) -> Schedule:
    """Look at everybody's speech, without reading audio. Only where nothing is promised to them."""
    counts, seconds = [], []
    for client in room.population:
        try:
            speech = room.speech(client)
        except InputError:  # nothing to train on: no turn
            counts.append(0)
            seconds.append(np.zeros(1))
            continue
        turns = room.turns(speech)
        own = [sum(int(speech.lengths[batch.rows].sum()) for batch in turn) / SAMPLE_RATE for turn in turns]
        counts.append(len(turns))
        seconds.append(np.cumsum([0.0, *own]))
    return Schedule(np.array(counts, dtype=np.int64), np.concatenate(seconds))


@final
class Turns:
    """How often each client was drawn. With a `schedule` it is known who has something left, and how much is used.

    Without one nobody here knows, as in a private run nobody may. `skips`: who has nothing left is not drawn.
    """

    def __init__(self, population_size: int, *, schedule: Schedule | None = None, skips: bool = False) -> None:
        check_invariant(schedule is not None or not skips, "skipping the dry without knowing who they are")
        self._drawn_K = np.zeros(population_size, dtype=np.int64)
        self._schedule, self._skips = schedule, skips

    def of(self, cohort: Indices) -> Indices:
        """The turn that each of `cohort` is at."""
        return self._drawn_K[cohort]

    def advance(self, cohort: Indices) -> None:
        """Whatever came of it, everybody in `cohort` has had a turn."""
        self._drawn_K[cohort] += 1

    @property
    def among(self) -> Indices | None:
        """Whom a cohort is drawn from, where that is not everybody."""
        return self._left if self._skips else None

    @property
    def all_dry(self) -> bool:
        """Whether nothing is left of anybody's; never where that is not known."""
        return self._schedule is not None and not len(self._left)

    @property
    def _left(self) -> Indices:
        assert self._schedule is not None
        return np.flatnonzero(self._drawn_K < self._schedule.turns_K)

    @property
    def share_used(self) -> float | None:
        """How much of all speech is used up, in seconds of it; None where that is not known."""
        if self._schedule is None:
            return None
        whole = self._schedule.seconds_used(self._schedule.turns_K)
        return self._schedule.seconds_used(self._drawn_K) / whole if whole else 1.0

    def tensor(self) -> Tensor:
        """For a checkpoint."""
        return torch.from_numpy(self._drawn_K.copy())

    def restore(self, drawn_K: Tensor) -> None:
        if tuple(drawn_K.shape) != self._drawn_K.shape:
            raise InputError(f"the checkpoint has {len(drawn_K)} time lines, expected {len(self._drawn_K)}")
        self._drawn_K = drawn_K.cpu().numpy().astype(np.int64)
