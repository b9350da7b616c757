"""What runs will take, before they begin: audio, time on this device, disk, memory, and the ε they end with."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sottovoce.config import Recipe
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.models.saved import Recogniser, fresh
from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.promise import both
from sottovoce.privacy.settings import Mode, Sampling
from sottovoce.seeds import torch_stream
from sottovoce.store import Store
from sottovoce.training.beforehand import Stage
from sottovoce.training.measuring import Speed, measure_run, step_seconds
from sottovoce.training.places import Places
from sottovoce.training.privacy_report import other_populations
from sottovoce.training.speakers import population_of
from sottovoce.training.stages import Surroundings, private_plan
from sottovoce.training.trained_part import trained_part
from sottovoce.training.work import (
    checkpoint_bytes,
    evaluations,
    operations,
    saves,
    told_bytes,
    told_time,
    total,
)

# Operations that are done in minutes, on a processor within the hour: measuring them first is not worth its seconds.
SHORT = {"cuda": 1e15}
SHORT_ON_CPU = 2e13
CPU = "CPU"
SOME = "a time that was not measured (--estimate does)"
LONG_SECONDS = 24 * 3600.0
RELEASE = "a release is not measured: how long its clients take depends on their speech"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run will take. None is what is not measured; `why` says why it cannot be.

    Audio is what it trains on, every repetition counted. ε is at the end, of the whole plan, without a guarantee None.
    """

    name: str
    audio_seconds: float | None = None
    seconds: float | None = None
    disk: int = 0
    memory: int | None = None
    epsilon: Epsilon | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        spent = None if self.epsilon is None else {"rdp": self.epsilon.rdp, "pld": self.epsilon.pld}
        found = {"name": self.name, "audio_hours": _hours(self.audio_seconds), "hours": _hours(self.seconds)}
        return {**found, "disk_bytes": self.disk, "memory_bytes": self.memory, "epsilon": spent, "why": self.why}


@dataclass(frozen=True)
class Estimate:
    """What all of the runs will take, one after another, on a device."""

    device: str
    costs: tuple[Cost, ...]
    free: int  # bytes where runs lie
    begun: float = 0.0  # seconds that went by before the first of them

    @property
    def seconds(self) -> float | None:
        return total([self.begun, *(cost.seconds for cost in self.costs)])

    @property
    def audio_seconds(self) -> float | None:
        return total(cost.audio_seconds for cost in self.costs)

    @property
    def disk(self) -> int:
        return sum(cost.disk for cost in self.costs)

    @property
    def memory(self) -> int | None:
        known = [cost.memory for cost in self.costs if cost.memory is not None]
        return max(known, default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "audio_hours": _hours(self.audio_seconds),
            "hours": _hours(self.seconds),
            "disk_bytes": self.disk,
            "disk_free_bytes": self.free,
            "memory_bytes": self.memory,
            "runs": [cost.as_json() for cost in self.costs],
        }

    def lines(self) -> list[str]:
        """For whoever starts the runs: the sum first, then one line for each where they are several."""
        memory = "" if self.memory is None else f", {told_bytes(self.memory)} of memory"
        room = f", {told_bytes(self.free)} are free" if self.disk > self.free / 2 else ""
        what = "takes" if len(self.costs) == 1 else f"{len(self.costs):,} runs one after another take"
        short = self.seconds is None and not any(cost.why for cost in self.costs)
        time_here = SOME if short else _told_time(self.seconds, self.device)
        audio = f"{'at most ' if short else ''}{_told_audio(self.audio_seconds)} to train on"
        first = f"{what} {time_here}: {audio}, {told_bytes(self.disk)} of disk{room}{memory}"
        alone = [words for cost in self.costs if (words := _told_epsilon(cost))] if len(self.costs) == 1 else []
        reasons = dict.fromkeys(cost.why for cost in self.costs if cost.why)
        return [first, *self._each(), *alone, *reasons]

    def _each(self) -> list[str]:
        """A line for each run, or for several of which the same is to be said; none for an only one."""
        alike: dict[str, list[str]] = {}
        for cost in self.costs if len(self.costs) > 1 and self.seconds is not None else ():
            alike.setdefault(_told(cost, self.device), []).append(cost.name)
        more = {words: f" and {len(names) - 1:,} more, each" if names[1:] else "" for words, names in alike.items()}
        return [f"{names[0]}{more[words]}: {words}" for words, names in alike.items()]


