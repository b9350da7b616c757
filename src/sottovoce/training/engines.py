"""Which engine trains the clients of a run: the recipe's, or the fastest one here."""

import math
import time
from dataclasses import replace
from typing import Any

import torch

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.base.files import read_json, write_json
from sottovoce.base.processes import ALONE, Processes
from sottovoce.base.seeds import derive, stream
from sottovoce.config import FederationSettings, Recipe
from sottovoce.data.population import Population
from sottovoce.federated.bound_estimates import BoundEstimator
from sottovoce.federated.client import ClientContext, SharedSpeech
from sottovoce.federated.client_stream import StreamPositions, stream_schedule
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import (
    Dropped,
    Engine,
    SequentialEngine,
    SharedEngine,
    StackedEngine,
    WorkersEngine,
)
from sottovoce.federated.engines.workers import usable_cores
from sottovoce.federated.ranks import ClientsOverRanks
from sottovoce.models.family import Family, Parameters, accelerate_family, stacking_obstacle
from sottovoce.models.precision import choose_dtype
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode
from sottovoce.training.assemble import Federation
from sottovoce.training.run_folder import ENGINE, RunFolder
from sottovoce.training.start_model import split_trained_part

CLIENTS = "clients"  # what decides their draws
TRIED_CLIENTS = 32
WORTH_WORKERS = 500  # clients trained in a run: worker processes take some seconds to start


def choose_clients(
    federation: Federation, *, run: RunFolder, processes: Processes = ALONE
) -> LocalClients | ClientsOverRanks:
    """The run's clients, here or over ranks; among several processes the first one chooses engine and precision."""
    chosen = processes.broadcast_object(_choose_engine(federation, run) if processes.is_first else {})
    federation = _with_precision(federation, chosen.get("precision", federation.settings.precision))
    engine = build_federation_engine(federation, chosen["engine"], stack_size=chosen.get("stack_size"))
    if isinstance(engine, StackedEngine | SharedEngine) and processes.is_first and "stack_size" not in chosen:
        write_json(run.path / ENGINE, {**chosen, "stack_size": engine.size})  # what fits may be another number tomorrow
    if processes.is_distributed:
        return ClientsOverRanks(engine, processes, seconds=federation.population.seconds)
    return LocalClients(engine)


def build_federation_engine(federation: Federation, name: str, *, stack_size: int | None = None) -> Engine:
    """The engine called `name` for the clients of `federation`."""
    return build_engine(
        name,
        federation.recipe,
        federation.population,
        federation.start,
        federation.plan,
        device=federation.context.device,
        stack_size=stack_size,
        shared_dev=federation.shared_dev,
    )


def _choose_engine(federation: Federation, run: RunFolder) -> dict[str, Any]:
    """Chosen once: another engine or precision rounds differently, and a resumed run would not repeat its bits.

    A release trains clients apart: in a stack, the rounding of one client's numbers depends on who else is in it. Its
    engines are not timed either, since that depends on clients' speech.
    """
    asked: str = federation.settings.engine
    known = run.path / ENGINE
    if known.exists():
        # Runs of earlier versions have none: they computed in float32 on a CPU, whatever its kind.
        before = "bfloat16" if federation.context.device.type == "cuda" else "float32"
        asked_for = federation.settings.precision
        return {"precision": before if asked_for == "auto" else asked_for, **read_json(known)}
    if asked != "auto":
        why: dict[str, Any] = {"why": "the recipe asks for it"}
    elif federation.context.device.type != "cuda":
        asked, why = choose_cpu_engine(federation.settings)
    elif federation.is_release:
        asked, why = "sequential", {"why": "a release trains every client apart from the others"}
    else:
        asked, why = _fastest(federation)
    found = {"engine": asked, "precision": str(_choose_dtype(federation)).removeprefix("torch."), **why}
    write_json(known, found)
    return found


def _choose_dtype(federation: Federation) -> torch.dtype:
    start, device = federation.start, federation.context.device
    return choose_dtype(federation.settings.precision, device, family=start.family, settings=start.settings)


def _with_precision(federation: Federation, precision: str) -> Federation:
    """The same, computed in `precision`, whatever this process would choose."""
    settings = federation.settings.model_copy(update={"precision": precision})
    return replace(federation, recipe=federation.recipe.model_copy(update={"federation": settings}))


def check_engine(name: str, start: Recogniser, device: torch.device) -> None:
    """Refuse an engine that cannot compute on `device`, or cannot train models like `start`."""
    if name == "workers" and device.type != "cpu":
        raise InputError(f"federation.engine=workers: its processes compute on the CPU, not on device={device}")
    if name == "stacked" and (why := stacking_obstacle(start.family, start.settings)) is not None:
        raise InputError(f"federation.engine=stacked: {why}")


