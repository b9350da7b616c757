"""Rounds with others among the users, as a run makes them: plan, ledger, clients and server are the real ones.

Shapes: P flat length.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from sottovoce.federated.cohort import ClientsHere
from sottovoce.federated.engines import Engine
from sottovoce.federated.round import AfterStep, RoundState, run_round
from sottovoce.federated.server import Server
from sottovoce.federated.turns import Turns
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode

# Sees the noised mean [P] of a round, its step, and the plan it was made with (adaptive clipping moves the bound).
OnRelease = Callable[[Tensor, int, Plan], None]


def audited_plan(plan: Plan, *, others: int) -> Plan:
    """The plan with `others` more users, each as likely to be drawn as before, and with the same noise on the sum."""
    settings = plan.settings
    size = settings.population_size + others
    grown = size / settings.population_size
    cohort_size = min(max(round(settings.cohort_size * grown), 1), size)
    if settings.mechanism is not None:
        cohort_size = settings.mechanism.cohort_near(cohort_size, population_size=size)
    denominator = None if settings.denominator is None else settings.denominator * grown
    settings = replace(
        settings,
        population_size=size,
        cohort_size=cohort_size,
        denominator=denominator,
        noise_multiplier=settings.z,
        sigma_dp=None,
        epsilon_budget=None,
    )
    return replace(plan, settings=settings)


def make_rounds(
    plan: Plan,
    *,
    server: Server,
    engine: Engine,
    rounds: int,
    has_turns: bool = False,
    after_step: Sequence[AfterStep] = (),
    model_bits: int | None = None,
    on_release: OnRelease = lambda _released, _step, _plan: None,
    on_round: Callable[[int], None] = lambda _: None,
) -> LedgerReport:
    """Move `server` by so many rounds; returns what the ledger says of them, which is not kept."""
    turns = Turns(plan.settings.population_size) if has_turns else None
    with tempfile.TemporaryDirectory(prefix="sottovoce-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        repeatable = server.parameters_P.device.type == "cpu"
        header = plan.ledger_header(run="audit", repeatable=repeatable, central_steps=rounds)
        secret_folder = Path(folder) / SECRETS if plan.settings.mode is Mode.SECURE else None
        correlated = plan.correlated_noise(device=server.parameters_P.device, secret_folder=secret_folder)
        with closing(ClientsHere(engine)) as clients, closing(Ledger(path, header=header)) as ledger:
            state = RoundState(server, plan, ledger, turns, correlated)
            for step in range(rounds):
                run_round(
                    state,
                    clients,
                    step=step,
                    after_step=after_step,
                    model_bits=model_bits,
                    on_release=partial(_shown, on_release, state.plan),
                )
                on_round(step + 1)
        return verify(path)


def _shown(on_release: OnRelease, plan: Plan, released_P: Tensor, step: int) -> None:
    on_release(released_P, step, plan)
