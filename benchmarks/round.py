"""A federated round on one device: what federation and privacy add around the local steps, and what each engine gives.

    python benchmarks/round.py [--size base] [--cohort 64] [--batch-seconds 120] [--local-steps 10] [--drop 0.3]
                               [--engines sequential stacked] [--stack 8] [--rounds 3]
    python benchmarks/round.py --family crdnn --size gao --drop 0.15 --batch-seconds 80 --batch-utterances 8
                               --tokens 500 --tokens-per-second 4 --cohort 10 --engines sequential

The population is a store of noise: utterances of 3 to 10 s, five times `--batch-seconds` per user, so that nearly all
batches are full (arithmetic does not depend on what is said). Rows take turns; medians of rounds. Local steps of each
round are done once before, unmeasured: what is compiled or recorded for their shapes is a matter of long runs.

    floor      the same local steps of the same clients in a plain loop, read beforehand: no store, no reset, no update,
               no clipping, nothing summed
    no privacy a round: cohort, loading, local training, updates, sum, server step
    private    the same with clipping per layer, noise and the ledger

`--engines sequential stacked shared --local-steps 1` compares them where clients take one step; nothing is clipped
locally then, so that `shared` may sum without privacy.
"""

import argparse
import math
import resource
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.normalisation import alphabet
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.client import ClientContext, LoadedClient, LocalTraining, load_client, plan_client
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, Engine, SequentialEngine, SharedEngine, StackedEngine
from sottovoce.federated.feature_cache import FeatureCache, feature_cache_bytes
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.family import DEFAULT, REGISTERED, Family, Parameters, accelerate_family, find_family, step_loss
from sottovoce.models.precision import choose_dtype
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings, Sampling

SEED = 1
LETTERS = "abcdefghij"
FIRST_SIGN = 0x4E00  # of a script that has more signs than any model has tokens
NOISE = stream(SEED, "noise").integers(-3000, 3000, size=10 * SAMPLE_RATE).astype(np.int16)


def noise_speaker(number: int, *, seconds: float, letters: str, per_second: float) -> RenderedSpeaker:
    rng = stream(SEED, "speaker", number)
    utterances: list[RenderedUtterance] = []
    total = 0.0
    while total < seconds:
        length = int(rng.integers(3 * SAMPLE_RATE, 10 * SAMPLE_RATE))
        text = "".join(rng.choice(list(letters), size=int(per_second * length / SAMPLE_RATE)))
        samples = NOISE[:length]
        name = f"{number}-{len(utterances)}"
        utterances.append(RenderedUtterance(id=name, samples=samples, text=text, raw_text=text))
        total += length / SAMPLE_RATE
    return RenderedSpeaker(name=f"s{number:05}", split="train", utterances=utterances, metadata={})


def noise_store(folder: Path, *, users: int, **speech: Any) -> Store:
    speakers = [noise_speaker(number, **speech) for number in range(users)]
    pack_corpus(Corpus("noise", "en", speakers, _as_it_is, ProblemLog()), folder / "noise", workers=1)
    return Store(folder / "noise")