def build_engine(
    name: str,
    recipe: Recipe,
    population: Population,
    start: Recogniser,
    plan: Plan,
    *,
    device: torch.device,
    stack_size: int | None = None,
    shared_dev: SharedSpeech | None = None,
    draws: str = CLIENTS,
) -> Engine:
    """The engine called `name`. `draws` names the stream of all that chance decides."""
    settings = recipe.federated
    check_engine(name, start, device)
    clients = build_client_context(recipe, population, start, shared_dev=shared_dev, draws=draws)
    common: dict[str, Any] = {
        "device": device,
        "dtype": choose_dtype(settings.precision, device, family=start.family, settings=start.settings),
    }
    # Every client makes several local steps, so this is the least.
    steps = settings.steps * settings.cohort_size
    if name == "workers":
        del common["device"]
        return WorkersEngine(clients, plan.layout, workers=settings.workers, **common)
    if name in ("stacked", "shared"):
        # The recipe's check refuses this, and a run folder's `engine.json` never says it.
        check_invariant(plan.settings.mode is not Mode.SECURE, "a release in stacks: its clients are trained apart")
        summed = name == "shared" and not plan.bounds_updates and math.isinf(settings.local.clip_gradients)
        stacked = start.family.stacking.shared if summed else start.family.stacking.stacked
        if stacked is not None and stacked.accelerate is not None:
            stacked = stacked.accelerate(
                stacked, steps=steps, batch_seconds=settings.local.batch_seconds, device=device
            )
        common |= {"stacked": stacked, "size": stack_size or settings.stack_size}
    if name == "stacked":
        return StackedEngine(clients, plan.layout, **common)

    def faster(working: Parameters) -> Family[Any, Any]:
        return accelerate_family(
            start.family,
            None if clients.frozen.tensors else working,
            settings=start.settings,
            steps=steps,
            batch_seconds=settings.local.batch_seconds,
            device=device,
        )

    if name == "shared":
        return SharedEngine(clients, plan.layout, summed=summed, faster=faster, **common)
    return SequentialEngine(clients, plan.layout, faster=faster, **common)


def build_client_context(
    recipe: Recipe,
    population: Population,
    start: Recogniser,
    *,
    shared_dev: SharedSpeech | None = None,
    draws: str = CLIENTS,
) -> ClientContext:
    """What clients' training is made of."""
    settings = recipe.federated
    return ClientContext(
        population,
        start.tokens,
        start.family,
        start.settings,
        settings.local,
        seed=derive(recipe.seed, draws),
        cohort_size=settings.cohort_size,
        longest_seconds=recipe.data.longest_seconds,
        frozen=split_trained_part(recipe, start).frozen,
        forgiving=settings.privacy.mode is Mode.SECURE,
        weighting=settings.privacy.weighting,
        shared_dev=shared_dev,
    )


def build_turns(federation: Federation) -> StreamPositions | None:
    """All clients at the beginning of their time lines; None where they have none.

    With noise it is not known how much they have: who is drawn and when a run ends must not depend on it.
    """
    line, population = federation.settings.local.time_line, federation.population
    if line is None:
        return None
    if federation.plan.settings.z > 0:
        return StreamPositions(len(population))
    clients = build_client_context(federation.recipe, population, federation.start)
    return StreamPositions(len(population), schedule=stream_schedule(clients), skips=line.dry == "skip")


def build_bound_estimator(federation: Federation) -> BoundEstimator | None:
    """What estimates the terms of the convergence bound as the run goes; None where nobody asks for it."""
    settings = federation.settings.estimate_bound
    if settings is None:
        return None
    check_invariant(not federation.is_release, "a release with estimates from single clients' gradients")
    check_invariant(federation.remote is None, "gradients of clients on other machines")
    clients = build_client_context(federation.recipe, federation.population, federation.start)
    return BoundEstimator(settings, clients, federation.plan.clipper.layers, device=federation.context.device)


def guess_fastest_engine(federation: Federation) -> str:
    """The recipe's engine, or the one that is mostly the fastest here: nothing is tried, and nothing written down."""
    settings, start = federation.settings, federation.start
    if settings.engine != "auto":
        return settings.engine
    if federation.context.device.type != "cuda":
        return choose_cpu_engine(settings)[0]
    apart = settings.privacy.mode is Mode.SECURE or stacking_obstacle(start.family, start.settings) is not None
    return "sequential" if apart else "stacked"


def choose_cpu_engine(settings: FederationSettings) -> tuple[str, dict[str, Any]]:
    """Worker processes, where there is enough to do to keep them all busy and to earn back their start."""
    cores = settings.workers or usable_cores()
    clients = settings.steps * settings.cohort_size
    if cores > 1 and settings.cohort_size >= 2 * cores and clients >= WORTH_WORKERS:
        return "workers", {"why": f"{cores} cores, and two clients or more a round for each"}
    return "sequential", {"why": "too few cores or clients for worker processes; stacking gains nothing on a CPU"}


def _fastest(federation: Federation) -> tuple[str, dict[str, Any]]:
    """Train a few clients with each engine and throw the updates away: nothing is released, nothing is spent."""
    device, start = federation.context.device, federation.start
    server_P = federation.server().parameters_P
    order = stream(derive(federation.recipe.seed, "clients"), "engine trial").permutation(len(federation.population))
    clients = sorted(order[:TRIED_CLIENTS].tolist())
    rates: dict[str, float] = {}
    for name in ("sequential", "stacked"):
        if name == "stacked" and stacking_obstacle(start.family, start.settings) is not None:
            continue
        engine = build_federation_engine(federation, name)
        # The first pass compiles.
        for repeat in range(2):
            torch.cuda.synchronize(device)
            begun = time.perf_counter()
            trained = engine.train(server_P, clients, step=repeat)
            audio = sum(0.0 if isinstance(found, Dropped) else found.audio_seconds for found in trained)
            torch.cuda.synchronize(device)
            rates[name] = audio / (time.perf_counter() - begun)
        del engine
        torch.cuda.empty_cache()
    best = max(rates, key=lambda name: rates[name])
    return best, {
        "why": "the faster of the two here",
        "audio_seconds_per_second": {name: round(rate, 1) for name, rate in rates.items()},
    }
