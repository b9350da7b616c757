"""Seconds and memory of a round as its cohort grows: whole rounds, with sampling, ledger, noise and the server's step.

On a CPU the smallest model that trains, so that a round of 50,000 takes minutes; on a GPU stacks of `tiny`.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growth_of.setting import MIB, SEED, Speech, describe_machine, make_context, resident_mib, spent
from sottovoce.base.seeds import torch_stream
from sottovoce.federated.client import ClientContext
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, StackedEngine
from sottovoce.federated.engines.engine import InProcessEngine, JointlyTrained, Trained
from sottovoce.federated.feature_cache import FeatureCache, SizedCache
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.precision import choose_dtype
from sottovoce.models.transformer.settings import Settings, named_settings
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings, Sampling

COHORTS = (64, 512, 4_096, 50_000)
REPEATED_BELOW, REPEATS = 10_000, 3
POINTS = 10  # at which the memory of the largest round is looked at
SPARE = 1.1  # users for each client of the largest cohort
STACK = 64


class WatchedEngine(Engine):
    """Trains as `engine` does, and looks at the memory after every `every` clients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.every, self.seen = 0, 0
        self.points: list[dict[str, float]] = []

    def close(self) -> None:
        self._engine.close()

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | JointlyTrained | Dropped]:
        self.seen = 0
        for trained in self._engine.train(server_P, cohort, step=step, positions=positions):
            assert not isinstance(trained, Dropped), trained
            yield trained
            before, self.seen = self.seen, self.seen + len(trained.clients)
            if self.every and self.seen // self.every > before // self.every:
                self.points.append({"clients": self.seen, **_memory()})
        self.waited = self._engine.waited


def _memory() -> dict[str, float]:
    resident = resident_mib()
    return {"own_mib": round(resident.own, 1), "mapped_mib": round(resident.mapped, 1)}


def measure(
    cohorts: Sequence[int], *, engine: str, device: torch.device, seconds: float, steps: int = 1, caches: bool = True
) -> dict[str, Any]:
    """Rounds of each of `cohorts`, the smallest first, by one engine of one process.

    Without `caches` nothing is kept of a client's speech after its turn.
    """
    on_gpu = device.type == "cuda"
    model = (
        named_settings("tiny", tokens=11, dropout=0.0, layer_drop=0.0)
        if on_gpu
        else Settings(tokens=11, layers=1, width=8, heads=2, dropout=0.0, layer_drop=0.0)
    )
    speech = Speech(users=int(SPARE * max(cohorts)), seconds=seconds * steps, utterances=steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = make_context(folder / "store", speech, model, batch_seconds=seconds, local_steps=steps)
        parameters = context.family.init(model, generator=torch_stream(SEED, "init"))
        layout = Layout.of(parameters)
        if not caches:
            context = replace(context, _known=SizedCache(0))
        own = _engine(engine, context, layout, device)
        if not caches:
            own._cache = FeatureCache(0)
        watched = WatchedEngine(own)
        start_P = layout.flatten(parameters).to(device)
        found: dict[str, Any] = {
            "machine": describe_machine(device),
            "engine": engine,
            "parameters": layout.dimension,
            "audio_seconds": seconds * steps,
            "local_steps": steps,
            "rounds": [],
        }
        for cohort in sorted(cohorts):
            if cohort == max(cohorts):
                watched.every = max(1, cohort // POINTS)
            state = _round_state(layout, start_P, context, cohort=cohort, ledger=folder / f"{cohort}.jsonl")
            repeats = REPEATS if cohort < REPEATED_BELOW else 1
            times = []
            for step in range(repeats + (cohort == min(cohorts))):  # the very first makes everything ready
                times.append(spent(lambda state=state, step=step: _one(state, watched, step), device))  # type: ignore[misc]
                watched.every = 0
            found["rounds"].append(_row(cohort, times[-repeats:], device))
            print(found["rounds"][-1], flush=True)
        return found | {"points": watched.points}


def _one(state: RoundState, engine: Engine, step: int) -> None:
    done = run_round(state, LocalClients(engine), step=step)
    assert done.private is not None
    done.private.as_json(state.plan)


def _row(cohort: int, times: list[float], device: torch.device) -> dict[str, float]:
    row = {"clients": cohort, "seconds": statistics.median(times), "spread": max(times) - min(times), **_memory()}
    if device.type == "cuda":
        row["device_mib"] = torch.cuda.max_memory_allocated(device) / MIB
    return {name: value if name == "clients" else round(value, 4) for name, value in row.items()}


def _engine(name: str, context: ClientContext, layout: Layout, device: torch.device) -> InProcessEngine:
    dtype = choose_dtype("auto", device, family=context.family, settings=context.model)
    if name == "stacked":
        return StackedEngine(context, layout, device=device, dtype=dtype, size=STACK)
    return SequentialEngine(context, layout, device=device, dtype=dtype)


def _round_state(layout: Layout, start_P: Tensor, context: ClientContext, *, cohort: int, ledger: Path) -> RoundState:
    settings = PrivacySettings(
        population_size=len(context.population),
        privacy_unit="speaker",
        cohort_size=cohort,
        sampling=Sampling.FIXED_SIZE,
        clip_bound=0.1,
        noise_multiplier=1.0,
        delta=1e-6,
        root_seed=SEED,
    )
    plan = Plan(settings, layout)
    server = ServerSettings(optimiser={"name": "lamb"}, schedule={"name": "constant", "lr": 1e-9})
    return RoundState(
        Server(server, layout, start_P.clone()), plan, Ledger(ledger, header=plan.ledger_header(run="growth"))
    )
