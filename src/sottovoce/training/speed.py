"""How fast this device trains and recognises for a recipe: a few of its own steps, timed. Nothing is written or spent.

A rough figure: other work on the machine, compiling and a trained model's longer transcripts change it.
"""

import gc
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from sottovoce.config import Recipe
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.errors import InputError
from sottovoce.evaluation.measures import LOSS, MEASURES
from sottovoce.evaluation.score import select_utterances
from sottovoce.federated.client import plan_client
from sottovoce.federated.cohort import ClientsHere
from sottovoce.models.saved import Recogniser
from sottovoce.models.speech import load_speech
from sottovoce.processes import ALONE
from sottovoce.seeds import derive, stream
from sottovoce.training.assemble import Federation
from sottovoce.training.central import CentralLoop
from sottovoce.training.context import Surroundings
from sottovoce.training.engines import client_room, engine_of, likely_fastest
from sottovoce.training.keeper import Due
from sottovoce.training.places import Places
from sottovoce.training.speakers import training_rows

FRAMES_PER_SECOND = 100 / 3  # a model's, after its front: for counting operations, to a factor
FORWARD, TRAINING = 2, 6  # operations for each parameter and frame, backwards included in training
AFFORDABLE = {"cuda": 3e14, "cpu": 1e11}  # operations that one timed step may take: some seconds
LEAST_SECONDS = 20.0  # of audio in a timed step: utterances must fit
ENOUGH_SECONDS, MOST_STEPS = 6.0, 12  # steps are timed until either is reached
LOOKED_AT_CLIENTS, LOOKED_AT_UTTERANCES = 64, 2_000
RECORDED = Due(record=True, evaluate=False, save=True)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds that training on one second of audio takes, and recognising it; and the most bytes that were in use.

    `audio_per_step` is how many seconds of audio a step or round trains on, in the mean.
    """

    audio_per_step: float
    training: float
    evaluation: float
    memory: int


def operations(parameters: int, audio_seconds: float, *, each: int = TRAINING) -> float:
    """Floating-point operations for so much audio, to a factor of two or so: enough to see whether they are many."""
    return each * parameters * audio_seconds * FRAMES_PER_SECOND


def measure_central(recipe: Recipe, start: Recogniser, context: Surroundings) -> Speed:
    """Time steps of central training from `start`, whose numbers do not matter."""
    settings, data = recipe.training, Places.of(recipe, context.stores)
    batch_seconds = min(settings.batch_seconds, _affordable(start, context.device))
    one = settings.model_copy(update={"batches": None, "batch_seconds": batch_seconds})
    rows = training_rows(recipe, data.store)
    speech = load_speech(
        data.store,
        rows[:: -(-len(rows) // LOOKED_AT_UTTERANCES)],
        start.tokens,
        family=start.family,
        settings=start.settings,
        longest_seconds=min(recipe.data.longest_seconds, batch_seconds),
    )
    loop = CentralLoop(
        recipe.model_copy(update={"central": one}),
        speech=speech,
        dev=data.dev,
        start=start,
        measure=LOSS,
        device=context.device,
        processes=ALONE,
        say=context.say,
    )

    def train(step: int) -> float:
        begun = time.perf_counter()
        loop.step(step)
        (record,) = loop.settle(step + 1, RECORDED)  # which waits for the device
        lasted = record.get("seconds", time.perf_counter() - begun)
        return float(record.get("audio_seconds_per_second", 0.0)) * float(lasted)

    with loop.begun(None):
        rate, audio = _timed(train, steps=settings.steps)
    whole = audio * settings.batch_seconds * settings.batches_a_step / batch_seconds
    return _speed(recipe, start, data, context.device, training=rate, audio_per_step=whole)


def measure_federated(federation: Federation) -> Speed:
    """Time cohorts of `federation`, with fewer clients or local steps where its own would take too long."""
    recipe, settings, device = federation.recipe, federation.settings, federation.context.device
    each = audio_per_client(federation)
    affordable = _affordable(federation.start, device)
    count = max(1, min(settings.cohort_size, int(affordable / max(each, 1e-9))))
    small = federation
    if each > affordable:  # not even one client
        local = replace(settings.local, local_steps=1, local_epochs=None, batch_seconds=LEAST_SECONDS)
        changed = settings.model_copy(update={"local": local})
        small = replace(federation, recipe=recipe.model_copy(update={"federation": changed}))
    order = _some_clients(federation)
    server_P = federation.server().parameters_P

    with closing(ClientsHere(engine_of(small, likely_fastest(federation)))) as clients:

        def train(step: int) -> float:
            cohort = np.sort(np.take(order, range(step * count, (step + 1) * count), mode="wrap"))
            summed = clients.sum(server_P, np.unique(cohort), plan=federation.plan, step=step)
            float(summed.total[0])  # waits for the device
            assert summed.diagnostics is not None
            return summed.diagnostics.audio_seconds

        rate, _ = _timed(train, steps=settings.steps)
    whole = settings.cohort_size * each
    return _speed(recipe, federation.start, federation.data, device, training=rate, audio_per_step=whole)


def audio_per_client(federation: Federation) -> float:
    """Seconds of audio that a client trains on in a round, in the mean over some of them."""
    room = client_room(federation.recipe, federation.population, federation.start)
    found = []
    for index in _some_clients(federation)[:LOOKED_AT_CLIENTS].tolist():
        try:
            planned = plan_client(room, index, step=0)
        except InputError:  # nothing that it could be trained on
            found.append(0.0)
            continue
        found.append(sum(float(planned.speech.lengths[batch.rows].sum()) for batch in planned.batches) / SAMPLE_RATE)
    return sum(found) / len(found)


def _some_clients(federation: Federation) -> np.ndarray:
    return stream(derive(federation.recipe.seed, "clients"), "estimate").permutation(len(federation.population))


def _timed(step: Callable[[int], float], *, steps: int) -> tuple[float, float]:
    """The median of the seconds that a second of audio took, and the mean audio of a step, over a few steps.

    The first one, which reads and compiles, is not counted if there are others.
    """
    rates, audio, begun = [], [], time.perf_counter()
    for number in range(min(steps, MOST_STEPS)):
        started = time.perf_counter()
        audio.append(step(number))
        rates.append((time.perf_counter() - started) / max(audio[-1], 1e-9))
        if number and time.perf_counter() - begun > ENOUGH_SECONDS:
            break
    return statistics.median(rates[1:] or rates), sum(audio) / len(audio)


def _speed(
    recipe: Recipe, start: Recogniser, data: Places, device: torch.device, *, training: float, audio_per_step: float
) -> Speed:
    """With the time that recognising takes, of some dev utterances; where models write no text, of the way
    forwards."""
    evaluation = training * FORWARD / TRAINING
    if start.family.recognition is not None and MEASURES[recipe.measure or "wer"] is not LOSS:
        store, split = data.dev
        rows = select_utterances(store, split=split).rows
        seconds = (store.audio_offsets[rows + 1] - store.audio_offsets[rows]) / SAMPLE_RATE
        some = slice(None, None, max(1, int(seconds.sum() / _affordable(start, device, each=FORWARD))))
        begun = time.perf_counter()
        data.team(ALONE, start, device).recognise(start, store, rows[some])
        evaluation = (time.perf_counter() - begun) / max(float(seconds[some].sum()), 1e-9)
    memory = 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    if device.type == "cuda":
        memory = int(torch.cuda.max_memory_allocated(device))
        gc.collect()
        torch.cuda.empty_cache()  # others may be about to share it
    return Speed(audio_per_step=audio_per_step, training=training, evaluation=evaluation, memory=memory)


def _affordable(start: Recogniser, device: torch.device, *, each: int = TRAINING) -> float:
    """Seconds of audio that a timed step may train on, or recognise."""
    parameters = sum(p.numel() for p in start.parameters.values())
    return max(AFFORDABLE.get(device.type, AFFORDABLE["cpu"]) / operations(parameters, 1.0, each=each), LEAST_SECONDS)
