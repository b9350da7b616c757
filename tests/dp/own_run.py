"""The same rounds as a run of ours makes them: the reference for loops and apps that are not ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.dp import PlannedRun
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, Engine, Trained
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.privacy.mechanism import MechanismSettings
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

Models = dict[str, Any]
# What a user makes of a model; None where nothing comes back.
Trains = Callable[[int, Models], Models | None]


class _Users(Engine):
    def __init__(self, layout: Layout, trains: Trains) -> None:
        self._layout, self._trains = layout, trains

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        for user in cohort:
            model = {name: view.numpy() for name, view in self._layout.views(server_P.clone()).items()}
            after = self._trains(user, model)
            if after is None:
                yield Dropped(user, "in trouble")
                continue
            update = {name: torch.from_numpy(model[name] - after[name]) for name in model}
            figures = (ClientFigures(utterances=1, seconds=1.0, loss=0.0, wer=0.0),)
            yield Trained(self._layout.flatten(update), (user,), torch.zeros(1), figures, audio_seconds=0.0)


def run_ours(
    planned: PlannedRun, start: Models, trains: Trains, *, folder: Path, **options: Any
) -> tuple[Models, LedgerReport]:
    """The model after all planned rounds of federated averaging, and what the ledger says."""
    tensors = {name: torch.from_numpy(np.array(one)) for name, one in start.items()}
    layout = Layout.of(tensors)
    names = ("population_size", "cohort_size", "clip_bound", "noise_multiplier", "delta")
    if "mechanism" in options:
        sizes = {"population_size": planned.population_size, "cohort_size": planned.cohort_size}
        options["mechanism"] = MechanismSettings(**options["mechanism"]).for_run(planned.central_steps, **sizes)
    settings = PrivacySettings(**{name: getattr(planned, name) for name in names}, privacy_unit="user", **options)
    plan = Plan(settings, layout)
    sgd = ServerSettings(optimiser={"name": "sgd"}, schedule={"name": "constant", "lr": 1.0})
    server, path = Server(sgd, layout, layout.flatten(tensors)), folder / "ours.jsonl"
    header = plan.ledger_header(run=folder.name, central_steps=planned.central_steps)
    with closing(Ledger(path, header=header)) as ledger:
        state = RoundState(server, plan, ledger, None, plan.correlated_noise())
        for step in range(planned.central_steps):
            run_round(state, LocalClients(_Users(layout, trains)), step=step)
    found = {name: view.numpy().copy() for name, view in layout.views(server.parameters_P).items()}
    return found, verify(path)
