"""How long a run's own steps take here: a few of them are made in a folder that is thrown away, and timed.

Nothing is released and nothing is spent. A release is not measured: how long clients take depends on their speech.
"""

import gc
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sottovoce.config import Central, Federation, Recipe
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import select
from sottovoce.evaluation.measures import LOSS, Measure
from sottovoce.federated.client import plan_client
from sottovoce.models.saved import Recogniser
from sottovoce.models.speech import load_speech
from sottovoce.privacy.noise import noise_multiplier_of
from sottovoce.processes import ALONE
from sottovoce.seeds import derive, stream
from sottovoce.store import Store
from sottovoce.training import checkpoint
from sottovoce.training.central import CentralLoop
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.engines import choose_clients, client_room, clients_turns, for_cpu
from sottovoce.training.federation import Federating
from sottovoce.training.keeper import Due, Loop, Record
from sottovoce.training.places import Places
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.server_pass import build_server_pass
from sottovoce.training.shared_dev import choose_shared_dev
from sottovoce.training.speakers import population_of, training_rows
from sottovoce.training.stages import Surroundings, choose_measure, private_plan
from sottovoce.training.team import Team
from sottovoce.training.work import FORWARD, TRAINING, operations
from sottovoce.users.population import Population

# Floating-point operations that one measured step, round or evaluation may take: some seconds of a device.
AFFORDABLE = {"cuda": 3e14}
AFFORDABLE_ON_CPU = 1e11
LEAST_SECONDS = 20.0  # of audio in a step: utterances must fit
LOOKED_AT_CLIENTS, LOOKED_AT_UTTERANCES = 64, 2_000
ENOUGH_SECONDS = 6.0  # an evaluation that takes longer is timed once
RECORDED = Due(record=True, evaluate=False, save=True)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a run's parts take here, in seconds, and how much audio one step trains on.

    `begin` is all before the first step, `first` what the first step or round takes longer than others. `evaluation`
    is of one second of audio. `memory` is the most that was in use, in bytes.
    """

    begin: float
    first: float
    step: float
    audio_per_step: float
    evaluation: float
    save: float
    memory: int


def measure_run(recipe: Recipe, start: Recogniser, around: Surroundings) -> Speed:
    """Measure what `recipe` does from a model like `start`, whose numbers do not matter."""
    on_gpu = _is_gpu(around)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(around.device)
    with tempfile.TemporaryDirectory(prefix="sottovoce-estimate-") as place:
        measure = _measure_central if recipe.federation is None else _measure_federated
        found = measure(recipe, start, around, Path(place))
    if on_gpu:  # others may be about to share it
        gc.collect()
        torch.cuda.empty_cache()
    return found


def affordable_seconds(parameters: int, device: torch.device, *, each: int = TRAINING) -> float:
    """Seconds of audio that a measured step may train on, or recognise."""
    return max(AFFORDABLE.get(device.type, AFFORDABLE_ON_CPU) / operations(parameters, 1.0, each=each), LEAST_SECONDS)


# How long steps take.


@dataclass(frozen=True)
class Block:
    """Some steps that were waited for together."""

    steps: int
    seconds: float
    audio: float

    @property
    def each(self) -> float:
        """Seconds of a step, or where it has any, of a second of audio."""
        return self.seconds / (self.audio or self.steps)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How steps are timed: in blocks of so many `steps`, at least `least` of them, and `enough` where they are calm.

    Calm is what takes at most `same` times as long as the fastest. After `patience` seconds it has to do as it is.
    """

    steps: int
    least: int
    enough: int
    same: float
    patience: float

    def ends(self, blocks: Sequence[Block], *, elapsed: float) -> bool:
        """Whether what was measured will do."""
        if len(blocks) < self.least:
            return False
        calm = self.calm(blocks)
        done = len(blocks) >= self.enough and all(block in calm for block in blocks[-2:])
        return done or elapsed > self.patience

    def calm(self, blocks: Sequence[Block]) -> list[Block]:
        limit = self.same * min(block.each for block in blocks)
        return [block for block in blocks if block.each <= limit]

    def steady(self, blocks: Sequence[Block]) -> tuple[float, float, float]:
        """What the others take longer than the calm ones, and the seconds and the audio of one calm step.

        Compiling a shape takes a thousand times as long as a step, and nobody knows when the next shape comes.

        >>> CENTRAL_ON_GPU.steady([Block(4, 30.0, 40), Block(4, 1.0, 40), Block(4, 20.0, 40), Block(4, 1.4, 40)])
        (47.6, 0.3, 10.0)
        """
        calm = self.calm(blocks)
        steps = sum(block.steps for block in calm)
        step = sum(block.seconds for block in calm) / steps
        longer = sum(block.seconds - block.steps * step for block in blocks if block not in calm)
        return max(0.0, longer), step, sum(block.audio for block in calm) / steps


