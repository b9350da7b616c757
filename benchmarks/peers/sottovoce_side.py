"""Sottovoce's side, and the floor below everybody: plain loops over the same local steps.

    python benchmarks/peers/sottovoce_side.py tiny --engine floor

`floor` trains every client of the cohort and does nothing else: no update, no clipping, no sum. `loop` is Algorithm 1
in the fewest lines, and what the models of all others are compared with. `workers`, `stacked` and `sequential` are our
engines (`auto`: what a long run would choose) in whole rounds as `sottovoce run` makes them: ledger, clipping on the
noise's grid, noise, server optimiser.
"""

import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sottovoce_clients import indices_of, planned_work, workload_context
from torch import Tensor
from turns import Turns, parse
from workload import (
    CLIP_BOUND,
    CLIP_GRADIENTS,
    LOCAL_LR,
    SEED,
    SERVER_LR,
    Tally,
    Task,
    client_steps,
    cohort,
    loss_of,
    start_parameters,
)

from sottovoce.base.seeds import torch_stream
from sottovoce.federated.client import ClientContext
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Engine, SequentialEngine, StackedEngine, WorkersEngine
from sottovoce.federated.engines.workers import usable_cores
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, accelerate_family
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.privacy.settings import PrivacySettings, Sampling

Parameters = Mapping[str, Tensor]
Round = Callable[[int, Tally], Parameters | None]


@dataclass(frozen=True)
class Client:
    """The one model that is trained: float32 masters, and what the forward pass takes (on a GPU, bfloat16 copies)."""

    masters: list[Tensor]
    working: dict[str, Tensor]

    @classmethod
    def like(cls, server: Parameters) -> "Client":
        masters = [p.clone() for p in server.values()]
        # `detach` shares the master's memory: in float32 there is nothing to copy.
        copies = [(p.bfloat16() if p.is_cuda else p.detach()).requires_grad_() for p in masters]
        return cls(masters, dict(zip(server, copies, strict=True)))

    @torch.no_grad()
    def load(self, server: Parameters) -> None:
        torch._foreach_copy_(self.masters, list(server.values()))
        self._refresh()

    @torch.no_grad()
    def step(self, gradients: list[Tensor | None]) -> None:
        """SGD with gradient clipping; layers that were left out have no gradient and stay."""
        pairs = [(p, g) for p, g in zip(self.masters, gradients, strict=True) if g is not None]
        moved, along = [p for p, _ in pairs], [g.float() for _, g in pairs]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(along)))
        torch._foreach_mul_(along, (CLIP_GRADIENTS / norm).clamp(max=1.0))
        torch._foreach_add_(moved, along, alpha=-LOCAL_LR)
        self._refresh()

    def _refresh(self) -> None:
        if self.masters[0].is_cuda:
            torch._foreach_copy_(list(self.working.values()), self.masters)


def trained(task: Task, server: Parameters, client: Client, *, round_number: int, tally: Tally) -> Iterator[None]:
    """Trains `client` as one user of the cohort after another, each from `server`, and halts after each."""
    for number in cohort(task.workload, round_number):
        client.load(server)
        for step in client_steps(task.workload, number, round_number=round_number, device=task.device):
            loss = loss_of(task.workload, client.working, step, tally)
            client.step(list(torch.autograd.grad(loss, list(client.working.values()), allow_unused=True)))
        yield


def _server(task: Task) -> dict[str, Tensor]:
    return {name: p.to(task.device) for name, p in start_parameters(task.workload).items()}


def floor(task: Task) -> Round:
    server = _server(task)
    client = Client.like(server)

    def one_round(round_number: int, tally: Tally) -> None:
        for _ in trained(task, server, client, round_number=round_number, tally=tally):
            pass

    return one_round


def loop(task: Task) -> Round:
    server = _server(task)
    client = Client.like(server)

    def one_round(round_number: int, tally: Tally) -> Parameters:
        total = [torch.zeros_like(p) for p in server.values()]
        for _ in trained(task, server, client, round_number=round_number, tally=tally):
            updates = torch._foreach_sub(list(server.values()), client.masters)
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(updates)))
            torch._foreach_mul_(updates, (CLIP_BOUND / norm).clamp(max=1.0))
            torch._foreach_add_(total, updates)
        generator = torch_stream(SEED, "noise", round_number, device=task.device)
        for p, summed in zip(server.values(), total, strict=True):
            noise = torch.randn(p.shape, generator=generator, device=task.device)
            summed.add_(noise, alpha=task.noise_multiplier * CLIP_BOUND)
            p.sub_(summed, alpha=SERVER_LR / task.workload.cohort_size)
        return server

    return one_round


