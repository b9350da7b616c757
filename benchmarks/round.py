"""A federated round on one device: what federation and privacy add around the local steps, and what each engine gives.

    python benchmarks/round.py [--size base] [--cohort 64] [--batch-seconds 120] [--local-steps 10] [--drop 0.3]
                               [--engines sequential stacked] [--layerdrop-group 8] [--stack 8] [--rounds 3]

The population is a store of noise: utterances of 3 to 10 s, five times `--batch-seconds` per user, so that nearly all
batches are full (arithmetic does not depend on what is said). Rows take turns; medians of rounds.

    floor      the same local steps in a plain loop: no store, no reset, no update, no clipping, nothing summed
    no privacy a round: cohort, loading, local training, updates, sum, server step
    private    the same with clipping per layer, noise and the ledger
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sottovoce.corpora.corpus import SAMPLE_RATE, Corpus, RenderedSpeaker, RenderedUtterance
from sottovoce.corpora.problems import ProblemLog
from sottovoce.federated.client import ClientRoom, LocalTraining, load_client, plan_client
from sottovoce.federated.cohort import ClientsHere
from sottovoce.federated.engines import Engine, SequentialEngine, StackedEngine
from sottovoce.federated.heard_before import HeardBefore
from sottovoce.federated.round import run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, Parameters, sped_up, step_loss
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.network import named_settings
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.fingerprint import fingerprint
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings, Sampling
from sottovoce.seeds import stream, torch_stream
from sottovoce.store import Store, pack
from sottovoce.text.normalise import alphabet
from sottovoce.text.tokens import CharacterTokens
from sottovoce.training.precision import precision
from sottovoce.users import PopulationSettings, build_population

SEED = 1
LETTERS = "abcdefghij"
NOISE = stream(SEED, "noise").integers(-3000, 3000, size=10 * SAMPLE_RATE).astype(np.int16)


def noise_speaker(number: int, *, seconds: float) -> RenderedSpeaker:
    rng = stream(SEED, "speaker", number)
    utterances: list[RenderedUtterance] = []
    total = 0.0
    while total < seconds:
        length = int(rng.integers(3 * SAMPLE_RATE, 10 * SAMPLE_RATE))
        text = "".join(rng.choice(list(LETTERS), size=int(14 * length / SAMPLE_RATE)))
        samples = NOISE[:length]
        name = f"{number}-{len(utterances)}"
        utterances.append(RenderedUtterance(id=name, samples=samples, text=text, raw_text=text))
        total += length / SAMPLE_RATE
    return RenderedSpeaker(name=f"s{number:05}", split="train", utterances=utterances, metadata={})


def noise_store(folder: Path, *, users: int, seconds: float) -> Store:
    speakers = [noise_speaker(number, seconds=seconds) for number in range(users)]
    pack(Corpus("noise", "en", speakers, _as_it_is, ProblemLog()), folder / "noise", workers=1)
    return Store(folder / "noise")


def _as_it_is(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


@dataclass
class Setting:
    """Everything that the rows share."""

    arguments: argparse.Namespace
    room: ClientRoom
    layout: Layout
    start_P: torch.Tensor
    device: torch.device
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return precision("auto", self.device)

    @property
    def long_run(self) -> dict[str, Any]:
        """A run of so many steps is worth compiling for."""
        return {"steps": 10**6, "batch_seconds": self.room.local.batch_seconds, "device": self.device}

    def faster(self, working: Parameters) -> Family[Any, Any]:
        return sped_up(self.room.family, working, settings=self.room.model, **self.long_run)

    def engine(self, name: str) -> Engine:
        common: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        if name == "stacked":
            stacked = self.room.family.stacked
            assert stacked is not None
            assert stacked.faster is not None
            fast = stacked.faster(stacked, **self.long_run)
            return StackedEngine(self.room, self.layout, stacked=fast, size=self.arguments.stack, **common)
        return SequentialEngine(self.room, self.layout, faster=self.faster, **common)

    def plan(self, *, private: bool, cohort: int) -> Plan:
        population = len(self.room.population)
        settings = PrivacySettings(
            population_size=population,
            privacy_unit="speaker",
            cohort_size=cohort,
            sampling=Sampling.FIXED_SIZE,
            clip_bound=0.01 if private else float("inf"),
            share=Share.DIM if private else Share.GLOBAL,
            noise_multiplier=1.0 if private else 0.0,
            delta=1e-9,
            root_seed=SEED,
        )
        return Plan(settings, self.layout)


class Rounds:
    """Rounds of one engine, one at a time."""

    def __init__(self, setting: Setting, engine: Engine, *, private: bool, cohort: int, name: str) -> None:
        self._setting, self._engine = setting, engine
        self._plan = setting.plan(private=private, cohort=cohort)
        server = ServerSettings(optimiser={"name": "lamb"}, schedule={"name": "constant", "lr": 1e-9})
        self._server = Server(server, setting.layout, setting.start_P.clone())
        header = self._plan.ledger_header(run=name)
        self._ledger = Ledger(setting.folder / f"{name}.jsonl", header=header)
        self._step = 0
        self.waited = 0.0

    def __call__(self) -> float:
        done = run_round(
            self._server,
            plan=self._plan,
            clients=ClientsHere(self._engine),
            ledger=self._ledger,
            step=self._step,
            digest=fingerprint(self._server.parameters_P),
        )
        assert done.private is not None
        assert not done.private.dropped, done.private.dropped
        self._step += 1
        self.waited = done.private.waited_seconds
        return done.private.audio_seconds


def floor(setting: Setting, cohort: int) -> Callable[[], float]:
    """The local steps of `cohort` clients with no federation around them: batches are loaded beforehand."""
    room, device = setting.room, setting.device
    weights = Weights(setting.layout, room.local.built_optimiser(), device=device, dtype=setting.dtype)
    room = replace(room, family=setting.faster(weights.working))
    weights.reset(setting.start_P)
    before = HeardBefore(2**33)
    planned = [plan_client(room, index, step=0) for index in range(min(cohort, 8))]
    loaded = [load_client(room, client, step=0, device=device, before=before) for client in planned]

    def work() -> float:
        audio = 0.0
        for number in range(cohort):
            client = loaded[number % len(loaded)]
            heard = client.hear(before, room, dtype=weights.dtype)
            for lines, draws in zip(client.lines, client.draws, strict=True):
                batch = heard.take(lines)
                loss = step_loss(room.family, weights.working, batch, settings=room.model, draws=draws)
                weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
                weights.step(lr=room.local.lr, max_norm=1.0)
            audio += client.audio_seconds
        return audio

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base")
    parser.add_argument("--cohort", type=int, default=64)
    parser.add_argument("--users", type=int, default=80)
    parser.add_argument("--batch-seconds", type=float, default=120)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--drop", type=float, default=0.3)
    parser.add_argument("--layerdrop-group", type=int, default=8)
    parser.add_argument("--stack", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked"])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Console(width=150).print(measure(arguments, Path(folder)))


def measure(arguments: argparse.Namespace, folder: Path) -> Table:
    device = torch.device(arguments.device)
    store = noise_store(folder, users=arguments.users, seconds=arguments.batch_seconds * 5)
    tokens = CharacterTokens.seen_in(alphabet("en") or LETTERS)
    model = named_settings(arguments.size, tokens=tokens.size + 1, dropout=arguments.drop, layer_drop=arguments.drop)
    parameters = FAMILY.init(model, generator=torch_stream(SEED, "init"))
    layout = Layout.of(parameters)
    local = LocalTraining(
        batch_seconds=arguments.batch_seconds,
        lr=1e-6,
        local_steps=arguments.local_steps,
        layerdrop_group=arguments.layerdrop_group,
    )
    population = build_population(store, PopulationSettings(split="train"), seed=SEED)
    room = ClientRoom(population, tokens, FAMILY, model, local, seed=SEED, cohort_size=arguments.cohort)
    setting = Setting(arguments, room, layout, layout.flatten(parameters).to(device), device, folder)
    rows: dict[str, Callable[[], float]] = {}
    if "sequential" in arguments.engines:
        rows["floor"] = floor(setting, arguments.cohort)
    for engine_name in arguments.engines:
        engine = setting.engine(engine_name)
        for private in (False, True):
            name = f"{engine_name}, {'private' if private else 'no privacy'}"
            rows[name] = Rounds(setting, engine, private=private, cohort=arguments.cohort, name=name)
    return table(rows, arguments, device)


def table(rows: dict[str, Callable[[], float]], arguments: argparse.Namespace, device: torch.device) -> Table:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = (
        f"{arguments.size}, S = {arguments.cohort}, {arguments.local_steps} × {arguments.batch_seconds:g} s, {where}"
    )
    made = Table("row", "s per round", "audio s/s", "spread", "waited for data", "device GiB", "host GiB", title=title)
    rates: dict[str, list[float]] = {name: [] for name in rows}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    waits: dict[str, float] = {}
    memory: dict[str, float] = {}
    for repeat in range(arguments.rounds + 1):  # the first compiles
        for name, work in rows.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            audio = work()
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            spent = time.perf_counter() - begun
            if repeat:
                rates[name].append(audio / spent)
                seconds[name].append(spent)
                waits[name] = getattr(work, "waited", 0.0) / spent
            print(f"{name}: {spent:.2f} s, {audio / spent:,.0f} audio s/s", flush=True)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for name, found in rates.items():
        made.add_row(
            name,
            f"{statistics.median(seconds[name]):.2f}",
            f"{statistics.median(found):,.0f}",
            f"{min(found):,.0f}–{max(found):,.0f}",
            f"{waits[name]:.1%}",
            f"{memory.get(name, 0.0):.1f}",
            f"{host:.1f}",
        )
    return made


if __name__ == "__main__":
    main()
