"""The recipe once more, with people among its clients who have a secret, and both attacks on what comes of it."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.auditing.canaries import JoinedEngine
from sottovoce.auditing.rounds import audited_plan, make_rounds
from sottovoce.auditing.secret_speech import IN, OUT, TAKES, secret_store
from sottovoce.auditing.speech_attacks import HOW, Exposure, Membership, exposure, exposures, membership, speaker_gain
from sottovoce.config import Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import users_of
from sottovoce.federated.engines import Engine
from sottovoce.federated.server import Server
from sottovoce.models.saved import Recogniser
from sottovoce.seeds import stream
from sottovoce.store import Store
from sottovoce.training.assemble import Federation
from sottovoce.training.engines import build_federation_engine, guess_fastest_engine
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import RunData
from sottovoce.training.simulation import assemble_with_parent
from sottovoce.users import PopulationSettings, build_population

MOST_PEOPLE = 100  # of either kind who are attacked
FEWEST_SECRETS, MOST_SECRETS = 4, 10_000


@dataclass(frozen=True)
class SpeechAudit:
    """What the attacks found. `promised` is the ledger's ε of these rounds; `missing` is what could not be tried."""

    rounds: int
    promised: float
    membership: Membership | None
    exposures: tuple[Exposure, ...]
    missing: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "promised": self.promised if math.isfinite(self.promised) else None,
            "membership": None if self.membership is None else self.membership.as_json(),
            "exposure": [one.as_json() for one in self.exposures],
            "missing": self.missing,
        }


def attack_words(found: Mapping[str, Any]) -> list[str]:
    """What `SpeechAudit.as_json` says, for people."""
    lines = []
    if (known := found["membership"]) is not None:
        low, high = known["interval"]
        tells = "more often than chance" if low > 0.5 else "no better than by chance"
        lines.append(
            f"who took part is told from strangers {tells}: right in {known['auc']:.0%} of pairs "
            f"({low:.0%} to {high:.0%}; guessing 50 %), by how much better the model understands them"
        )
    for one in found["exposure"]:
        low, _ = one["difference_interval"]
        tells = "a part of it is remembered" if low > 0 else "nothing of it is seen to be remembered"
        lines.append(
            f"a secret sentence, {one['how']}: {one['bits_in']:.1f} of {one['most_bits']:.0f} bits for those who took "
            f"part, {one['bits_out']:.1f} for those who did not: {tells}"
        )
    return [*lines, *(f"{what}: not tried: {why}" for what, why in found["missing"].items())]


def audit_speech(
    recipe: Recipe,
    *,
    secrets: int,
    rounds: int,
    seed: int,
    context: RunContext,
    on_round: Callable[[int], None] = lambda _: None,
) -> SpeechAudit:
    """Train `recipe` with half of so many people with `secrets` among its clients, and attack the model."""
    if secrets < FEWEST_SECRETS:
        raise InputError(f"secrets={secrets}: expected {FEWEST_SECRETS} or more")
    found = assemble_with_parent(recipe, context=context)
    server = found.server()
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="sottovoce-secrets-") as folder:
        people: list[tuple[Engine, int]] = [
            (build_federation_engine(found, guess_fastest_engine(found)), len(found.population))
        ]
        store: Store | None = None
        try:
            store = _secrets(found, Path(folder), secrets=secrets, seed=seed)
        except InputError as why:
            missing["exposure"] = str(why)
        if store is not None:
            keepers = build_population(store, PopulationSettings(split=(IN,)), seed=seed)
            engine = build_federation_engine(replace(found, population=keepers, shared_dev=None), "sequential")
            people.append((engine, len(keepers)))
        size = sum(count for _, count in people)
        report = make_rounds(
            audited_plan(found.plan, others=size - found.plan.settings.population_size),
            server=server,
            engine=JoinedEngine(people),
            rounds=rounds,
            has_turns=recipe.federated.local.time_line is not None,
            after_step=found.after_step(),
            model_bits=recipe.federated.model_bits,
            on_round=on_round,
        )
        before, after = _models(found, server)
        told = () if store is None else _exposed(before, after, store, seed=seed)
    members, strangers = _people(found, seed=seed)
    known: Membership | None = None
    if len(strangers) < 2 or len(members) < 2:
        missing["membership"] = "nobody of the same store is left whom training never heard"
    else:
        longest = min(recipe.data.longest_seconds, recipe.federated.local.batch_seconds)
        known = membership(*(_gains(before, after, found.data.store, rows, longest) for rows in (members, strangers)))
    return SpeechAudit(rounds, report.epsilon.headline, known, told, missing)


def _secrets(found: Federation, folder: Path, *, secrets: int, seed: int) -> Store:
    if not found.start.family.texts:
        raise InputError(f"models of family={found.start.family.name} write nothing down: there is nothing to expose")
    return secret_store(folder / "store", count=secrets, language=found.start.language, seed=seed)


def _models(found: Federation, server: Server) -> tuple[Recogniser, Recogniser]:
    """The model that training began with, and the one that it would release."""
    device = server.parameters_P.device
    trained = found.plan.layout.views(server.result_P.clone())
    merged = found.part.frozen.merged({name: value.cpu() for name, value in trained.items()})
    before, after = found.start, replace(found.start, parameters=merged)
    return (before, after) if device.type == "cpu" else (before.to(device), after.to(device))


def _exposed(before: Recogniser, after: Recogniser, store: Store, *, seed: int) -> tuple[Exposure, ...]:
    """Of one take of each; who took part was trained on all of them."""
    found = []
    for how in HOW:
        inside, outside = (
            exposures(before, after, store, np.arange(*_utterances(store, split), TAKES), how=how, seed=seed)
            for split in (IN, OUT)
        )
        found.append(exposure(inside, outside, how=how))
    return tuple(found)


def _utterances(store: Store, split: str) -> tuple[int, int]:
    users = users_of(store, split)
    return int(store.user_utterances[users.start]), int(store.user_utterances[users.stop])


Rows = list[NDArray[np.int64]]


def _people(found: Federation, *, seed: int) -> tuple[Rows, Rows]:
    """Utterances of some who take part, and of some of the same store who were held out from all training."""
    places, rng = found.data, stream(seed, "attacked")
    order = rng.permutation(len(found.population))[:MOST_PEOPLE]
    members = [found.population.client(int(index)).utterances for index in np.sort(order)]
    held_out = sorted({user for store, split in _held_out(places) for user in users_of(store, split)})
    chosen = np.sort(rng.permutation(len(held_out))[:MOST_PEOPLE])
    offsets = places.store.user_utterances
    strangers = [np.arange(offsets[held_out[i]], offsets[held_out[i] + 1]) for i in chosen]
    return members, strangers


def _held_out(places: RunData) -> list[tuple[Store, str]]:
    return [place for place in (places.dev, *places.tests.values()) if place[0].path == places.store.path]


def _gains(before: Recogniser, after: Recogniser, store: Store, people: Rows, longest: float) -> Sequence[float]:
    gains = (speaker_gain(before, after, store, rows, longest_seconds=longest) for rows in people)
    return [gain for gain in gains if gain is not None]
