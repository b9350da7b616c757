"""Five hundred rounds with each engine: does memory grow?

    python benchmarks/soak.py [--rounds 500] [--engines sequential workers stacked] [--device cpu]

Private rounds of the tiny model on a store of noise, whole as a run makes them: Poisson cohorts, layer-drop, dropout,
SpecAugment, clipping, noise, ledger, server step. Resident memory of this process and of its workers (and what the GPU
holds) after a fifth of the rounds, which every buffer and cache has seen, against the end. Exits with 1 if any engine
has grown by 5 % or more.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.client import ClientContext, LocalTraining
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Engine, SequentialEngine, StackedEngine, WorkersEngine
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import named_settings
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

SEED = 1
USERS, COHORT = 60, 6
GROWTH_ALLOWED = 0.05
LETTERS = CharacterTokens("abcdefghij")
NOISE = stream(SEED, "noise").integers(-3000, 3000, size=3 * SAMPLE_RATE).astype(np.int16)


def noise_speaker(number: int) -> RenderedSpeaker:
    """Two to six utterances of up to two seconds."""
    rng = stream(SEED, "speaker", number)
    utterances = []
    for i in range(rng.integers(2, 7)):
        samples = NOISE[: int(rng.integers(SAMPLE_RATE // 2, 2 * SAMPLE_RATE))]
        text = "".join(rng.choice(list(LETTERS.characters), size=max(1, len(samples) // 2000)))
        utterances.append(RenderedUtterance(id=f"{number}-{i}", samples=samples, text=text, raw_text=text))
    return RenderedSpeaker(name=f"s{number:03}", split="train", utterances=utterances, metadata={})


def as_it_is(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


def make_room(folder: Path) -> ClientContext:
    speakers = [noise_speaker(number) for number in range(USERS)]
    pack_corpus(Corpus("noise", "en", speakers, as_it_is, ProblemLog()), folder, workers=1)
    return ClientContext(
        build_population(Store(folder), PopulationSettings(split=("train",)), seed=SEED),
        LETTERS,
        FAMILY,
        named_settings("tiny", tokens=LETTERS.size + 1),
        LocalTraining(batch_seconds=3.0, lr=0.01, local_steps=2),
        seed=SEED,
        cohort_size=COHORT,
    )


@contextmanager
def engine_of(name: str, room: ClientContext, layout: Layout, device: torch.device) -> Iterator[Engine]:
    if name == "workers":
        engine = WorkersEngine(room, layout)
        yield engine
        engine.close()
    else:
        yield {"sequential": SequentialEngine, "stacked": StackedEngine}[name](room, layout, device=device)


def memory_mib(device: torch.device) -> dict[str, float]:
    """Resident memory of this process, and of its children together."""
    here = Path("/proc/self/task")
    children = [int(pid) for task in here.iterdir() for pid in (task / "children").read_text().split()]
    found = {"process": _resident("self"), "workers": sum(_resident(pid) for pid in children)}
    if device.type == "cuda":
        found["GPU"] = torch.cuda.memory_reserved(device) / 2**20
    return found


def _resident(process: int | str) -> float:
    """Pages of our own: those shared with files or other processes come and go with the page cache."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return float(lines["RssAnon"].split()[0]) / 1024


def soak(name: str, room: ClientContext, *, rounds: int, folder: Path, device: torch.device) -> list[dict[str, float]]:
    """Memory after each round."""
    parameters = room.family.init(room.model, generator=torch_stream(SEED, "init"))
    layout = Layout.of(parameters)
    settings = PrivacySettings(
        population_size=len(room.population),
        privacy_unit="speaker",
        cohort_size=COHORT,
        clip_bound=0.1,
        noise_multiplier=1.0,
        delta=1e-6,
        root_seed=SEED,
    )
    plan = Plan(settings, layout)
    of_server = ServerSettings(optimiser={"name": "lamb"}, schedule={"name": "constant", "lr": 1e-4})
    server = Server(of_server, layout, layout.flatten(parameters).to(device))
    ledger = Ledger(folder / f"{name}.jsonl", header=plan.ledger_header(run="soak"))
    state = RoundState(server, plan, ledger)
    samples = []
    with engine_of(name, room, layout, device) as engine:
        for step in range(rounds):
            run_round(state, LocalClients(engine), step=step)
            ledger.commit(step=step, result=state.digest)
            samples.append(memory_mib(device))
    ledger.close()
    return samples


def growth(samples: list[dict[str, float]], what: str) -> tuple[float, float]:
    """Medians over twenty rounds: after a fifth of all, and at the end."""
    values, first = [sample[what] for sample in samples], len(samples) // 5
    return statistics.median(values[first : first + 20]), statistics.median(values[-20:])


def timed(work: Callable[[], list[dict[str, float]]]) -> tuple[list[dict[str, float]], float]:
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--engines", nargs="+", default=["sequential", "workers", "stacked"])
    parser.add_argument("--device", type=torch.device, default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # memory is what counts here
    table = Table("engine", "memory", f"MiB, round {options.rounds // 5}", f"round {options.rounds}", "growth", "s")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        room = make_room(folder / "store")
        for engine in options.engines:

            def work(engine: str = engine) -> list[dict[str, float]]:
                return soak(engine, room, rounds=options.rounds, folder=folder, device=options.device)

            samples, seconds = timed(work)
            for what in samples[-1]:
                before, after = growth(samples, what)
                if before:
                    worst = max(worst, after / before - 1)
                    cells = f"{before:.1f}", f"{after:.1f}", f"{after / before - 1:+.2%}"
                    table.add_row(engine, what, *cells, f"{seconds:.0f}")
    Console(width=100).print(table)
    sys.exit(worst >= GROWTH_ALLOWED)


if __name__ == "__main__":
    main()
