"""Which engine trains the clients of a run: the recipe's, or the fastest one here."""

import json
import time
from typing import Any

import torch

from sottovoce.config import Recipe
from sottovoce.federated.client import ClientRoom
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, StackedEngine
from sottovoce.files import write_json
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.seeds import derive, stream
from sottovoce.training.computing import many_models, one_model, precision
from sottovoce.training.run_folder import RunFolder
from sottovoce.users.population import Population

ENGINE = "engine.json"
TRIED_CLIENTS = 32


def choose_engine(
    recipe: Recipe, population: Population, start: Recogniser, plan: Plan, *, run: RunFolder, device: torch.device
) -> Engine:
    """The run's engine. Once chosen it stays: another would round differently, and a resumed run repeat other bits."""
    asked = recipe.federated.engine
    known = run.path / ENGINE
    if known.exists():
        chosen: str = json.loads(known.read_text(encoding="utf-8"))["engine"]
        return build_engine(chosen, recipe, population, start, plan, device=device)
    if asked != "auto":
        why: dict[str, Any] = {"why": "the recipe asks for it"}
    elif device.type != "cuda":
        asked, why = "sequential", {"why": "stacking gains nothing on a CPU"}
    else:
        asked, why = _fastest(recipe, population, start, plan, device=device)
    write_json(known, {"engine": asked, **why})
    return build_engine(asked, recipe, population, start, plan, device=device)


def build_engine(
    name: str, recipe: Recipe, population: Population, start: Recogniser, plan: Plan, *, device: torch.device
) -> Engine:
    """The engine called `name`."""
    settings = recipe.federated
    room = ClientRoom(
        population,
        start.tokens,
        start.settings,
        settings.local,
        seed=derive(recipe.seed, "clients"),
        cohort_size=settings.cohort_size,
        longest_seconds=recipe.data.longest_seconds,
    )
    common: dict[str, Any] = {
        "device": device,
        "dtype": precision(settings.precision, device),
        "weighting": settings.privacy.weighting,
    }
    # Every client makes several local steps, so this is the least.
    steps = settings.steps * settings.cohort_size
    if name == "stacked":
        compute = many_models(steps=steps, device=device)
        return StackedEngine(room, plan.layout, compute=compute, size=settings.stack_size, **common)
    engine = SequentialEngine(room, plan.layout, **common)
    engine.compute = one_model(
        engine.weights.working,
        settings=start.settings,
        steps=steps,
        batch_seconds=settings.local.batch_seconds,
        device=device,
    )
    return engine


def _fastest(
    recipe: Recipe, population: Population, start: Recogniser, plan: Plan, *, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """Train a few clients with each engine and throw the updates away: nothing is released, nothing is spent."""
    server_P = plan.layout.flatten(start.parameters).to(device)
    order = stream(derive(recipe.seed, "clients"), "engine trial").permutation(len(population))
    clients = sorted(order[:TRIED_CLIENTS].tolist())
    rates: dict[str, float] = {}
    for name in ("sequential", "stacked"):
        engine = build_engine(name, recipe, population, start, plan, device=device)
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