def estimate(
    stages: Sequence[Stage],
    models: Mapping[Path, Recogniser | None],
    around: Surroundings,
    *,
    above: float | None = None,
) -> Estimate:
    """Count and measure what `stages` will take; `models` are theirs as far as they are known (`make_ready`).

    They are measured where they take more than so many operations, short ones not unless it says so; of those that
    differ in nothing that takes time, one is.
    """
    begun = time.process_time()  # Python and torch had to be loaded
    most = sum(_operations(stage, models.get(stage.folder), around) for stage in stages)
    measures = most > (SHORT.get(around.device.type, SHORT_ON_CPU) if above is None else above)
    known: dict[str, Speed] = {}
    costs = []
    for stage in stages:
        kind = _kind(stage.recipe)
        cost, speed = _cost(stage, models.get(stage.folder), around, speed=known.get(kind), measures=measures)
        if speed is not None:
            known[kind] = speed
        costs.append(cost)
    return Estimate(_device(around.device), tuple(costs), _free(around.runs), begun)


def _kind(recipe: Recipe) -> str:
    """All that decides how long a run takes: not its seed, its rates, nor how much noise it adds."""
    content = recipe.model_dump(mode="json", exclude={"about", "paper", "seed"})
    for schedule in (content.get("central") or {}, (content.get("federation") or {}).get("server") or {}):
        schedule.pop("schedule", None)
    if recipe.federation is not None:
        private = recipe.federation.privacy
        content["federation"]["seed_model"] = None
        content["federation"]["privacy"] = [private.adds_noise, private.mode, private.weighting]
    return json.dumps(content, sort_keys=True, default=str)


def _cost(
    stage: Stage, model: Recogniser | None, around: Surroundings, *, speed: Speed | None, measures: bool
) -> tuple[Cost, Speed | None]:
    recipe, settings = stage.recipe, stage.recipe.federation
    if model is None:
        return Cost(name=stage.name, why=f"{stage.name}: its tokens are still to be made, so nothing is measured"), None
    begun = time.perf_counter()
    disk, spent = _disk(recipe, model), _epsilon(recipe, model, around)
    accounting = time.perf_counter() - begun
    if settings is not None and settings.privacy.mode is Mode.SECURE:
        return Cost(name=stage.name, disk=disk, epsilon=spent, why=RELEASE), None
    if not measures:
        return Cost(name=stage.name, audio_seconds=_audio_bound(recipe, around), disk=disk, epsilon=spent), None
    if speed is None:
        speed = measure_run(recipe, _with_numbers(recipe, model), around)
    steps = (settings or recipe.training).steps
    return Cost(
        name=stage.name,
        audio_seconds=steps * speed.audio_per_step,
        seconds=accounting + run_seconds(recipe, speed, scored=_scored_seconds(recipe, around)),
        disk=disk,
        memory=speed.memory,
        epsilon=spent,
    ), speed


def run_seconds(recipe: Recipe, speed: Speed, *, scored: tuple[float, float]) -> float:
    """How long a run takes whose parts take as long as `speed` says; `scored` are the seconds of dev and test speech.

    A federated run is evaluated before its first round, and tests the model that it started from, too.
    """
    settings = recipe.federation or recipe.training
    federated = recipe.federation is not None
    dev, tests = scored
    looked = evaluations(steps=settings.steps, every=settings.evaluate_every, at_start=federated)
    saved = saves(
        steps=settings.steps, evaluate_every=settings.evaluate_every, checkpoint_every=settings.checkpoint_every
    )
    heard = looked * dev + (2 if federated else 1) * tests
    return speed.begin + speed.first + settings.steps * speed.step + heard * speed.evaluation + saved * speed.save


def _with_numbers(recipe: Recipe, model: Recogniser) -> Recogniser:
    """A model like `model`, which has shapes alone."""
    generator = torch_stream(recipe.seed, "init")
    return fresh(model.family, model.settings, model.tokens, language=model.language, generator=generator)


