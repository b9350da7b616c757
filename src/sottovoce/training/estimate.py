"""What runs will take: audio, time on this device, disk, and the ε they end with, by arithmetic.

Time is counted operations at a share of the speed at which this device multiplies matrices, to a factor of a few: small
models, reading and attention search take longer. The progress bar shows a run's own rate.
"""

import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sottovoce.config import CentralSteps, Recipe
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.loading import Speech
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.guarantee import format_epsilons
from sottovoce.training.assemble import Federation
from sottovoce.training.preflight import CheckedStage, Stage
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import RunData, Split, count_central_steps, list_split_rows
from sottovoce.training.start_model import split_trained_part

FRAMES_PER_SECOND = 100 / 3  # of a model, after its front end
FORWARD, TRAINING = 2, 6  # operations for each parameter and frame, the backward pass included in training
UTILISATION = 0.3  # of the speed of large matrix products, in training
LONG_SECONDS = 24 * 3600.0
KEPT_CHECKPOINTS = 4  # the two newest, the best one, and the one that is being written (`prune_checkpoints`)
CPU = "CPU"
RELEASE = "time and audio of a release are not estimated: they depend on its clients' speech"


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What one run will take. None is what cannot be estimated; `why` says why.

    Audio is the most that it trains on, every repetition counted. ε is at the end of the whole plan; None without a
    guarantee.
    """

    name: str
    audio_seconds: float | None = None
    seconds: float | None = None
    disk: int = 0
    epsilon: Epsilon | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        spent = None if self.epsilon is None else {"rdp": self.epsilon.rdp, "pld": self.epsilon.pld}
        found = {"name": self.name, "audio_hours": _hours(self.audio_seconds), "hours": _hours(self.seconds)}
        return {**found, "disk_bytes": self.disk, "epsilon": spent, "why": self.why}

    @property
    def guarantee(self) -> str:
        return "" if self.epsilon is None else f"ε = {format_epsilons(self.epsilon)} at its end"


@dataclass(frozen=True)
class Estimate:
    """What all of the runs will take, one after another, on a device. `free` are bytes where runs are written."""

    device: str
    costs: tuple[RunCost, ...]
    free: int

    @property
    def seconds(self) -> float | None:
        return sum_known(cost.seconds for cost in self.costs)

    @property
    def audio_seconds(self) -> float | None:
        return sum_known(cost.audio_seconds for cost in self.costs)

    @property
    def disk(self) -> int:
        return sum(cost.disk for cost in self.costs)

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "audio_hours": _hours(self.audio_seconds),
            "hours": _hours(self.seconds),
            "disk_bytes": self.disk,
            "disk_free_bytes": self.free,
            "runs": [cost.as_json() for cost in self.costs],
        }

    def lines(self) -> list[str]:
        """The sum first, then one line for each run where they are several."""
        reasons = dict.fromkeys(cost.why for cost in self.costs if cost.why)
        what = "takes" if len(self.costs) == 1 else f"{len(self.costs):,} runs one after another take"
        audio = f"{_format_audio(self.audio_seconds)} to train on"
        free = f", {format_bytes(self.free)} are free" if self.disk > self.free / 2 else ""
        first = f"{what} {self._duration(self.seconds)}: {audio}, {format_bytes(self.disk)} of disk{free}"
        if len(self.costs) == 1:
            return [first, *filter(None, [self.costs[0].guarantee]), *reasons]
        alike: dict[str, list[str]] = {}
        for cost in self.costs if self.seconds is not None else ():
            parts = (self._duration(cost.seconds), _format_audio(cost.audio_seconds), cost.guarantee)
            alike.setdefault(", ".join(filter(None, parts)), []).append(cost.name)
        more = {words: f" and {len(names) - 1:,} more, each" if names[1:] else "" for words, names in alike.items()}
        return [first, *(f"{names[0]}{more[words]}: {words}" for words, names in alike.items()), *reasons]

    def _duration(self, seconds: float | None) -> str:
        return "a time that is not known" if seconds is None else f"about {format_time(seconds)} on this {self.device}"


def estimate_runs(stages: Sequence[Stage], known: Mapping[Path, CheckedStage | None], context: RunContext) -> Estimate:
    """Count what `stages` will take; `known` is what `check_stages` has found of them."""
    speed = UTILISATION * measure_device_speed(context.device)
    costs = []
    for stage in stages:
        checked = known.get(stage.folder)
        if checked is None:
            why = f"{stage.name}: its tokens are still to be made, so nothing is estimated"
            costs.append(RunCost(name=stage.name, why=why))
        else:
            costs.append(_count_run(stage, checked, context, speed=speed))
    device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else CPU
    return Estimate(device, tuple(costs), _count_free_bytes(context.runs))


def measure_device_speed(device: torch.device) -> float:
    """Floating-point operations per second of a large matrix product: bfloat16 on a GPU, float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])  # the first one loads libraries
    begun = time.perf_counter()
    float((matrix @ matrix @ matrix @ matrix)[0, 0])
    return 3 * 2 * size**3 / max(time.perf_counter() - begun, 1e-9)


def seconds_too_long(found: Estimate) -> float | None:
    """How many seconds a CPU would take, where those are days; None where they are not, or there is a GPU."""
    return found.seconds if found.device == CPU and (found.seconds or 0.0) > LONG_SECONDS else None


