"""Seconds and memory as the population grows, and what a round of 204,800 out of 70 million asks of its leader.

The stores have 5 ms of audio for each user: what is measured is their number.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from growth_of.setting import SEED, Speech, describe_machine, noise_user, resident_mib
from sottovoce.base.processes import split_by_load
from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker
from sottovoce.data.population import Population, PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.ledger import Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings

POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
AUDIO_SECONDS, SMALL_COHORT, READ = 0.005, 1_000, 1_000
# The flagship's extrapolation: S out of K, σ_DP, and processes to divide a cohort among.
COHORT, PEOPLE, SIGMA_DP, RANKS, STEPS = 204_800, 70_000_000, 3e-6, 512, 200
MEDIAN_SECONDS, SPREAD = 120.0, 1.0  # of audio per user: log-normal, a heavy tail


def timed(work: Callable[[int], object], *, repeats: int = 5) -> float:
    """Median processor seconds."""
    found = []
    for repeat in range(repeats):
        begun = time.process_time()
        work(repeat)
        found.append(time.process_time() - begun)
    return statistics.median(found)


def measure(populations: Sequence[int]) -> dict[str, Any]:
    rows = []
    for users in populations:
        rows.append(measure_population(users))
        print(rows[-1], flush=True)
    return {"machine": describe_machine(torch.device("cpu")), "populations": rows, "leader": lead()}


def short_user(number: int) -> RenderedSpeaker:
    return noise_user(number, speech=Speech(users=1, seconds=AUDIO_SECONDS))


def measure_population(users: int) -> dict[str, float]:
    """One row: the store packed, opened, its clients listed, a cohort drawn, clients read."""
    with tempfile.TemporaryDirectory() as name:
        return _row(users, Path(name))


def _row(users: int, folder: Path) -> dict[str, float]:
    corpus = Corpus("short", "en", range(users), short_user, ProblemLog())
    packed = timed(lambda _: pack_corpus(corpus, folder / "short", workers=1), repeats=1)
    settings = PopulationSettings(split="train")

    def prepare(_: int) -> Population:
        return build_population(Store(folder / "short"), settings, seed=SEED)

    before = resident_mib().own
    population = prepare(0)
    grown = resident_mib().own - before
    prepared = timed(prepare)
    members = population.members
    held = members.members.nbytes + members.offsets.nbytes + population.seconds.nbytes
    plan = _plan(min(SMALL_COHORT, users // 2), users, Mode.SEEDED)
    chosen = np.sort(stream(SEED, "readers").choice(users, min(READ, users), replace=False)).tolist()
    store = population.store
    assert isinstance(store, Store)

    def read(_: int) -> None:
        for index in chosen:
            for row in population.client(index).utterances.tolist():
                store.samples(row)

    read(0)
    return {
        "users": users,
        "pack_seconds": round(packed, 3),
        "prepare_seconds": round(prepared, 5),
        "held_bytes": round(held / users, 2),
        "own_mib": round(grown, 1),
        "sample_seconds": round(timed(plan.sample), 6),
        "read_seconds": round(timed(read) / len(chosen), 8),
    }


def _plan(cohort: int, people: int, mode: Mode) -> Plan:
    settings = PrivacySettings(
        population_size=people,
        privacy_unit="speaker",
        cohort_size=cohort,
        clip_bound=0.01,
        share=Share.DIM,
        noise_multiplier=SIGMA_DP * COHORT,
        delta=1e-9,
        mode=mode,
        root_seed=SEED if mode is Mode.SEEDED else None,
    )
    return Plan(settings, Layout.of({"w": torch.zeros(32)}))


def lead() -> dict[str, float]:
    """The work that one process does for all, beside the training itself."""
    seeded, secure = (_plan(COHORT, PEOPLE, mode) for mode in (Mode.SEEDED, Mode.SECURE))
    cohort = seeded.sample(0)
    seconds = stream(SEED, "seconds").lognormal(math.log(MEDIAN_SECONDS), SPREAD, COHORT)
    parts = split_by_load(seconds, RANKS)
    loads = np.array([seconds[part].sum() for part in parts])
    equal = np.array([part.sum() for part in np.array_split(seconds, RANKS)])
    return {
        "seeded_seconds": round(timed(seeded.sample), 5),
        "secure_seconds": round(timed(secure.sample), 5),
        "commit_seconds": round(timed(lambda step: cohort_commitment(cohort, nonce=seeded.cohort_nonce(step))), 5),
        "cohort_bytes": float(cohort.nbytes),
        **_charge(seeded),
        "divide_seconds": round(timed(lambda _: split_by_load(seconds, RANKS), repeats=3), 4),
        "fullest": round(float(loads.max() / loads.mean()), 6),
        "fullest_by_number": round(float(equal.max() / equal.mean()), 4),
    }


def _charge(plan: Plan) -> dict[str, float]:
    """By the clock, since the ledger waits for the disk."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl", header=plan.ledger_header(run="growth"))
        times = []
        for step in range(STEPS):
            begun = time.perf_counter()
            plan.charge(ledger, step=step, parameters="", cohort="")
            times.append(time.perf_counter() - begun)
        ledger.close()
    return {"first_charge_seconds": round(times[0], 3), "charge_seconds": round(statistics.median(times[1:]), 5)}
