"""An audit of the chain that a run of one's own uses: canaries among its users, and how well they are told apart.

Cohorts, clipping, noise and ledger are those of `PrivateRun`: what is wrong in them is wrong here. Nothing is released,
and no ledger is kept. What somebody's own loop publishes besides is not audited.

Shapes: P flat length.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from sottovoce.audit.canary_audit import Audit, audit_rounds
from sottovoce.audit.rounds import OnAuditedRelease
from sottovoce.base.errors import check_invariant
from sottovoce.dp.arrays import ArrayForm, Arrays
from sottovoce.dp.run import LEDGER, PrivateRun, build_plan
from sottovoce.federated.engines import Engine, Trained
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.federated.weighting import ClientFigures
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.planner import PlannedRun

# The update θ_server − θ_local of a user, by their index, from the server's parameters.
LocalUpdate = Callable[[int, dict[str, Any]], Arrays]

_STEP = ServerSettings(optimiser={"name": "sgd"}, schedule={"name": "constant", "lr": 1.0})


def audit_plan(
    planned: PlannedRun,
    parameters: Arrays,
    *,
    canaries: int = 1000,
    rounds: int | None = None,
    seed: int = 1,
    local_update: LocalUpdate | None = None,
    **options: Any,
) -> Audit:
    """Make the planned rounds, or the first `rounds`, with canaries among the users, and judge what they reveal.

    With `local_update` the plan's users are there too, and the model moves as theirs would; without, canaries are all
    users. `options` are those of `start_run`. Its own people's data must be yours to look at: an audit spends ε that no
    ledger has.
    """
    form = ArrayForm.of(parameters)
    plan = build_plan(planned, form, **{"root_seed": seed, **options})
    people = [] if local_update is None else [(_People(form, local_update), planned.population_size)]
    server = Server(_STEP, form.layout, form.flatten(parameters).float())
    count = min(rounds or planned.central_steps, planned.central_steps)
    return audit_rounds(plan, OwnRounds(server, count, form), people, canaries=canaries, seed=seed)


@final
@dataclass(frozen=True, eq=False)
class OwnRounds:
    """`count` rounds of a `PrivateRun` that move `server` by the noised mean."""

    server: Server
    count: int
    form: ArrayForm

    def make(
        self, plan: Plan, engine: Engine, *, on_release: OnAuditedRelease = lambda _released, _step, _plan: None
    ) -> LedgerReport:
        """Make them; returns what the ledger says of them, which is not kept."""
        form, server = self.form, self.server
        with tempfile.TemporaryDirectory(prefix="sottovoce-audit-") as folder:
            start = form.restore(server.parameters_P)
            with PrivateRun(plan, start, central_steps=self.count, folder=Path(folder)) as run:
                while (turn := run.next_round(form.restore(server.parameters_P))) is not None:
                    users = iter(turn.cohort)  # which of them an update is of plays no part
                    for trained in engine.train(server.parameters_P, turn.cohort, step=turn.step):
                        check_invariant(isinstance(trained, Trained), "an audit of users without single updates")
                        assert isinstance(trained, Trained)
                        for update_P in trained.update.reshape(-1, form.layout.flat_size):
                            turn.add(next(users), form.restore(update_P))
                    released_P = form.flatten(turn.release()).float()
                    on_release(released_P, turn.step, plan)
                    server.step(released_P, step=turn.step)
            return verify(Path(folder) / LEDGER)


@final
class _People(Engine):
    """Users whose updates come from somebody's own function."""

    def __init__(self, form: ArrayForm, local_update: LocalUpdate) -> None:
        self._form, self._local_update = form, local_update

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained]:
        figures = (ClientFigures(utterances=1, seconds=1.0, loss=0.0, wer=0.0),)
        for user in cohort:
            update_P = self._form.flatten(self._local_update(user, self._form.restore(server_P)))
            yield Trained(update_P, (user,), torch.zeros(1), figures, audio_seconds=0.0)
