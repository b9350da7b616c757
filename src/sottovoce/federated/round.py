"""One round: Algorithm 1 of Pelikan et al. (2025), from the cohort to the server's next model.

Here runs the line between private and public: a `CohortSum` and all that `Private` holds are by-products of users'
data that no accountant has counted; what `Round` holds besides came after the noise.

Shapes: P flat length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sottovoce.federated.cohort import Clients, as_sent
from sottovoce.federated.private import Private
from sottovoce.federated.server import Server, ServerStep
from sottovoce.federated.turns import Turns
from sottovoce.flat.segments import layer_norms
from sottovoce.privacy.correlated_noise import CorrelatedNoise
from sottovoce.privacy.ledger import Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan

# Training on the server's own data after round `step`: moves the model [P] in place and returns its mean loss.
ServerPass = Callable[[Tensor, int], float]
# Sees the noised mean [P] of round `step`, which is public; it is the server's, and gone when this returns.
OnRelease = Callable[[Tensor, int], None]


@dataclass(frozen=True)
class Round:
    """What a round left behind. `plan` is the next round's (adaptive clipping moves its bound).

    `interrupted`: another process has been asked to stop. `private` is a simulation's, and nobody else's.
    """

    plan: Plan
    server: ServerStep
    epsilon: float | None
    noise_std: float
    server_pass_loss: float | None
    interrupted: bool
    private: Private | None


def run_round(
    server: Server,
    *,
    plan: Plan,
    clients: Clients,
    ledger: Ledger,
    step: int,
    digest: str,
    server_pass: ServerPass | None = None,
    turns: Turns | None = None,
    model_bits: int | None = None,
    on_release: OnRelease | None = None,
    correlated: CorrelatedNoise | None = None,
) -> Round:
    """Round `step`: moves `server` in place. `digest` is the fingerprint of its parameters.

    Raises BudgetSpent, before any client trains, where the budget does not allow the step. The step is charged before
    that too: whatever a cohort does to this process, another attempt, with another cohort, costs again.

    `server_pass` trains on after the noise, on data of no client: it costs nothing, and nothing here checks its data.
    `turns` is where clients stand on their time lines; everybody in the cohort has had one when this returns. With
    `model_bits` clients train from a rounded model (`as_sent`), and their updates move the server's own. `on_release`
    is shown what the round releases, before the server uses it. `correlated` is the run's noise, where the plan has a
    mechanism: what attempts that were lost had of it is not used again.
    """
    among = None if turns is None else turns.among
    if correlated is not None:
        correlated.go_on(ledger.next_row(step))
    cohort = plan.sample(step, attempt=ledger.next_attempt(step), row=ledger.next_row(step), among=among)
    commitment = cohort_commitment(cohort, nonce=plan.cohort_nonce(step))
    charge = plan.charge(ledger, step=step, parameters=digest, cohort=commitment)
    told: dict[str, Any] = {} if turns is None else {"turns": turns.of(cohort)}
    summed = clients.sum(as_sent(server.parameters_P, model_bits), cohort, plan=plan, step=step, **told)
    if summed.diagnostics is not None:
        summed.diagnostics.signal_H = layer_norms(summed.total, plan.clipper.layers)
        summed.diagnostics.denominator = summed.denominator
    noised_P = plan.add_noise(summed.total, charge, shares=summed.noise_shares, correlated=correlated)
    pseudo_gradient_P = noised_P.div_(summed.denominator)
    if on_release is not None:
        on_release(pseudo_gradient_P, step)
    moved = server.step(pseudo_gradient_P, step=step)
    loss = None if server_pass is None else server_pass(server.parameters_P, step)
    server.average()
    if turns is not None:
        turns.advance(cohort)
    following = plan if plan.settings.adaptive is None else plan.adapt(summed.within, charge)
    return Round(
        following,
        moved,
        charge.epsilon,
        plan.noise_std_mean,
        loss,
        summed.interrupted,
        private=summed.diagnostics,
    )
