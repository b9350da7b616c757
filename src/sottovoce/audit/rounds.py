"""Rounds with others among the users, as a run makes them: plan, ledger, clients and server are the real ones.

Shapes: P flat length.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol, final

from torch import Tensor

from sottovoce.federated.client_stream import StreamPositions
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, Engine, JointlyTrained, Trained
from sottovoce.federated.round import AfterStep, RoundState, run_round
from sottovoce.federated.server import Server
from sottovoce.federated.staleness import RecentModels
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode
from sottovoce.training.assemble import Federation

# Sees the noised mean [P] of a round, its step, and the plan it was made with (adaptive clipping moves the bound).
OnAuditedRelease = Callable[[Tensor, int, Plan], None]


def audited_plan(plan: Plan, *, others: int) -> Plan:
    """The plan with `others` more users, each as likely to be drawn as before, and with the same noise on the sum."""
    settings = plan.settings
    size = settings.population_size + others
    grown = size / settings.population_size
    cohort_size = min(max(round(settings.cohort_size * grown), 1), size)
    if settings.mechanism is not None:
        cohort_size = settings.mechanism.cohort_near(cohort_size, population_size=size)
    settings = replace(
        settings,
        population_size=size,
        cohort_size=cohort_size,
        denominator=None if settings.denominator is None else settings.denominator * grown,
        expected_answers=None,  # in an audit nobody is late: that is who a guarantee is for
        noise_multiplier=settings.z,
        sigma_dp=None,
        epsilon_budget=None,
    )
    return replace(plan, settings=settings)


class RoundsToAudit(Protocol):
    """`count` rounds that move `server`, whoever makes them."""

    @property
    def server(self) -> Server: ...

    @property
    def count(self) -> int: ...

    def make(self, plan: Plan, engine: Engine, *, on_release: OnAuditedRelease) -> LedgerReport:
        """Make them with the clients of `engine`; returns what the ledger says of them."""
        ...


@dataclass(frozen=True, eq=False)
class AuditedRounds:
    """`count` rounds that move `server`, and what happens in each besides the plan."""

    server: Server
    count: int
    has_streams: bool = False
    staleness: int | None = None
    after_step: Sequence[AfterStep] = ()
    model_bits: int | None = None
    on_round: Callable[[int], None] = lambda _: None

    def make(
        self, plan: Plan, engine: Engine, *, on_release: OnAuditedRelease = lambda _released, _step, _plan: None
    ) -> LedgerReport:
        """Make them; returns what the ledger says of them, which is not kept."""
        server, device = self.server, self.server.parameters_P.device
        positions = StreamPositions(plan.settings.population_size) if self.has_streams else None
        with tempfile.TemporaryDirectory(prefix="sottovoce-audit-") as folder:
            path = Path(folder) / "ledger.jsonl"
            header = plan.ledger_header(run="audit", repeatable=device.type == "cpu", central_steps=self.count)
            secret_folder = Path(folder) / SECRETS if plan.settings.mode is Mode.SECURE else None
            correlated = plan.correlated_noise(device=device, secret_folder=secret_folder)
            with closing(LocalClients(engine)) as clients, closing(Ledger(path, header=header)) as ledger:
                recent = None if self.staleness is None else RecentModels(self.staleness)
                state = RoundState(server, plan, ledger, positions, correlated, recent)
                for step in range(self.count):
                    run_round(
                        state,
                        clients,
                        step=step,
                        after_step=self.after_step,
                        model_bits=self.model_bits,
                        on_release=partial(_show_release, on_release, state.plan),
                    )
                    self.on_round(step + 1)
            return verify(path)


def federation_rounds(federation: Federation, count: int | None, on_round: Callable[[int, int], None]) -> AuditedRounds:
    """The rounds of a recipe's federation, or the first `count`; `on_round` gets how many are done, of how many."""
    settings = federation.settings
    rounds, server = min(count or settings.steps, settings.steps), federation.server()
    return AuditedRounds(
        server,
        rounds,
        has_streams=settings.local.time_line is not None,
        staleness=settings.staleness,
        after_step=federation.after_step(server),
        model_bits=settings.model_bits,
        on_round=lambda done: on_round(done, rounds),
    )


def _show_release(on_release: OnAuditedRelease, plan: Plan, released_P: Tensor, step: int) -> None:
    on_release(released_P, step, plan)


@final
class JoinedEngine(Engine):
    """Several engines as one: the first has the first clients of the population, the next those behind them."""

    def __init__(self, engines: Sequence[tuple[Engine, int]]) -> None:
        self._engines = [engine for engine, _ in engines]
        self._firsts = list(accumulate((count for _, count in engines), initial=0))

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | JointlyTrained | Dropped]:
        for engine, first, end in zip(self._engines, self._firsts[:-1], self._firsts[1:], strict=True):
            places = [place for place, client in enumerate(cohort) if first <= client < end]
            own = [cohort[place] - first for place in places]
            given = {} if positions is None else {"positions": [positions[place] for place in places]}
            yield from engine.train(server_P, own, step=step, **given)
            self.waited = engine.waited if engine is self._engines[0] else self.waited

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
