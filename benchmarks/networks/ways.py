"""One recipe in several ways: simulated, and served with open sums, with secure ones, and with noise by clients."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from networks.served import Place, round_seconds, same_model, serve, simulate, training_seconds
from sottovoce.config import load_recipe
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus
from sottovoce.privacy.ledger import verify
from sottovoce.training.run_data import build_recipe_population, ensure_store

SERVED: Mapping[str, tuple[str, ...]] = {
    "open": ("--sums", "open"),
    "secure": ("--sums", "secure"),
    "clients": ("--sums", "secure", "--noise", "clients"),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A recipe by name and changes to it, in which ways it is run, and how many clients it then has."""

    recipe: str
    overrides: tuple[str, ...]
    clients: int
    ways: tuple[str, ...]


def _changes(steps: int, cohort: int, every: int, *more: str) -> tuple[str, ...]:
    own = {"steps": steps, "cohort_size": cohort, "server.schedule.total_steps": steps}
    own |= {"evaluate_every": every, "checkpoint_every": every}
    return tuple(f"federation.{key}={value}" for key, value in own.items()) + more


# The people of the demo's crowd who have said most; all of them in every round.
EIGHT = Scene(
    recipe="demo-clipping/global",
    overrides=_changes(12, 8, 3, "federation.clients.min_seconds=104.5"),
    clients=8,
    ways=("open", "secure", "clients"),
)
# The whole crowd in ten silos, as Gao et al. divide their speakers: enough voices to learn from.
SILOS = Scene(
    recipe="demo-clipping/global",
    overrides=_changes(30, 10, 10, "federation.clients={rule: silo, silos: 10}"),
    clients=10,
    ways=("open", "secure", "clients"),
)

# Eight real people, who have the base model already: what of it is trained travels.
PRETRAINED = Scene(
    recipe="benchmark/pretrained-words/no-noise",
    overrides=(
        *("data.store=deployment-words", "data.prepare.hold_out={dev: 4, test: 4, nodes: 8}", "data.train=[nodes]"),
        *("federation.steps=9", "federation.cohort_size=8", "federation.privacy.noise_multiplier=2.0"),
        *("federation.evaluate_every=3", "federation.checkpoint_every=3"),
    ),
    clients=8,
    ways=("open", "secure"),
)


def measure_ways(scene: Scene, folder: Path, *, seeds: Sequence[int]) -> dict[str, Any]:
    """Every way for every seed; those that should must come out the same to the bit."""
    place = settled(scene, folder)
    found: dict[str, Any] = {"recipe": scene.recipe, "overrides": scene.overrides, "runs": {}}
    for seed in seeds:
        simulated = folder / "runs" / f"simulation-{seed}"
        spent = simulate(place, simulated, *_seeded(seed))
        found["runs"][simulated.name] = figures(simulated) | {"processor_seconds": spent}
        for way in scene.ways:
            found["runs"][f"{way}-{seed}"] = measure_served(place, way, seed=seed, simulated=simulated)
        for name, one in found["runs"].items():
            print(name, json.dumps(one), flush=True)
    return found


def _seeded(seed: int) -> tuple[str, ...]:
    """0 is the recipe's own."""
    return () if seed == 0 else (f"seed={seed}",)


def measure_served(place: Place, way: str, *, seed: int, simulated: Path) -> dict[str, Any]:
    """One served run, held against the simulation. Noise by clients is never the same twice."""
    run = simulated.with_name(f"{way}-{seed}")
    costs = serve(place, run, *SERVED[way], more=_seeded(seed))
    taken, trained = round_seconds(run), training_seconds(costs.homes)
    same = same_model(run, simulated)
    if way != "clients" and not same:
        raise SystemExit(f"{run}: another model, or another ledger, than {simulated} has")
    return figures(run) | {
        "same_as_simulation": same,
        "beyond_training_seconds": _quartiles([taken[step] - trained[step] for step in taken if step > 1]),
        "training_seconds": _quartiles([*trained.values()]),
        "round_processor_seconds": {"server": costs.server_seconds, "node": costs.node_seconds},
        "bytes_up": costs.bytes_up,
        "bytes_down": costs.bytes_down,
    }


def settled(scene: Scene, folder: Path) -> Place:
    """Stores and keys for the clients that a simulation of the same recipe has."""
    recipe = load_recipe(scene.recipe, list(scene.overrides))
    ensure_store(recipe, folder / "stores", lambda _: None)
    crowd = folder / "stores" / recipe.data.store
    store = Store(crowd)
    population = build_recipe_population(recipe, store, recipe.federated.clients.population(recipe.data))
    if len(population) != scene.clients:
        raise SystemExit(f"{scene.recipe}: {len(population)} clients, expected {scene.clients}")
    people = tuple(client.id for client in population)
    own = dict.fromkeys(people, crowd)
    if recipe.federated.clients.rule == "silo":
        for client in population:
            own[client.id] = folder / "stores" / client.id
            if not own[client.id].exists():
                _pack_some(store, client.speakers.tolist(), own[client.id])
    place = Place(
        folder=folder, recipe=scene.recipe, overrides=scene.overrides, people=people, store_of=own.__getitem__
    )
    place.settle()
    return place


def _pack_some(store: Store, rows: list[int], out: Path) -> None:
    """A store of some of `store`'s speakers: what a silo of them holds."""
    speakers = []
    for user in map(store.user, rows):
        spoken = [
            RenderedUtterance(
                id=one.id, samples=one.samples, text=one.text, raw_text=one.raw_text, metadata=one.metadata
            )
            for one in map(store.utterance, user.utterances)
        ]
        speakers.append(RenderedSpeaker(user.name, user.split, spoken, user.metadata, in_time=user.in_time))
    speakers.sort(key=lambda one: (one.split, one.name))
    pack_corpus(Corpus(store.name, store.language, speakers, _as_it_is, ProblemLog()), out, workers=1)


def _as_it_is(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


def figures(run: Path) -> dict[str, Any]:
    """What a finished run's folder says."""
    results = json.loads((run / "results.json").read_text())
    tested = next(iter(results["test"].values()))
    before = next(iter(results["start"]["test"].values()))
    spent = verify(run / "ledger.jsonl").epsilon
    return {
        "wer": tested["wer"],
        "wer_interval": tested["wer_interval"],
        "wer_before": before["wer"],
        "epsilon_pld": spent.pld,
        "epsilon_rdp": spent.rdp,
        "round_seconds": _quartiles([*round_seconds(run).values()]),
        "round_seconds_range": [min(round_seconds(run).values()), max(round_seconds(run).values())],
        "communication": results["communication"],
        "load": os.getloadavg()[0],
    }


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high}
