"""A client's stream (recipe key `time_line`): each of its utterances once, in order (Ramesh et al. 2023).

    store's order ─► batches of neighbours ─► part 0 │ part 1 │ … │ exhausted

A client that takes part for the n-th time uses the n-th part of its stream: the next `local_steps` batches. Which those
are depends on the client's own speech and on n, and n is how often it was drawn before: never on other clients, nor on
what training made of earlier parts. docs/decisions/022 says why privacy holds.

A run keeps how often each client was drawn. All of it is private.

Shapes: K clients of the population.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.data.audio.batches import Batch, Rows, plan_in_order
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.privacy.sampling import Indices

if TYPE_CHECKING:
    from sottovoce.federated.client import ClientContext

EXHAUSTED = "nothing is left of its time line"


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """`dry`: a client whose stream is exhausted is drawn like all others and sends `zero`, or is not drawn (`skip`).

    With noise it must be `zero`: that somebody is not drawn any more would reveal how much they have said.
    """

    dry: Literal["zero", "skip"] = "zero"

    def __post_init__(self) -> None:
        if self.dry not in ("zero", "skip"):
            raise InputError(f"local: time_line.dry={self.dry!r}, expected zero or skip")


def split_stream(
    lengths: Rows, *, max_seconds: float, max_utterances: int | None, local_steps: int
) -> list[tuple[Batch, ...]]:
    """All parts of a client's stream, whose utterances have `lengths`; the last may have fewer batches."""
    batches = plan_in_order(lengths, max_seconds=max_seconds, max_utterances=max_utterances)
    return [batches[first : first + local_steps] for first in range(0, len(batches), local_steps)]


@dataclass(frozen=True, eq=False)
class StreamSchedule:
    """How many parts each client's stream has, and the seconds used after each part, behind a 0 for each client."""

    parts_K: Indices
    seconds: NDArray[np.float64]

    def seconds_used(self, drawn_K: Indices) -> float:
        firsts_K = np.concatenate([[0], np.cumsum(self.parts_K + 1)[:-1]])  # where each client's 0 is
        return float(self.seconds[firsts_K + np.minimum(drawn_K, self.parts_K)].sum())


def stream_schedule(context: "ClientContext") -> StreamSchedule:
    """Look at everybody's speech, without reading audio. Only where no privacy is promised."""
    counts, seconds = [], []
    for client in context.population:
        try:
            speech = context.speech(client)
        except InputError:  # nothing to train on
            counts.append(0)
            seconds.append(np.zeros(1))
            continue
        parts = context.stream_parts(speech)
        own = [sum(int(speech.lengths[batch.rows].sum()) for batch in part) / SAMPLE_RATE for part in parts]
        counts.append(len(parts))
        seconds.append(np.cumsum([0.0, *own]))
    return StreamSchedule(np.array(counts, dtype=np.int64), np.concatenate(seconds))


@final
class StreamPositions:
    """How often each client was drawn. With a `schedule` it is known whose stream is exhausted, and how much is used.

    Without one nobody here knows, as in a private run nobody may. `skips`: exhausted clients are not drawn.
    """

    def __init__(self, population_size: int, *, schedule: StreamSchedule | None = None, skips: bool = False) -> None:
        check_invariant(schedule is not None or not skips, "skipping exhausted clients without knowing who they are")
        self._drawn_K = np.zeros(population_size, dtype=np.int64)
        self._schedule, self._skips = schedule, skips

    def of(self, cohort: Indices) -> Indices:
        """The position of each of `cohort`."""
        return self._drawn_K[cohort]

    def advance(self, cohort: Indices) -> None:
        """Everybody in `cohort` was drawn once more, whatever came of it."""
        self._drawn_K[cohort] += 1

    @property
    def among(self) -> Indices | None:
        """Whom a cohort is drawn from, where that is not everybody."""
        return self._left if self._skips else None

    @property
    def all_exhausted(self) -> bool:
        """Whether nothing is left of anybody's stream; never where that is not known."""
        return self._schedule is not None and not len(self._left)

    @property
    def _left(self) -> Indices:
        assert self._schedule is not None
        return np.flatnonzero(self._drawn_K < self._schedule.parts_K)

    @property
    def share_used(self) -> float | None:
        """The share of all speech that is used, in seconds; None where that is not known."""
        if self._schedule is None:
            return None
        whole = self._schedule.seconds_used(self._schedule.parts_K)
        return self._schedule.seconds_used(self._drawn_K) / whole if whole else 1.0

    def tensor(self) -> Tensor:
        """For a checkpoint."""
        return torch.from_numpy(self._drawn_K.copy())

    def restore(self, drawn_K: Tensor) -> None:
        if tuple(drawn_K.shape) != self._drawn_K.shape:
            raise InputError(f"the checkpoint has {len(drawn_K)} time lines, expected {len(self._drawn_K)}")
        self._drawn_K = drawn_K.cpu().numpy().astype(np.int64)
