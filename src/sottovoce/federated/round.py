"""One round: Algorithm 1 of Pelikan et al. (2025), from the cohort to the server's next model.

Here runs the line between private and public: a `CohortSum` and all that `Private` holds are by-products of users'
data that no accountant has counted; what `Round` holds besides came after the noise.

Shapes: P flat length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sottovoce.federated.engines.distributed import DistributedEngine, RoundOrder
from sottovoce.federated.engines.engine import Dropped, Engine
from sottovoce.federated.private import Private
from sottovoce.federated.server import Server, ServerStep
from sottovoce.federated.weighting import WeightedSum
from sottovoce.flat.segments import layer_norms
from sottovoce.privacy.adaptive import centred_count
from sottovoce.privacy.ledger import Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices


@dataclass(frozen=True)
class Round:
    """What a round left behind. `plan` is the next round's (adaptive clipping moves its bound)."""

    plan: Plan
    server: ServerStep
    epsilon: float | None
    noise_std: float
    private: Private


@dataclass(frozen=True)
class CohortSum:
    """Σ ω·clip(update) over a cohort, not yet noised: private, all of it."""

    total: Tensor
    weighted: WeightedSum
    within: float  # adaptive clipping's centred count
    private: Private


def sum_cohort(cohort: Indices, server_P: Tensor, *, plan: Plan, engine: Engine, step: int) -> CohortSum:
    """Train, clip and sum: the clients' half of the round. In one of several processes, over its part of the cohort."""
    private, within = Private(cohort=len(cohort)), 0.0
    total = plan.new_total(device=server_P.device)
    weighted = WeightedSum(plan, total)
    for trained in engine.train(server_P, cohort.tolist(), step=step):
        if isinstance(trained, Dropped):
            private.dropped[trained.reason] += 1
            continue
        weight = weighted.weigh(trained.figures)
        stats = plan.accumulate(total, trained.update, weight=_as_accumulated(weight, trained.update))
        within += float(centred_count(stats)) if plan.settings.adaptive is not None else 0.0
        private.add(stats, trained)
    return engine.combine(CohortSum(total, weighted, within, private))


def run_round(server: Server, *, plan: Plan, engine: Engine, ledger: Ledger, step: int, digest: str) -> Round:
    """Round `step`: moves `server` in place. `digest` is the fingerprint of its parameters.

    Raises BudgetSpent, before any client trains, where the budget does not allow the step. The step is charged before
    that too: whatever a cohort does to this process, another attempt, with another cohort, costs again.
    """
    cohort = plan.sample(step, attempt=ledger.next_attempt(step))
    commitment = cohort_commitment(cohort, nonce=plan.cohort_nonce(step))
    charge = plan.charge(ledger, step=step, parameters=digest, cohort=commitment)
    engine.begin(server.parameters_P, cohort, plan=plan, step=step)
    summed = sum_cohort(cohort, server.parameters_P, plan=plan, engine=engine, step=step)
    summed.private.signal_H = layer_norms(summed.total, plan.clipper.layers)
    pseudo_gradient_P = plan.add_noise(summed.total, charge).div_(summed.weighted.denominator)
    moved = server.step(pseudo_gradient_P, step=step)
    following = plan if plan.settings.adaptive is None else plan.adapt(summed.within, charge)
    return Round(following, moved, charge.epsilon, plan.noise_std_mean, summed.private)


def take_part(order: RoundOrder, server_P: Tensor, *, plan: Plan, engine: DistributedEngine) -> None:
    """A round in a process that is not the first: it hands over its sum, and nothing is released here."""
    plan = engine.follow(server_P, order, plan=plan)
    sum_cohort(order.cohort, server_P, plan=plan, engine=engine, step=order.step)


def _as_accumulated(weights: list[float], update: Tensor) -> Tensor | float:
    if update.dim() == 1 or all(weight == 1 for weight in weights):
        return weights[0]
    return torch.tensor(weights, dtype=torch.float64).to(update.device, non_blocking=True)
