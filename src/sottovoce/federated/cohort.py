"""Who trains a cohort and returns its clipped sum: the interface between the server and its clients.

    LocalClients         in this process: a loop over an engine
    ClientsOverRanks     over the processes of one run (`federated.ranks`)

One client's update goes no further than this. The server takes a sum, so clients behind secure aggregation are one more
class with `sum` and `close`.

Shapes: P flat length.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sottovoce.base.errors import check_invariant
from sottovoce.federated.diagnostics import RoundDiagnostics
from sottovoce.federated.engines.engine import Dropped, Engine, JointlyTrained
from sottovoce.federated.lateness import LATE, in_time
from sottovoce.federated.weighting import WeightedSum
from sottovoce.privacy.clipping import centred_count
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.privacy.settings import Mode


@dataclass(frozen=True, eq=False)
class CohortSum:
    """Σ ω·clip(update) over a cohort, not yet noised: private, all of it.

    `denominator` makes a mean of the sum: public, but where weights are shares of the cohort. `within` is
    adaptive clipping's centred count, a sum too. `interrupted`: somebody who trained has been asked to stop.
    `noise_shares` of the plan's noise are in the sum, where clients add it. `diagnostics` are there in simulations
    only, and only from clients that can be looked at.
    """

    total: Tensor
    denominator: float
    within: float = 0.0
    interrupted: bool = False
    noise_shares: int = 0
    diagnostics: RoundDiagnostics | None = None


def quantise_model(server_P: Tensor, model_bits: int | None) -> Tensor:
    """The model that clients get, in the type it has: rounded to the nearest float16 where they get 16 bits a number.

    What float16 cannot hold is brought to its largest number: one wild parameter must not be infinite for everybody.
    """
    if model_bits is None:
        return server_P
    check_invariant(model_bits == 16, f"model_bits={model_bits}: expected 16, or none")
    largest = torch.finfo(torch.float16).max
    return server_P.clamp(-largest, largest).to(torch.float16).to(server_P.dtype)


class Clients(Protocol):
    """A population, wherever it is."""

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
        """Have every client of `cohort` train from the server's model, and clip and sum what comes of it.

        `positions` is where each of them stands on its time line, where clients have one. `row` is that of correlated
        noise, by which clients on other machines see that it is their turn.
        """
        ...

    def close(self) -> None:
        """Give back what they hold besides memory."""
        ...


class LocalClients:
    """All clients in this process, trained by `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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
        if plan.settings.mode is Mode.SEEDED and plan.settings.sampler is None:
            self._engine.expect(plan.sample(step + 1).tolist(), step=step + 1)
        part = sum_in_time(self._engine, server_P, cohort, plan=plan, step=step, positions=positions)
        part.weighted.settle()
        return CohortSum(part.total, part.weighted.denominator, part.within, diagnostics=part.diagnostics)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, eq=False)
class PartialSum:
    """The sum of some clients of a cohort, in units that the rest of it may yet change (`WeightedSum`): not settled."""

    total: Tensor
    weighted: WeightedSum
    within: float
    diagnostics: RoundDiagnostics | None


def sum_part(
    engine: Engine, server_P: Tensor, clients: Indices, *, plan: Plan, step: int, positions: Indices | None = None
) -> PartialSum:
    """Train, clip and sum `clients`, as `engine` gives them back. A release keeps no diagnostics, not even here."""
    diagnostics = None if plan.settings.mode is Mode.SECURE else RoundDiagnostics(cohort=len(clients))
    within, total = 0.0, plan.new_total(device=server_P.device)
    weighted = WeightedSum(plan, total)
    # Only where there are any: an engine of somebody's own need not know of time lines.
    given: dict[str, Any] = {} if positions is None else {"positions": positions.tolist()}
    for trained in engine.train(server_P, clients.tolist(), step=step, **given):
        if isinstance(trained, Dropped):
            if diagnostics is not None:
                diagnostics.dropped[trained.reason] += 1
            continue
        weight = weighted.weigh(trained.figures)
        if isinstance(trained, JointlyTrained):
            summed = trained.sum(weight)
            plan.add_unclipped(total, summed.sum_P)
            if diagnostics is not None:
                diagnostics.add_summed(summed, trained)
            continue
        stats = plan.accumulate(total, trained.update, weight=as_accumulated(weight, trained.update), step=step)
        apart = [float(weighted.has_no_wer(client)) for client in trained.figures]
        if any(apart):
            plan.accumulate(weighted.apart, trained.update, weight=as_accumulated(apart, trained.update), step=step)
        within += float(centred_count(stats)) if plan.settings.adaptive is not None else 0.0
        if diagnostics is not None:
            diagnostics.add(stats, trained)
    if diagnostics is not None:
        diagnostics.waited_seconds = engine.waited
    return PartialSum(total, weighted, within, diagnostics)


def sum_in_time(
    engine: Engine, server_P: Tensor, clients: Indices, *, plan: Plan, step: int, positions: Indices | None = None
) -> PartialSum:
    """`sum_part` in a simulation of clients that may be late: of those of `clients` who are in time."""
    answering = in_time(clients, plan=plan, step=step)
    some = None if positions is None else positions[answering]
    part = sum_part(engine, server_P, clients[answering], plan=plan, step=step, positions=some)
    if part.diagnostics is not None and not answering.all():
        part.diagnostics.cohort = len(clients)
        part.diagnostics.dropped[LATE] += int(len(clients) - answering.sum())
    return part


def as_accumulated(weights: list[float], update: Tensor) -> Tensor | float:
    """The weights of the clients of `update`, as the plan takes them."""
    if update.dim() == 1 or all(weight == 1 for weight in weights):
        return weights[0]
    return torch.tensor(weights, dtype=torch.float64).to(update.device, non_blocking=True)
