"""One cohort over many processes: each trains a part of it with an engine of its own and sums what it has clipped.

    first     draws the cohort ──► order, model ─► own part ─┐
    others                     └─► order, model ─► own part ─┴► figures, then one sum ─► first: noise, ledger, server

Users are split by seconds of audio, so that all processes end at about the same time. Only sums leave a process; noise
is added once, where the ledger is. On the grid of a secure run sums are exact, whoever adds them up in whatever order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.processes import Processes, split_by_load
from sottovoce.federated.cohort import CohortSum, PartialSum, sum_in_time
from sottovoce.federated.diagnostics import RoundDiagnostics, merge_diagnostics
from sottovoce.federated.engines.engine import Engine
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices


@dataclass(frozen=True, eq=False)
class RoundOrder:
    """What the first process sends the others before a round; the server's model follows it."""

    step: int
    cohort: Indices
    clip_bound: float
    positions: Indices | None = None


@dataclass(frozen=True, eq=False)
class _Part:
    """What one process reports of its clients beside their sum."""

    heaviest: float
    weight: float
    measured: int
    unmeasured: int
    within: float
    interrupted: bool
    diagnostics: RoundDiagnostics | None


class ClientsOverRanks:
    """Made in every process, with an `engine` of its own. `seconds` is what each user of the population holds.

    The first one asks for sums; each of the others takes part in every one of them.
    """

    def __init__(self, engine: Engine, processes: Processes, *, seconds: NDArray[np.float64]) -> None:
        self._engine, self._processes, self._seconds = engine, processes, seconds

    def sum(
        self,
        server_P: Tensor,
        cohort: Indices,
        *,
        plan: Plan,
        step: int,
        positions: Indices | None = None,
        row: int | None = None,
    ) -> CohortSum:
        order = self._processes.broadcast_object(RoundOrder(step, cohort, plan.clip_bound, positions))
        self._processes.broadcast(server_P)
        part = self._own_part(server_P, order, plan=plan)
        parts = self._hand_over(part, interrupted=False)  # of itself the first one knows without
        heaviest = part.weighted.heaviest
        part.weighted.weight = math.fsum(each.weight * _scale(each.heaviest, heaviest) for each in parts)
        part.weighted.measured = sum(each.measured for each in parts)
        part.weighted.unmeasured = sum(each.unmeasured for each in parts)
        part.weighted.settle()
        diagnostics = [each.diagnostics for each in parts if each.diagnostics is not None]
        return CohortSum(
            part.total,
            part.weighted.denominator,
            math.fsum(each.within for each in parts),  # half counts: exact
            interrupted=any(each.interrupted for each in parts),
            diagnostics=merge_diagnostics(diagnostics) if diagnostics else None,
        )

    def take_part(
        self, order: RoundOrder, server_P: Tensor, *, plan: Plan, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """A round in a process that is not the first: it hands over its sum, and nothing is released here.

        The model is taken over, in place, and the clip bound. `interrupted` is asked when the clients are trained.
        """
        self._processes.broadcast(server_P)
        if plan.settings.adaptive is not None:
            plan = plan.with_clip_bound(order.clip_bound)
        part = self._own_part(server_P, order, plan=plan)
        self._hand_over(part, interrupted=interrupted())

    def close(self) -> None:
        self._engine.close()

    def _own_part(self, server_P: Tensor, order: RoundOrder, *, plan: Plan) -> PartialSum:
        own = split_by_load(self._seconds[order.cohort], self._processes.world)[self._processes.rank]
        positions = None if order.positions is None else order.positions[own]
        return sum_in_time(self._engine, server_P, order.cohort[own], plan=plan, step=order.step, positions=positions)

    def _hand_over(self, part: PartialSum, *, interrupted: bool) -> list[_Part]:
        """Add the sums of all up into the first process's; there, what each reports besides."""
        weighted = part.weighted
        own = _Part(
            weighted.heaviest,
            weighted.weight,
            weighted.measured,
            weighted.unmeasured,
            part.within,
            interrupted,
            None if part.diagnostics is None else part.diagnostics.on_host(),
        )
        parts = self._processes.gather(own)
        # Where weights are shares of the cohort, each sum is in units of its own heaviest client so far.
        weighted.rescale(self._processes.all_reduce_max(weighted.heaviest))
        self._processes.reduce(part.total)
        if weighted.may_sum_apart and self._processes.all_reduce_max(weighted.unmeasured):
            self._processes.reduce(weighted.apart)
        return parts


def _scale(own: float, heaviest: float) -> float:
    return math.exp(own - heaviest) if own < heaviest else 1.0
