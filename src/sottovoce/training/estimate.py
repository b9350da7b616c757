"""What runs will take, before they begin: audio, time on this device, disk, memory, and the ε they end with.

Counts are exact but for who is drawn; times are counted work at a rate that a few steps had here (`speed`): rough.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sottovoce.config import Recipe
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.promise import both
from sottovoce.privacy.settings import Mode
from sottovoce.seeds import torch_stream
from sottovoce.store import Store
from sottovoce.training.assemble import Federation
from sottovoce.training.beforehand import Ready, Stage
from sottovoce.training.context import Surroundings
from sottovoce.training.places import Places
from sottovoce.training.speed import Speed, measure_central, measure_federated, operations
from sottovoce.training.trained_part import trained_part

# Operations that are done in minutes, on a processor within the hour: measuring them first is not worth its seconds.
SHORT = {"cuda": 1e15}
SHORT_ON_CPU = 2e13
CPU = "CPU"
SOME = "a time that was not measured (--estimate does)"
LONG_SECONDS = 24 * 3600.0
# The two newest checkpoints, the best one, and the one that is being written (`checkpoint.prune`).
KEPT_CHECKPOINTS = 4
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

    @property
    def seconds(self) -> float | None:
        return total(cost.seconds for cost in self.costs)

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
        memory = "" if self.memory is None else f", {format_bytes(self.memory)} of memory"
        room = f", {format_bytes(self.free)} are free" if self.disk > self.free / 2 else ""
        what = "takes" if len(self.costs) == 1 else f"{len(self.costs):,} runs one after another take"
        short = self.seconds is None and not any(cost.why for cost in self.costs)
        time_here = SOME if short else _time_here(self.seconds, self.device)
        audio = f"{'at most ' if short else ''}{_told_audio(self.audio_seconds)} to train on"
        first = f"{what} {time_here}: {audio}, {format_bytes(self.disk)} of disk{room}{memory}"
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
    known: Mapping[Path, Ready | None],
    around: Surroundings,
    *,
    above: float | None = None,
) -> Estimate:
    """Count and measure what `stages` will take; `known` is what `make_ready` has found of them.

    They are measured where they take more than `above` operations, short ones not unless it says so; of those that
    differ in nothing that takes time, one is.
    """
    ready = {stage.folder: known.get(stage.folder) for stage in stages}
    most = sum(0.0 if (one := ready[stage.folder]) is None else _operations(stage.recipe, one) for stage in stages)
    measures = most > (SHORT.get(around.device.type, SHORT_ON_CPU) if above is None else above)
    speeds: dict[str, Speed] = {}
    costs = []
    for stage in stages:
        one = ready[stage.folder]
        cost = Cost(name=stage.name, why=f"{stage.name}: its tokens are still to be made, so nothing is measured")
        if one is not None:
            cost = _counted(stage, one)
        if one is not None and measures and not cost.why:
            kind = _kind(stage.recipe)
            if kind not in speeds:
                speeds[kind] = _measured(stage.recipe, one, around)
            cost = _timed(stage.recipe, cost, speeds[kind], around)
        costs.append(cost)
    return Estimate(_device(around.device), tuple(costs), _free(around.runs))


def _counted(stage: Stage, ready: Ready) -> Cost:
    """What is known without measuring."""
    federation = ready.federation
    cost = Cost(name=stage.name, disk=_disk(stage.recipe, ready.start), epsilon=end_epsilon(federation))
    if federation is not None and federation.settings.privacy.mode is Mode.SECURE:
        return replace(cost, why=RELEASE)
    return replace(cost, audio_seconds=_audio_bound(stage.recipe, federation))


def _measured(recipe: Recipe, ready: Ready, around: Surroundings) -> Speed:
    """Of a model like the run's, with numbers."""
    model, generator = ready.start, torch_stream(recipe.seed, "init")
    start = create_recogniser(model.family, model.settings, model.tokens, language=model.language, generator=generator)
    if ready.federation is None:
        return measure_central(recipe, start, around)
    return measure_federated(replace(ready.federation, start=start, part=trained_part(recipe, start)))


def _timed(recipe: Recipe, cost: Cost, speed: Speed, around: Surroundings) -> Cost:
    audio = (recipe.federation or recipe.training).steps * speed.audio_per_step
    data = Places.of(recipe, around.stores)
    scored = _seconds(*data.dev), sum(_seconds(*place) for place in data.tests.values())
    return replace(cost, audio_seconds=audio, seconds=run_seconds(recipe, speed, scored=scored), memory=speed.memory)


