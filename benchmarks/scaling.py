"""What a round of S = 204,800 out of K = 70,000,000 asks of the one process that leads it, beside the training itself.

    python benchmarks/scaling.py [--users 1000000] [--cohort 204800] [--population 70000000] [--ranks 512]

Who is in the cohort, the commitment to them, the ledger, dealing them out to processes, and finding users in a store's
index. docs/scaling.md quotes it. The store has `--users` users, with 5 ms of audio each: what is measured is their
number. All times are medians on one thread.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sottovoce.base.processes import split_by_load
from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.ledger import Ledger, cohort_commitment
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings

SEED, STEPS = 1, 200
SIGMA_DP = 3e-6  # the paper's; z = σ_DP·S
MEDIAN_SECONDS, SPREAD = 120.0, 1.0  # of audio per user: log-normal, a heavy tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=204_800)
    parser.add_argument("--population", type=int, default=70_000_000)
    parser.add_argument("--ranks", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("what", "measured", title="benchmarks/scaling.py")
    with tempfile.TemporaryDirectory() as folder:
        for rows in (sampling(arguments), paying(arguments, Path(folder)), dealing(arguments)):
            for row in rows:
                table.add_row(*row)
        for row in reading(arguments, Path(folder)):
            table.add_row(*row)
    Console(width=110).print(table)


def timed(work: Callable[[int], object], *, repeats: int = 5) -> float:
    """Median seconds."""
    found = []
    for repeat in range(repeats):
        begun = time.perf_counter()
        work(repeat)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def plan_of(arguments: argparse.Namespace, mode: Mode) -> Plan:
    settings = PrivacySettings(
        population_size=arguments.population,
        privacy_unit="speaker",
        cohort_size=arguments.cohort,
        clip_bound=0.01,
        share=Share.DIM,
        noise_multiplier=SIGMA_DP * arguments.cohort,
        delta=1e-9,
        mode=mode,
        root_seed=SEED if mode is Mode.SEEDED else None,
    )
    return Plan(settings, Layout.of({"w": torch.zeros(32)}))


def sampling(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    what = f"a cohort of {arguments.cohort:,} out of {arguments.population:,}"
    seeded, secure = (plan_of(arguments, mode) for mode in (Mode.SEEDED, Mode.SECURE))
    cohort = seeded.sample(0)
    return [
        (f"{what}, seeded", f"{timed(seeded.sample) * 1e3:.0f} ms"),
        (f"{what}, from the system's entropy", f"{timed(secure.sample) * 1e3:.0f} ms"),
        (
            "commitment to it for the ledger",
            f"{timed(lambda step: cohort_commitment(cohort, nonce=seeded.cohort_nonce(step))) * 1e3:.1f} ms",
        ),
        ("the cohort as bytes, sent to every process", f"{cohort.nbytes / 1e6:.1f} MB"),
    ]


def paying(arguments: argparse.Namespace, folder: Path) -> list[tuple[str, str]]:
    plan = plan_of(arguments, Mode.SEEDED)
    ledger = Ledger(folder / "ledger.jsonl", header=plan.ledger_header(run="scaling"))
    begun = time.perf_counter()
    plan.charge(ledger, step=0, parameters="", cohort="")
    first = time.perf_counter() - begun
    times = []
    for step in range(1, STEPS):
        begun = time.perf_counter()
        plan.charge(ledger, step=step, parameters="", cohort="")
        times.append(time.perf_counter() - begun)
    ledger.close()
    return [
        ("charging the first step, accountants made ready", f"{first:.2f} s"),
        ("charging a further step, on the disk", f"{statistics.median(times) * 1e3:.1f} ms"),
    ]


def dealing(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    rng = stream(SEED, "seconds")
    seconds = rng.lognormal(math.log(MEDIAN_SECONDS), SPREAD, arguments.cohort)
    took = timed(lambda _: split_by_load(seconds, arguments.ranks), repeats=3)
    loads = np.array([seconds[part].sum() for part in split_by_load(seconds, arguments.ranks)])
    equal = np.array([part.sum() for part in np.array_split(seconds, arguments.ranks)])
    return [
        (f"dealing them out to {arguments.ranks} processes by seconds", f"{took:.2f} s"),
        ("  the fullest process ÷ the mean", f"{loads.max() / loads.mean():.6f}"),
        ("  the same with equal numbers of users instead", f"{equal.max() / equal.mean():.2f}"),
    ]


def tiny_user(number: int) -> RenderedSpeaker:
    name = f"user-{number:08}"
    samples = np.full(80, number % 1000, dtype=np.int16)
    return RenderedSpeaker(
        name=name,
        split="train",
        utterances=[RenderedUtterance(id=f"{name}-0", samples=samples, text="sì", raw_text="Sì!")],
    )


def reading(arguments: argparse.Namespace, folder: Path) -> list[tuple[str, str]]:
    begun = time.perf_counter()
    pack_corpus(Corpus("tiny", "en", range(arguments.users), tiny_user, ProblemLog()), folder / "tiny", workers=1)
    packed = time.perf_counter() - begun
    begun = time.perf_counter()
    population = build_population(Store(folder / "tiny"), PopulationSettings(split="train"), seed=SEED)
    built = time.perf_counter() - begun
    chosen = np.sort(stream(SEED, "readers").choice(len(population), 2000, replace=False)).tolist()
    store = population.store
    assert isinstance(store, Store)

    def read(_: int) -> None:
        for index in chosen:
            for row in population.client(index).utterances.tolist():
                store.samples(row)

    each = timed(read) / len(chosen)
    held = population.members.members.nbytes + population.members.offsets.nbytes + population.seconds.nbytes
    return [
        (f"packing a store of {arguments.users:,} users", f"{packed:.0f} s"),
        ("who is a client, worked out", f"{built:.2f} s"),
        ("  memory that it holds per user", f"{held / arguments.users:.0f} bytes"),
        ("finding and reading one random user, warm", f"{each * 1e6:.0f} µs"),
    ]


if __name__ == "__main__":
    main()