def _as_it_is(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


@dataclass
class Setting:
    """Everything that the rows share."""

    arguments: argparse.Namespace
    context: ClientContext
    layout: Layout
    start_P: torch.Tensor
    device: torch.device
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return choose_dtype("auto", self.device, family=self.context.family, settings=self.context.model)

    @property
    def long_run(self) -> dict[str, Any]:
        """A run of so many steps is worth compiling for."""
        return {"steps": 10**6, "batch_seconds": self.context.local.batch_seconds, "device": self.device}

    def faster(self, working: Parameters) -> Family[Any, Any]:
        return accelerate_family(self.context.family, working, settings=self.context.model, **self.long_run)

    def engine(self, name: str, *, private: bool) -> Engine:
        common: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        if name in ("stacked", "shared"):
            stacked = (
                self.context.family.stacking.shared
                if name == "shared" and not private
                else self.context.family.stacking.stacked
            )
            if stacked is not None and stacked.accelerate is not None:
                stacked = stacked.accelerate(stacked, **self.long_run)
            common |= {"stacked": stacked, "size": self.arguments.stack}
        if name == "shared":
            return SharedEngine(self.context, self.layout, summed=not private, **common)
        if name == "stacked":
            return StackedEngine(self.context, self.layout, **common)
        return SequentialEngine(self.context, self.layout, faster=self.faster, **common)

    def plan(self, *, private: bool, cohort: int) -> Plan:
        population = len(self.context.population)
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


class Row(ABC):
    """Work that is measured, a round at a time."""

    waited = 0.0

    @abstractmethod
    def prepare(self, step: int) -> None:
        """What is not measured."""

    @abstractmethod
    def work(self, step: int) -> float:
        """What is: round `step`, which trains on so many seconds of audio."""


class Rounds(Row):
    """Rounds of one engine; the one without privacy makes it ready for the other."""

    def __init__(self, setting: Setting, engine: Engine, *, private: bool, cohort: int, name: str) -> None:
        self._engine, self._private = engine, private
        self._plan = setting.plan(private=private, cohort=cohort)
        server = ServerSettings(optimiser={"name": "lamb"}, schedule={"name": "constant", "lr": 1e-9})
        self._server = Server(server, setting.layout, setting.start_P.clone())
        header = self._plan.ledger_header(run=name)
        ledger = Ledger(setting.folder / f"{name}.jsonl", header=header)
        self._state = RoundState(self._server, self._plan, ledger)

    def prepare(self, step: int) -> None:
        if not self._private:
            for trained in self._engine.train(self._server.parameters_P, self._plan.sample(step).tolist(), step=step):
                assert not isinstance(trained, Dropped), trained

    def work(self, step: int) -> float:
        done = run_round(self._state, LocalClients(self._engine), step=step)
        assert done.private is not None
        assert not done.private.dropped, done.private.dropped
        self.waited = done.private.waited_seconds
        return done.private.audio_seconds


class Floor(Row):
    """The local steps of a round's clients with no federation around them.

    As in a round, what was heard of a client before is not heard again.
    """

    def __init__(self, setting: Setting, cohort: int) -> None:
        context, self._device = setting.context, setting.device
        self._plan = setting.plan(private=False, cohort=cohort)
        self._weights = Weights(
            setting.layout,
            context.local.built_optimiser(),
            device=setting.device,
            dtype=setting.dtype,
            statistics=context.family.training.statistics(context.model),
        )
        self._weights.reset(setting.start_P)
        self._room = replace(context, family=setting.faster(self._weights.working))
        self._before = FeatureCache(feature_cache_bytes(setting.device))
        self._loaded: list[LoadedClient] = []

    def prepare(self, step: int) -> None:
        planned = [plan_client(self._room, index, step=step) for index in self._plan.sample(step).tolist()]
        where: dict[str, Any] = {"device": self._device, "cache": self._before}
        self._loaded = [load_client(self._room, client, step=step, **where) for client in planned]
        self.work(step)
        # As they are found after that: heard before.
        self._loaded = [load_client(self._room, client, step=step, **where) for client in planned]

    def work(self, step: int) -> float:
        context, weights, local = self._room, self._weights, self._room.local
        for client in self._loaded:
            heard = client.extract_features(self._before, context, dtype=weights.dtype)
            for lines, draws in zip(client.lines, client.draws, strict=True):
                loss = step_loss(
                    context.family, weights.working, heard.take(lines), settings=context.model, draws=draws
                )
                weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
                weights.step(lr=local.lr, max_norm=local.clip_gradients)
        return sum(client.audio_seconds for client in self._loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=DEFAULT, choices=[*REGISTERED])
    parser.add_argument("--size", default="base")
    parser.add_argument("--cohort", type=int, default=64)
    parser.add_argument("--users", type=int, default=80)
    parser.add_argument("--batch-seconds", type=float, default=120)
    parser.add_argument("--batch-utterances", type=int)
    parser.add_argument("--tokens", type=int, help="how many there are; the English letters unless given")
    parser.add_argument("--tokens-per-second", type=float, default=14)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--drop", type=float, default=0.3, help="dropout, and layer-drop where a family has it")
    parser.add_argument("--stack", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked"])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Console(width=150).print(measure(arguments, Path(folder)))


def measure(arguments: argparse.Namespace, folder: Path) -> Table:
    device = torch.device(arguments.device)
    family = find_family(arguments.family)
    # A model's outputs are its tokens and the blank.
    signs = "".join(chr(FIRST_SIGN + number) for number in range((arguments.tokens or 0) - 1))
    speech = {"letters": signs or LETTERS, "per_second": arguments.tokens_per_second}
    store = noise_store(folder, users=arguments.users, seconds=arguments.batch_seconds * 5, **speech)
    tokens = CharacterTokens.seen_in(signs or alphabet("en") or LETTERS)
    chance = {own.name for own in fields(family.Options)} & {"dropout", "layer_drop"}
    options = family.Options(family=family.name, size=arguments.size, **dict.fromkeys(chance, arguments.drop))
    model = options.settings(tokens=tokens.size + 1)
    parameters = family.init(model, generator=torch_stream(SEED, "init"))
    layout = Layout.of(parameters)
    local = LocalTraining(
        batch_seconds=arguments.batch_seconds,
        lr=1e-6,
        local_steps=arguments.local_steps,
        batch_utterances=arguments.batch_utterances,
        clip_gradients=math.inf if "shared" in arguments.engines else 1.0,
    )
    population = build_population(store, PopulationSettings(split="train"), seed=SEED)
    context = ClientContext(population, tokens, family, model, local, seed=SEED, cohort_size=arguments.cohort)
    setting = Setting(arguments, context, layout, layout.flatten(parameters).to(device), device, folder)
    rows: dict[str, Row] = {}
    if "sequential" in arguments.engines:
        rows["floor"] = Floor(setting, arguments.cohort)
    for engine_name in arguments.engines:
        for kind in ("no privacy", "private"):
            private, name = kind == "private", f"{engine_name}, {kind}"
            if not private or engine_name == "shared":
                engine = setting.engine(engine_name, private=private)
            rows[name] = Rounds(setting, engine, private=private, cohort=arguments.cohort, name=name)
    return table(rows, arguments, device)


def table(rows: dict[str, Row], arguments: argparse.Namespace, device: torch.device) -> Table:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    model = arguments.size if arguments.family == DEFAULT else f"{arguments.family} {arguments.size}"
    batch = f"{arguments.batch_seconds:g} s"
    if arguments.batch_utterances is not None:
        batch = f"{arguments.batch_utterances} utterances of at most {batch}"
    title = f"{model}, S = {arguments.cohort}, {arguments.local_steps} × {batch}, {where}"
    made = Table("row", "s per round", "audio s/s", "spread", "waited for data", "device GiB", "host GiB", title=title)
    rates: dict[str, list[float]] = {name: [] for name in rows}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    waits: dict[str, float] = {}
    memory: dict[str, float] = {}
    for repeat in range(arguments.rounds + 1):  # the first compiles
        audio_of_rows: list[float] = []
        for name, row in rows.items():
            row.prepare(repeat)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            audio = row.work(repeat)
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            spent = time.perf_counter() - begun
            if repeat:
                rates[name].append(audio / spent)
                seconds[name].append(spent)
                waits[name] = row.waited / spent
            audio_of_rows.append(audio)
            assert math.isclose(audio, audio_of_rows[0]), "all rows train on the same batches"
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
