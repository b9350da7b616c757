"""One round: Algorithm 1 of Pelikan et al. (2025), from the cohort to the server's next model.

The line between private and public is here: a `CohortSum` and `RoundDiagnostics` are by-products of users' data that no
accountant has counted; all else that `Round` holds came after the noise.

Shapes: P flat length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sottovoce.federated.client_stream import StreamPositions
from sottovoce.federated.cohort import Clients, quantise_model
from sottovoce.federated.diagnostics import RoundDiagnostics
from sottovoce.federated.server import Server, ServerStep
from sottovoce.federated.staleness import RecentModels
from sottovoce.flat.segments import layer_norms
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.ledger import Charge, Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.round_noise import CorrelatedNoise
from sottovoce.privacy.sampling import Indices

# Runs after the server's step of round `step`: may move the model [P] in place, on data of no client, and returns
# figures for the metrics, which are public.
AfterStep = Callable[[Tensor, int], Mapping[str, float]]
# Sees the noised mean [P] of round `step`, which is public; it is the server's, and gone when this returns.
OnRelease = Callable[[Tensor, int], None]


@dataclass
class RoundState:
    """What rounds change. `plan` is the next round's: adaptive clipping moves its bound.

    `positions` is where clients stand in their streams. `correlated` is the run's noise, where there is a mechanism:
    rows that lost attempts used are not used again. `recent` are earlier models, where rounds overlap. `digest` is the
    fingerprint of the server's parameters.
    """

    server: Server
    plan: Plan
    ledger: Ledger
    positions: StreamPositions | None = None
    correlated: CorrelatedNoise | None = None
    recent: RecentModels | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = fingerprint_tensor(self.server.parameters_P)


@dataclass(frozen=True)
class Round:
    """What a round left behind. `figures` are what its `after_step` functions returned.

    `interrupted`: another process has been asked to stop. `private` is a simulation's, and nobody else's.
    """

    server: ServerStep
    epsilon: float | None
    noise_std: float
    figures: Mapping[str, float]
    interrupted: bool
    private: RoundDiagnostics | None


@dataclass(frozen=True, eq=False)
class BegunRound:
    """A cohort that is drawn and paid for, and the model [P] that it trains from."""

    cohort: Indices
    charge: Charge
    sent_P: Tensor


def begin_round(state: RoundState, *, step: int, sent_P: Tensor | None = None) -> BegunRound:
    """Algorithm 1: sample the cohort of `step`, and charge for the step before anybody trains.

    Clients over a network begin so many rounds before the sum of the first is released, from the model `sent_P` of
    their time. Without that they train from the server's, or from an earlier one (`RecentModels`).
    """
    plan, ledger, positions = state.plan, state.ledger, state.positions
    parameters = state.digest if sent_P is None else fingerprint_tensor(sent_P)
    among = None if positions is None else positions.among
    cohort = plan.sample(step, attempt=ledger.next_attempt(step), row=ledger.next_row(step), among=among)
    commitment = cohort_commitment(cohort, nonce=plan.cohort_nonce(step))
    charge = plan.charge(ledger, step=step, parameters=parameters, cohort=commitment)
    if sent_P is None:
        sent_P = state.server.parameters_P
        sent_P = sent_P if state.recent is None else state.recent.sent(sent_P)
    return BegunRound(cohort, charge, sent_P)


def run_round(
    state: RoundState,
    clients: Clients,
    *,
    step: int,
    after_step: Sequence[AfterStep] = (),
    model_bits: int | None = None,
    on_release: OnRelease | None = None,
    begun: BegunRound | None = None,
) -> Round:
    """Round `step`: moves `state` on.

    Raises BudgetSpent, before any client trains, where the budget does not allow the step. The step is charged before
    that too: whatever a cohort does to this process, another attempt, with another cohort, costs again.

    `after_step` comes after the noise and uses data of no client: it costs nothing, and nothing here checks its data.
    With `model_bits` clients train from a rounded model (`quantise_model`), and their updates move the server's own.
    `on_release` is shown what the round releases, before the server uses it. A round that was `begun` goes on.
    Everybody in the cohort has moved on in their stream when this returns.
    """
    server, plan, ledger, positions = state.server, state.plan, state.ledger, state.positions
    if state.correlated is not None:
        state.correlated.advance_to(ledger.next_row(step))
    # Algorithm 1: sample the cohort, and charge for the step before anybody trains.
    begun = begun or begin_round(state, step=step)
    cohort, charge = begun.cohort, begun.charge
    # Every client trains; updates are clipped and summed.
    given: dict[str, Any] = {} if positions is None else {"positions": positions.of(cohort)}
    if state.correlated is not None:
        given["row"] = charge.row
    summed = clients.sum(quantise_model(begun.sent_P, model_bits), cohort, plan=plan, step=step, **given)
    if summed.diagnostics is not None:
        summed.diagnostics.signal_H = layer_norms(summed.total, plan.clipper.layers)
        summed.diagnostics.denominator = summed.denominator
    # Noise on the sum; from here on everything is public.
    noised_P = plan.add_noise(summed.total, charge, shares=summed.noise_shares, correlated=state.correlated)
    pseudo_gradient_P = noised_P.div_(summed.denominator)
    if on_release is not None:
        on_release(pseudo_gradient_P, step)
    if state.recent is not None:
        state.recent.keep(server.parameters_P)
    # The server's optimiser steps against the mean update.
    moved = server.step(pseudo_gradient_P, step=step)
    figures: dict[str, float] = {}
    for function in after_step:
        figures |= function(server.parameters_P, step)
    server.average()
    if positions is not None:
        positions.advance(cohort)
    if plan.settings.adaptive is not None:
        state.plan = plan.adapt(summed.within, charge)
    state.digest = fingerprint_tensor(server.parameters_P)
    return Round(moved, charge.epsilon, plan.noise_std_mean, figures, summed.interrupted, private=summed.diagnostics)
