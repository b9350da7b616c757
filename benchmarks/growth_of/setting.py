"""What the measurements share: a store of noise, a context of clients, times and memory."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.client import ClientContext, LocalTraining
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings

SEED, MIB = 1, 2**20
LETTERS = CharacterTokens("abcdefghij")
NOISE = stream(SEED, "noise").integers(-3000, 3000, size=60 * SAMPLE_RATE).astype(np.int16)


@dataclass(frozen=True, kw_only=True)
class Speech:
    """What each user has said: noise, whose arithmetic is that of speech."""

    users: int
    seconds: float
    utterances: int = 1
    letters: int = 3  # of each utterance


def noise_user(number: int, *, speech: Speech) -> RenderedSpeaker:
    name, rng = f"user-{number:08}", stream(SEED, "user", number)
    length = int(speech.seconds * SAMPLE_RATE / speech.utterances)
    spoken = []
    for each in range(speech.utterances):
        begin = int(rng.integers(0, len(NOISE) - length))
        text = "".join(rng.choice(list(LETTERS.characters), size=speech.letters))
        samples = NOISE[begin : begin + length]
        spoken.append(RenderedUtterance(id=f"{name}-{each}", samples=samples, text=text, raw_text=text))
    return RenderedSpeaker(name=name, split="train", utterances=spoken)


def make_context(
    folder: Path, speech: Speech, model: Settings, *, batch_seconds: float, local_steps: int = 1
) -> ClientContext:
    corpus = Corpus("noise", "en", range(speech.users), partial(noise_user, speech=speech), ProblemLog())
    pack_corpus(corpus, folder, workers=1)
    return ClientContext(
        build_population(Store(folder), PopulationSettings(split="train"), seed=SEED),
        LETTERS,
        FAMILY,
        model,
        LocalTraining(batch_seconds=batch_seconds, lr=0.01, local_steps=local_steps, spec_augment=None),
        seed=SEED,
        cohort_size=speech.users,
    )


@dataclass(frozen=True)
class Resident:
    """Pages of this process: its own, and those of mapped files, which the kernel takes back when it needs them."""

    own: float
    mapped: float


def resident_mib() -> Resident:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (float(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return Resident(own, mapped)


def peak_mib() -> float:
    """The most that this process has ever had resident."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines["VmHWM"].split()[0]) / 1024


def spent(work: Callable[[], Any], device: torch.device) -> float:
    """Processor seconds of this process on the CPU; on a GPU seconds by the clock, with the device at rest."""
    if device.type == "cpu":
        begun = time.process_time()
        work()
        return time.process_time() - begun
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def describe_machine(device: torch.device) -> str:
    """Where it was measured, in words."""
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"one thread of {os.cpu_count()} cores ({platform.machine()}), processor time, torch {torch.__version__}"
