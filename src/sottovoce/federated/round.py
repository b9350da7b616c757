"""One round: Algorithm 1 of Pelikan et al. (2025), from the cohort to the server's next model.

Here runs the line between private and public: a `CohortSum` and all that `Private` holds are by-products of users'
data that no accountant has counted; what `Round` holds besides came after the noise.

Shapes: P flat length, H layers.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sottovoce.federated.engines.engine import Dropped, Engine, Trained
from sottovoce.federated.server import Server, ServerStep
from sottovoce.federated.weighting import WeightedSum
from sottovoce.flat.segments import layer_norms
from sottovoce.privacy.adaptive import centred_count
from sottovoce.privacy.clipping import ClipStats, summarise
from sottovoce.privacy.ledger import Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices


@dataclass
class Private:
    """By-products of users' data: for diagnostics of simulations only."""

    cohort: int = 0
    stats: list[ClipStats] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    audio_seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    signal_H: Tensor | None = None

    def add(self, stats: ClipStats, trained: Trained) -> None:
        self.stats.append(stats)
        self.losses.append(trained.losses)
        self.audio_seconds += trained.audio_seconds
        for client in trained.figures:
            self.left_out.update(client.left_out)

    def as_json(self, plan: Plan) -> Mapping[str, object]:
        """In numbers. Waits for the device."""
        layers = plan.clipper.layers
        summary = summarise(self.stats, layers)
        losses = torch.cat([loss.reshape(-1) for loss in self.losses]).cpu() if self.losses else torch.zeros(0)
        finite = losses[losses.isfinite()]
        assert self.signal_H is not None
        noise = [plan.noise_std_sum * dimension**0.5 for dimension in layers.dimensions]
        return {
            "cohort": self.cohort,
            "dropped": dict(self.dropped),
            "utterances_left_out": {reason: count for reason, count in self.left_out.items() if count},
            "loss": float(finite.mean()) if len(finite) else None,
            **summary,
            "signal_to_noise": {
                name: signal / n if n else None
                for name, signal, n in zip(layers.names, self.signal_H.tolist(), noise, strict=True)
            },
        }


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

    cohort: Indices
    total: Tensor
    weighted: WeightedSum
    within: float  # adaptive clipping's centred count
    private: Private


def sum_cohort(server_P: Tensor, *, plan: Plan, engine: Engine, step: int) -> CohortSum:
    """Sample, train, clip and sum: the clients' half of the round, and the half that may be spread over processes."""
    cohort = engine.agree(plan.sample(step))
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
    return engine.combine(CohortSum(cohort, total, weighted, within, private))


def run_round(server: Server, *, plan: Plan, engine: Engine, ledger: Ledger, step: int, digest: str) -> Round:
    """Round `step`: moves `server` in place. `digest` is the fingerprint of its parameters.

    Raises BudgetSpent, before anything is released, where the budget does not allow the step.
    """
    summed = sum_cohort(server.parameters_P, plan=plan, engine=engine, step=step)
    summed.private.signal_H = layer_norms(summed.total, plan.clipper.layers)
    commitment = cohort_commitment(summed.cohort, nonce=plan.cohort_nonce(step))
    charge = plan.charge(ledger, step=step, parameters=digest, cohort=commitment)
    pseudo_gradient_P = plan.add_noise(summed.total, charge).div_(summed.weighted.denominator)
    moved = server.step(pseudo_gradient_P, step=step)
    following = plan if plan.settings.adaptive is None else plan.adapt(summed.within, charge)
    return Round(following, moved, charge.epsilon, plan.noise_std_mean, summed.private)


def _as_accumulated(weights: list[float], update: Tensor) -> Tensor | float:
    if update.dim() == 1 or all(weight == 1 for weight in weights):
        return weights[0]
    return torch.tensor(weights, dtype=torch.float64).to(update.device, non_blocking=True)