def _operations(stage: Stage, model: Recogniser | None, around: Surroundings) -> float:
    return 0.0 if model is None else operations(_parameters(model), _audio_bound(stage.recipe, around))


def _audio_bound(recipe: Recipe, around: Surroundings) -> float:
    """No more than so many seconds are trained on: what batches hold, or clients have in the mean."""
    if recipe.federation is None:
        return recipe.training.steps * step_seconds(recipe.training)
    local = recipe.federation.local
    clients = recipe.federation.steps * recipe.federation.cohort_size
    if local.local_steps is not None:
        return clients * local.local_steps * local.batch_seconds
    store = Places.of(recipe, around.stores).store
    population = population_of(recipe, store, recipe.federation.clients.population(recipe.data))
    assert local.local_epochs is not None
    return clients * local.local_epochs * float(population.seconds.mean())


def _scored_seconds(recipe: Recipe, around: Surroundings) -> tuple[float, float]:
    """Seconds of audio of the dev set, and of all test sets."""
    places = Places.of(recipe, around.stores)
    return _seconds(*places.dev), sum(_seconds(*place) for place in places.tests.values())


def _seconds(store: Store, split: str) -> float:
    users = store.splits[split]
    first, last = (int(store.user_utterances[row]) for row in (users.start, users.stop))
    return float(store.audio_offsets[last] - store.audio_offsets[first]) / SAMPLE_RATE


def _disk(recipe: Recipe, model: Recogniser) -> int:
    federation = recipe.federation
    optimiser = (recipe.training if federation is None else federation.server).built_optimiser()
    slots = len(optimiser.init([torch.zeros(1)]).slots)
    if federation is None:
        return checkpoint_bytes(_parameters(model), slots=slots)
    part, averages = trained_part(recipe, model), federation.server.ema is not None
    correlated = 0 if federation.privacy.mechanism is None else federation.privacy.mechanism.memory
    return checkpoint_bytes(part.trained_count, slots=slots + averages + correlated, frozen=part.frozen_count)


def _epsilon(recipe: Recipe, model: Recogniser, around: Surroundings) -> Epsilon | None:
    """ε of all the steps that the run sets out to make; None without a guarantee."""
    if recipe.federation is None or not recipe.federation.privacy.adds_noise:
        return None
    settings, places = recipe.federation, Places.of(recipe, around.stores)
    population = population_of(recipe, places.store, settings.clients.population(recipe.data))
    plan = private_plan(recipe, population, model, seed=None, around=around)
    if isinstance(plan.event, NoGuarantee):
        return None
    promised = settings.whole_run(plan).promise()
    independent = plan.settings.sampling is Sampling.POISSON and plan.settings.mechanism is None
    if independent and plan.settings.mode is Mode.SEEDED:
        other_populations(settings, plan, promised)  # as the run will do at its end
    return promised.epsilon


def _free(folder: Path) -> int:
    """Free bytes on the disk where `folder` is, or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def _parameters(model: Recogniser) -> int:
    return sum(p.numel() for p in model.parameters.values())


def too_long(found: Estimate) -> float | None:
    """How many seconds a CPU would take, where those are days; None where they are not, or there is a GPU."""
    return found.seconds if found.device == CPU and (found.seconds or 0.0) > LONG_SECONDS else None


# In words.


def _told(cost: Cost, device: str) -> str:
    spent = _told_epsilon(cost)
    return f"{_told_time(cost.seconds, device)}, {_told_audio(cost.audio_seconds)}" + (f", {spent}" if spent else "")


def _told_time(seconds: float | None, device: str) -> str:
    return "a time that is not known" if seconds is None else f"about {told_time(seconds)} on this {device}"


def _told_audio(seconds: float | None) -> str:
    return "an unknown amount of audio" if seconds is None else f"{_three(seconds / 3600)} h of audio"


def _told_epsilon(cost: Cost) -> str:
    return "" if cost.epsilon is None else f"ε = {both(cost.epsilon)} at its end"


def _three(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.10g}"


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds / 3600, 4)