def _count_run(stage: Stage, checked: CheckedStage, context: RunContext, *, speed: float) -> RunCost:
    recipe, federation = stage.recipe, checked.federation
    disk, epsilon = _count_disk_bytes(recipe, checked.start), compute_end_epsilon(federation)
    if federation is not None and federation.is_release:
        return RunCost(name=stage.name, disk=disk, epsilon=epsilon, why=RELEASE)
    data, audio = RunData.of(recipe, context.stores), _bound_audio(recipe, checked)
    recognised = count_recognised_seconds(
        recipe, speech=checked.speech, dev=_sum_seconds(data.dev), tests=_sum_seconds(*data.tests.values())
    )
    parameters = sum(p.numel() for p in checked.start.parameters.values())
    seconds = count_operations(parameters, audio, recognised) / speed
    return RunCost(name=stage.name, disk=disk, epsilon=epsilon, audio_seconds=audio, seconds=seconds)


def count_operations(parameters: int, trained_seconds: float, recognised_seconds: float = 0.0) -> float:
    """Floating-point operations of training on, and recognising, so much audio, to a factor of two or so."""
    return parameters * FRAMES_PER_SECOND * (TRAINING * trained_seconds + FORWARD * recognised_seconds)


def count_recognised_seconds(recipe: Recipe, *, dev: float, tests: float, speech: Speech | None = None) -> float:
    """Seconds of speech that a run recognises, of so many in its dev and test sets.

    A federated run is evaluated before its first round, and tests the model that it started from, too. Of `speech` are
    the steps of central training by epochs.
    """
    is_federated = recipe.federation is not None
    settings = recipe.federation or _count_steps(recipe, speech)
    evaluations = -(-settings.steps // settings.evaluate_every) + is_federated
    return evaluations * dev + (2 if is_federated else 1) * tests


def _sum_seconds(*splits: Split) -> float:
    """Of all speech in `splits`."""
    samples = 0
    for store, split in splits:
        rows = list_split_rows(store, split)
        samples += int((store.audio_offsets[rows + 1] - store.audio_offsets[rows]).sum())
    return samples / SAMPLE_RATE


def _count_steps(recipe: Recipe, speech: Speech | None) -> CentralSteps:
    return recipe.training.count_steps(None) if speech is None else count_central_steps(recipe.training, speech)


def _bound_audio(recipe: Recipe, checked: CheckedStage) -> float:
    """The most seconds that are trained on: what epochs or batches hold, or clients have in the mean."""
    federation = checked.federation
    if federation is None:
        training, speech = recipe.training, checked.speech
        if training.epochs is not None and speech is not None:
            return training.epochs * 3600 * speech.hours
        return _count_steps(recipe, speech).steps * training.batch_seconds * training.batches_a_step
    settings = federation.settings
    local, clients = settings.local, settings.steps * settings.cohort_size
    of_server = settings.steps * _bound_pass(federation)
    if local.local_steps is not None:
        return of_server + clients * local.local_steps * local.batch_seconds
    assert local.local_epochs is not None
    return of_server + clients * local.local_epochs * float(federation.population.seconds.mean())


def _bound_pass(federation: Federation) -> float:
    """The same for the server's own training after a round."""
    own, speech = federation.settings.server_pass, federation.public_speech
    if own is None or speech is None:
        return 0.0
    return own.epochs * 3600 * speech.hours if own.epochs is not None else (own.steps or 0) * own.batch_seconds


def _count_disk_bytes(recipe: Recipe, model: Recogniser) -> int:
    """What the run's folder holds at most: float32 parameters, and numbers of the optimiser for each one trained."""
    federation = recipe.federation
    optimiser = (recipe.training if federation is None else federation.server).built_optimiser()
    slots, frozen = len(optimiser.init([torch.zeros(1)]).slots), 0
    trained = sum(p.numel() for p in model.parameters.values())
    if federation is not None:
        part, mechanism = split_trained_part(recipe, model), federation.privacy.mechanism
        trained, frozen = part.trained_count, part.frozen_count
        slots += (federation.server.ema is not None) + (0 if mechanism is None else mechanism.memory)
    return 4 * (KEPT_CHECKPOINTS * trained * (1 + slots) + frozen)


def _count_free_bytes(folder: Path) -> int:
    """Free bytes on the disk where `folder` is, or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def compute_end_epsilon(federation: Federation | None) -> Epsilon | None:
    """ε of all the steps that the run sets out to make; None without a guarantee."""
    if federation is None or not federation.settings.privacy.adds_noise:
        return None
    if isinstance(federation.plan.event, NoGuarantee):
        return None
    return federation.settings.whole_run(federation.plan).guarantee().epsilon


def format_time(seconds: float) -> str:
    """Two significant digits, in the unit that suits.

    >>> format_time(42), format_time(600), format_time(7200), format_time(1e6)
    ('42 s', '10 min', '2 h', '280 h')
    """
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (math.inf, "h", 3600)):
        if seconds < limit:
            return f"{_round_digits(seconds / size, 2)} {unit}"
    raise AssertionError("no time is infinite")


def format_bytes(size: float) -> str:
    """In decimal units, as disks are sold.

    >>> format_bytes(12_300_000), format_bytes(4_100_000_000)
    ('12 MB', '4.1 GB')
    """
    return f"{_round_digits(size / 1e9, 2)} GB" if size >= 1e9 else f"{_round_digits(size / 1e6, 2)} MB"


def _format_audio(seconds: float | None) -> str:
    return "an unknown amount of audio" if seconds is None else f"{_round_digits(seconds / 3600, 3)} h of audio"


def _round_digits(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def sum_known(values: Iterable[float | None]) -> float | None:
    """Their sum; None where one of them is not known."""
    found = list(values)
    return None if any(value is None for value in found) else sum(value for value in found if value is not None)


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds / 3600, 4)