def run_seconds(recipe: Recipe, speed: Speed, *, scored: tuple[float, float]) -> float:
    """How long a run takes at `speed`; `scored` are the seconds of dev and test speech.

    A federated run is evaluated before its first round, and tests the model that it started from, too.
    """
    settings, is_federated = recipe.federation or recipe.training, recipe.federation is not None
    dev, tests = scored
    count = evaluations(steps=settings.steps, every=settings.evaluate_every, at_start=is_federated)
    recognised = count * dev + (2 if is_federated else 1) * tests
    return settings.steps * speed.audio_per_step * speed.training + recognised * speed.evaluation


def evaluations(*, steps: int, every: int, at_start: bool) -> int:
    """How often the dev speakers are recognised: every so many steps, after the last, and before the first.

    >>> evaluations(steps=30, every=15, at_start=True), evaluations(steps=31, every=15, at_start=False)
    (3, 3)
    """
    return -(-steps // every) + at_start


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


# Counts.


def _operations(recipe: Recipe, ready: Ready) -> float:
    parameters = sum(p.numel() for p in ready.start.parameters.values())
    return operations(parameters, _audio_bound(recipe, ready.federation))


def _audio_bound(recipe: Recipe, federation: Federation | None) -> float:
    """No more than so many seconds are trained on: what batches hold, or clients have in the mean."""
    if federation is None:
        training = recipe.training
        return training.steps * training.batch_seconds * training.batches_a_step
    settings = federation.settings
    local, clients = settings.local, settings.steps * settings.cohort_size
    if local.local_steps is not None:
        return clients * local.local_steps * local.batch_seconds
    assert local.local_epochs is not None
    return clients * local.local_epochs * float(federation.population.seconds.mean())


def _seconds(store: Store, split: str) -> float:
    users = store.splits[split]
    first, last = (int(store.user_utterances[row]) for row in (users.start, users.stop))
    return float(store.audio_offsets[last] - store.audio_offsets[first]) / SAMPLE_RATE


def _disk(recipe: Recipe, model: Recogniser) -> int:
    """What the run's folder holds at most: float32 parameters, and numbers of the optimiser for each one trained."""
    federation = recipe.federation
    optimiser = (recipe.training if federation is None else federation.server).built_optimiser()
    slots, trained, frozen = len(optimiser.init([torch.zeros(1)]).slots), 0, 0
    if federation is None:
        trained = sum(p.numel() for p in model.parameters.values())
    else:
        part, mechanism = trained_part(recipe, model), federation.privacy.mechanism
        trained, frozen = part.trained_count, part.frozen_count
        slots += (federation.server.ema is not None) + (0 if mechanism is None else mechanism.memory)
    return 4 * (KEPT_CHECKPOINTS * trained * (1 + slots) + frozen)


def end_epsilon(federation: Federation | None) -> Epsilon | None:
    """ε of all the steps that the run sets out to make; None without a guarantee."""
    if federation is None or not federation.settings.privacy.adds_noise:
        return None
    if isinstance(federation.plan.event, NoGuarantee):
        return None
    return federation.settings.whole_run(federation.plan).promise().epsilon


def _free(folder: Path) -> int:
    """Free bytes on the disk where `folder` is, or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def too_long(found: Estimate) -> float | None:
    """How many seconds a CPU would take, where those are days; None where they are not, or there is a GPU."""
    return found.seconds if found.device == CPU and (found.seconds or 0.0) > LONG_SECONDS else None


# In words.


def _told(cost: Cost, device: str) -> str:
    spent = _told_epsilon(cost)
    return f"{_time_here(cost.seconds, device)}, {_told_audio(cost.audio_seconds)}" + (f", {spent}" if spent else "")


def _time_here(seconds: float | None, device: str) -> str:
    return "a time that is not known" if seconds is None else f"about {format_time(seconds)} on this {device}"


def _told_audio(seconds: float | None) -> str:
    return "an unknown amount of audio" if seconds is None else f"{_three(seconds / 3600)} h of audio"


def _told_epsilon(cost: Cost) -> str:
    return "" if cost.epsilon is None else f"ε = {both(cost.epsilon)} at its end"


def format_time(seconds: float) -> str:
    """Two digits that count, in the unit that suits.

    >>> format_time(42), format_time(600), format_time(7200), format_time(1e6)
    ('42 s', '10 min', '2 h', '280 h')
    """
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (math.inf, "h", 3600)):
        if seconds < limit:
            return f"{_two_digits(seconds / size)} {unit}"
    raise AssertionError("no time is infinite")


def format_bytes(size: float) -> str:
    """In decimal units, as disks are sold.

    >>> format_bytes(12_300_000), format_bytes(4_100_000_000)
    ('12 MB', '4.1 GB')
    """
    return f"{_two_digits(size / 1e9)} GB" if size >= 1e9 else f"{_two_digits(size / 1e6)} MB"


def total(values: Iterable[float | None]) -> float | None:
    """Their sum; None where one of them is not known."""
    found = list(values)
    return None if any(value is None for value in found) else sum(value for value in found if value is not None)


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.10g}"


def _three(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.10g}"


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds / 3600, 4)
