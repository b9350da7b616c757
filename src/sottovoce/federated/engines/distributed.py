"""One cohort over many processes: each trains a part of it with an engine of its own and sums what it has clipped.

    first     draws the cohort ──► order, model ─► own part ─┐
    others                     └─► order, model ─► own part ─┴► figures, then one sum ─► first: noise, ledger, server

Users are dealt out by seconds of audio, so that all are done at about the same time. Only sums leave a process; noise
is added once, where the ledger is. On the grid of a secure run sums are exact, whoever adds them up in whatever order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.federated.engines.engine import Dropped, Engine, Trained
from sottovoce.federated.private import Private, merged
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.processes import Processes, deal

if TYPE_CHECKING:
    from sottovoce.federated.round import CohortSum


@dataclass(frozen=True, eq=False)
class RoundOrder:
    """What the first process tells the others before a round; the server's model follows it."""

    step: int
    cohort: Indices
    clip_bound: float


@dataclass(frozen=True, eq=False)
class _Part:
    """What one process reports of its clients beside their sum."""

    heaviest: float
    weight: float
    within: float
    waited: float
    interrupted: bool
    private: Private


class DistributedEngine(Engine):
    """Trains this process's part of a cohort with `inner`. `seconds` is what each user of the population holds."""

    def __init__(self, inner: Engine, processes: Processes, *, seconds: NDArray[np.float64]) -> None:
        self._inner, self._processes, self._seconds = inner, processes, seconds
        self._asked: Callable[[], bool] = lambda: False
        self._interrupted = False

    def close(self) -> None:
        self._inner.close()

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        self._asked = interrupted
        return lambda: self._interrupted

    def begin(self, server_P: Tensor, cohort: Indices, *, plan: Plan, step: int) -> None:
        """In the first process: the others begin the same round."""
        self._processes.share(RoundOrder(step, cohort, plan.clip_bound))
        self._processes.spread(server_P)

    def follow(self, server_P: Tensor, order: RoundOrder, *, plan: Plan) -> Plan:
        """In the others: take over the model, in place, and the clip bound that `order` begins with."""
        self._processes.spread(server_P)
        return plan if plan.settings.adaptive is None else plan.with_clip_bound(order.clip_bound)

    def train(self, server_P: Tensor, cohort: Sequence[int], *, step: int) -> Iterator[Trained | Dropped]:
        users = np.asarray(cohort, dtype=np.int64)
        own = deal(self._seconds[users], self._processes.world)[self._processes.rank]
        yield from self._inner.train(server_P, users[own].tolist(), step=step)

    def combine(self, summed: "CohortSum") -> "CohortSum":
        weighted = summed.weighted
        own = _Part(
            weighted.heaviest,
            weighted.weight,
            summed.within,
            self._inner.waited,
            self._asked(),
            summed.private.on_host(),
        )
        parts = self._processes.gather(own)
        # Where weights are shares of the cohort, each sum is in units of its own heaviest client so far.
        heaviest = self._processes.largest(weighted.heaviest)
        weighted.rescale(heaviest)
        self._processes.add_up(summed.total)
        if not self._processes.first:
            return summed
        self._interrupted = any(part.interrupted for part in parts)
        weighted.weight = math.fsum(part.weight * _scale(part.heaviest, heaviest) for part in parts)
        self.waited = max(part.waited for part in parts)
        within = math.fsum(part.within for part in parts)  # half counts: exact
        return replace(summed, within=within, private=merged([part.private for part in parts]))


def _scale(own: float, heaviest: float) -> float:
    return math.exp(own - heaviest) if own < heaviest else 1.0