def rounds(task: Task, name: str, engine_name: str) -> Round:
    """Rounds by one of our engines, with everything that a run does in a round."""
    context = workload_context(name)
    indices = indices_of(context)
    parameters = start_parameters(task.workload)
    layout = Layout.of(parameters)
    plan = FixedCohorts(
        PrivacySettings(
            population_size=task.workload.users,
            privacy_unit="speaker",
            cohort_size=task.workload.cohort_size,
            sampling=Sampling.FIXED_SIZE,
            clip_bound=CLIP_BOUND,
            noise_multiplier=task.noise_multiplier,
            delta=1e-6,
            root_seed=SEED,
        ),
        layout,
        cohorts=lambda step: indices(cohort(task.workload, step)),
    )
    settings = ServerSettings(optimiser={"name": "sgd"}, schedule={"name": "constant", "lr": SERVER_LR})
    server = Server(settings, layout, layout.flatten(parameters).to(task.device))
    clients = LocalClients(_engine(engine_name, context, layout, task))
    # Not in the timed rounds, and in a context of its own: the engine's context caches what it knows of its clients.
    checked = workload_context(name)
    planned = [
        planned_work(checked, indices(cohort(task.workload, number)), round_number=number)
        for number in range(task.rounds)
    ]
    ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl", header=plan.ledger_header(run="peers"))
    state = RoundState(server, plan, ledger)

    def one_round(round_number: int, tally: Tally) -> Parameters:
        done = run_round(state, clients, step=round_number).private
        assert done is not None
        assert not done.dropped, done.dropped
        assert math.isclose(done.audio_seconds, planned[round_number].audio_seconds), done.audio_seconds
        tally.merge(planned[round_number])
        return layout.views(server.parameters_P)

    return one_round


@dataclass(frozen=True)
class FixedCohorts(Plan):
    """A plan whose cohorts are the workload's."""

    cohorts: Callable[[int], Indices] = field(kw_only=True)

    def sample(self, step: int, *, attempt: int = 1, row: int | None = None, among: Indices | None = None) -> Indices:
        return self.cohorts(step)


def _engine(name: str, context: ClientContext, layout: Layout, task: Task) -> Engine:
    device, dtype = task.device, task.dtype
    if name == "workers":
        workers = WorkersEngine(context, layout, dtype=dtype)
        deque(workers.train(layout.zeros(), range(8), step=0), maxlen=0)  # all have started
        return workers
    options: dict[str, Any] = {"steps": 10**6, "batch_seconds": task.workload.batch_seconds, "device": device}
    if name == "stacked":
        stacked = context.family.stacking.stacked
        assert stacked is not None
        assert stacked.accelerate is not None
        return StackedEngine(
            context, layout, device=device, dtype=dtype, stacked=stacked.accelerate(stacked, **options)
        )
    assert name == "sequential", name

    def faster(working: Parameters) -> Family[Any, Any]:
        return accelerate_family(context.family, working, settings=context.model, **options)

    return SequentialEngine(context, layout, device=device, dtype=dtype, faster=faster)


def main() -> None:
    task, arguments = parse(__doc__)
    plain = {"floor": floor, "loop": loop}
    name = arguments.engine
    if name == "auto":  # what a long run would choose
        name = "stacked" if task.device.type == "cuda" else "workers"
    one_round = plain[name](task) if name in plain else rounds(task, arguments.workload, name)
    workers = usable_cores() if name == "workers" else None
    dtype = torch.float32 if name in plain and task.device.type == "cpu" else task.dtype
    turns = Turns(task, processes=workers or 1, threads=1 if workers else None, dtype=dtype)
    tally, round_number = Tally(), 0
    while turns.more:
        turns.wait()
        turns.answer(tally, one_round(round_number, tally))
        round_number += 1


if __name__ == "__main__":
    main()