# A GPU compiles and records as shapes come. A processor does not: what is slower there is only busier.
CENTRAL_ON_GPU = Timing(steps=4, least=10, enough=10, same=1.5, patience=90.0)
ROUNDS_ON_GPU = Timing(steps=1, least=4, enough=4, same=1.5, patience=90.0)
ON_CPU = Timing(steps=1, least=2, enough=16, same=4.0, patience=6.0)


# Central training.


def step_seconds(settings: Central) -> float:
    """What the batches of a step hold, whatever number of processes shares them."""
    return settings.batch_seconds * settings.batches_a_step


def _measure_central(recipe: Recipe, start: Recogniser, around: Surroundings, place: Path) -> Speed:
    begun = time.perf_counter()
    settings, places = recipe.training, Places.of(recipe, around.stores)
    batch_seconds = min(settings.batch_seconds, affordable_seconds(_size(start), around.device))
    one = settings.model_copy(update={"batches": None, "batch_seconds": batch_seconds})
    small, scale = recipe.model_copy(update={"central": one}), step_seconds(settings) / batch_seconds
    rows = training_rows(recipe, places.store)
    speech = load_speech(
        places.store,
        rows[:: -(-len(rows) // LOOKED_AT_UTTERANCES)],
        start.tokens,
        family=start.family,
        settings=start.settings,
        longest_seconds=min(recipe.data.longest_seconds, batch_seconds),
    )
    measure = choose_measure(recipe, start, places, around)
    common: dict[str, Any] = {"device": around.device, "processes": ALONE, "say": around.say}
    loop = CentralLoop(small, speech=speech, dev=places.dev, start=start, measure=measure, **common)
    begin = time.perf_counter() - begun
    with loop.begun(None):
        first, step, audio = _steps(loop, settings.steps, timing=CENTRAL_ON_GPU if _is_gpu(around) else ON_CPU)
        first = 0.0 if _is_gpu(around) else first  # what was compiled now is on the disk for the run that follows
        return _around_steps(
            loop,
            place,
            places.team(ALONE, start, around.device),
            measure,
            places.dev,
            begin=begin,
            first=first,
            step=step * scale,
            audio=audio * scale,
        )


# Federated training.


def _measure_federated(recipe: Recipe, start: Recogniser, around: Surroundings, place: Path) -> Speed:
    begun = time.perf_counter()
    settings, places = recipe.federated, Places.of(recipe, around.stores)
    population = population_of(recipe, places.store, settings.clients.population(recipe.data))
    per_client = audio_per_client(recipe, population, start)
    affordable = affordable_seconds(_size(start), around.device)
    small = _smaller(recipe, clients=max(1, int(affordable / max(per_client, 1e-9))), device=around.device)
    if per_client > affordable:  # not even one client
        few: dict[str, Any] = {"local_steps": 1, "local_epochs": None, "batch_seconds": LEAST_SECONDS}
        small = _with(small, local=replace(settings.local, **few))
    plan = private_plan(small, population, start, seed=None, around=around)
    measure = choose_measure(recipe, start, places, around)
    run, team = RunFolder(place), places.team(ALONE, start, around.device)
    shared = None if places.shared_dev is None else choose_shared_dev(recipe, places.shared_dev)
    own = places.of_server
    loop = Federating(
        small,
        run,
        start=start,
        plan=plan,
        clients=choose_clients(small, population, start, plan, run=run, device=around.device, shared_dev=shared),
        team=team,
        dev=places.dev,
        tests=places.tests,
        measure=measure,
        inputs="",
        device=around.device,
        server_pass=None if own is None else build_server_pass(small, start, population, own, device=around.device),
        turns=clients_turns(small, population, start, plan),
        say=around.say,
    )
    begin = time.perf_counter() - begun
    with loop.begun(None):
        first, step, audio = _steps(loop, settings.steps, timing=ROUNDS_ON_GPU if _is_gpu(around) else ON_CPU)
        whole = settings.cohort_size * per_client
        return _around_steps(
            loop,
            place,
            team,
            measure,
            places.dev,
            begin=begin,
            first=first,
            step=step * whole / max(audio, 1e-9),
            audio=whole,
        )


def audio_per_client(recipe: Recipe, population: Population, start: Recogniser) -> float:
    """Seconds of audio that a client trains on in a round, in the mean over some of them."""
    room = client_room(recipe, population, start)
    order = stream(derive(recipe.seed, "clients"), "estimate").permutation(len(population))[:LOOKED_AT_CLIENTS]
    found = []
    for index in order.tolist():
        try:
            planned = plan_client(room, index, step=0)
        except InputError:  # nothing that it could be trained on
            found.append(0.0)
            continue
        found.append(sum(float(planned.speech.lengths[batch.rows].sum()) for batch in planned.batches) / SAMPLE_RATE)
    return sum(found) / len(found)


def _smaller(recipe: Recipe, *, clients: int, device: torch.device) -> Recipe:
    """The same with at most so many clients a round, the engine and noise of the whole, no budget, nobody listening."""
    settings = recipe.federated
    engine: Any = settings.engine
    if engine == "auto" and device.type != "cuda":
        engine, _ = for_cpu(settings)
    private: dict[str, Any] = {"epsilon_budget": None}
    if clients < settings.cohort_size and settings.privacy.adds_noise:
        # Another noise multiplier would take longer to account for, and a target have to be looked for.
        sigma, z = settings.privacy.sigma_dp, settings.privacy.noise_multiplier
        whole = z if sigma is None else noise_multiplier_of(sigma, cohort_size=settings.cohort_size)
        private |= {"sigma_dp": None, "target_epsilon": None, "accountant": None, "noise_multiplier": whole or 1.0}
    privacy = replace(settings.privacy, **private)
    cohort = min(clients, settings.cohort_size)
    return _with(recipe, engine=engine, cohort_size=cohort, privacy=privacy, client_wer=None)


def _with(recipe: Recipe, **changes: Any) -> Recipe:
    federation: Federation = recipe.federated.model_copy(update=changes)
    return recipe.model_copy(update={"federation": federation})


# Whatever the loop.


def _steps(loop: Loop, most: int, *, timing: Timing) -> tuple[float, float, float]:
    """What the first steps take longer than others, and of one of the others, the time and the audio."""
    blocks: list[Block] = []
    begun, step = time.perf_counter(), 0
    while step < most and not timing.ends(blocks, elapsed=time.perf_counter() - begun):
        ahead = range(step, min(most, step + timing.steps))
        started = time.perf_counter()
        for one in ahead:
            loop.step(one)
        records = loop.settle(ahead.stop, RECORDED)  # which waits for the device
        seconds = time.perf_counter() - started
        blocks.append(Block(len(ahead), seconds, _audio(records, seconds)))
        step = ahead.stop
    return timing.steady(blocks)


def _audio(records: Sequence[Record], seconds: float) -> float:
    rates = [(record.get("audio_seconds_per_second", 0.0), record.get("seconds", seconds)) for record in records]
    return float(sum(rate * lasted for rate, lasted in rates))


def _around_steps(
    loop: Loop,
    place: Path,
    team: Team,
    measure: Measure,
    dev: tuple[Store, str],
    *,
    begin: float,
    first: float,
    step: float,
    audio: float,
) -> Speed:
    """Time an evaluation and a checkpoint, and put everything together."""
    evaluation = _evaluation(loop, team, measure, dev, training=step / max(audio, 1e-9))
    snapshot = loop.snapshot({})
    save = _timed(
        lambda: checkpoint.save(
            place / "checkpoints", Checkpoint(1, snapshot.model, snapshot.tensors, best=checkpoint.name(1), state={})
        )
    )
    return Speed(
        begin=begin,
        first=first,
        step=step,
        audio_per_step=audio,
        evaluation=evaluation,
        save=save,
        memory=_memory(team.device),
    )


def _evaluation(loop: Loop, team: Team, measure: Measure, dev: tuple[Store, str], *, training: float) -> float:
    """Seconds to recognise and score one second of audio; of `training`, a third is the way forwards."""
    store, split = dev
    users = store.splits[split]
    first, last = int(store.user_utterances[users.start]), int(store.user_utterances[users.stop])
    whole = float(store.audio_offsets[last] - store.audio_offsets[first]) / SAMPLE_RATE
    affordable = affordable_seconds(_size(team.start), team.device, each=FORWARD)
    if whole <= affordable:
        seconds = _timed(loop.evaluate)
        return min(seconds, _timed(loop.evaluate) if seconds < ENOUGH_SECONDS else seconds) / max(whole, 1e-9)
    if measure is LOSS:
        return training / (TRAINING / FORWARD)
    rows = select(store, split=split).rows
    some = rows[:: max(1, int(whole / affordable))]
    heard = float((store.audio_offsets[some + 1] - store.audio_offsets[some]).sum()) / SAMPLE_RATE
    return _timed(lambda: team.recognise(team.start, store, some)) / max(heard, 1e-9)


def _is_gpu(around: Surroundings) -> bool:
    return around.device.type == "cuda"


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _size(model: Recogniser) -> int:
    return sum(p.numel() for p in model.parameters.values())
