"""Two processes on two cores against one process on one core: the same federated rounds, taken in turns.

    python benchmarks/ranks.py [--size tiny] [--cohort 32] [--seconds 20] [--local-steps 4] [--rounds 7] [--ranks 2]

Each process has one thread. Both teams stay alive and take turns, a round each, so that whatever else the machine does
falls on both alike. The population is noise of unequal lengths: the dealing has something to do.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from sottovoce.base.processes import process_group
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.normalisation import alphabet
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.client import ClientContext, LocalTraining
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import SequentialEngine
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import named_settings
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings, Sampling

SEED, CPU = 1, torch.device("cpu")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
USERS_PER_CLIENT = 2  # the population, in cohorts


def speaker(number: int, seconds: float) -> RenderedSpeaker:
    """Between half and one and a half times `seconds` of noise."""
    rng = stream(SEED, "speaker", number)
    utterances: list[RenderedUtterance] = []
    left = seconds * rng.uniform(0.5, 1.5)
    while left > 0:
        length = rng.uniform(2.0, 6.0)
        text = "".join(rng.choice(list(LETTERS), size=int(10 * length)))
        samples = rng.integers(-3000, 3000, int(length * SAMPLE_RATE)).astype("int16")
        utterances.append(
            RenderedUtterance(id=f"{number}-{len(utterances)}", samples=samples, text=text, raw_text=text)
        )
        left -= length
    return RenderedSpeaker(name=f"s{number:04}", split="train", utterances=utterances)


def as_it_is(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return rendered


def member(arguments: argparse.Namespace) -> None:
    """One process of a team: a round for each line on the first one's standard input, until it ends."""
    torch.set_num_threads(1)
    store = Store(arguments.store)
    tokens = CharacterTokens.seen_in(alphabet("en") or LETTERS)
    model = named_settings(arguments.size, tokens=tokens.size + 1, dropout=0.0, layer_drop=0.0)
    parameters = FAMILY.init(model, generator=torch_stream(SEED, "init"))
    layout = Layout.of(parameters)
    local = LocalTraining(batch_seconds=arguments.seconds / 2, lr=1e-6, local_steps=arguments.local_steps)
    population = build_population(store, PopulationSettings(split="train"), seed=SEED)
    context = ClientContext(population, tokens, FAMILY, model, local, seed=SEED, cohort_size=arguments.cohort)
    settings = PrivacySettings(
        population_size=len(population),
        privacy_unit="speaker",
        cohort_size=arguments.cohort,
        sampling=Sampling.FIXED_SIZE,
        clip_bound=0.01,
        noise_multiplier=1.0,
        delta=1e-5,
        root_seed=SEED,
    )
    plan = Plan(settings, layout)
    server_settings = ServerSettings(optimiser={"name": "lamb"}, schedule={"name": "constant", "lr": 1e-9})
    server = Server(server_settings, layout, layout.flatten(parameters))
    engine = SequentialEngine(context, layout, device=CPU)
    with process_group(CPU) as processes:
        over_ranks = ClientsOverRanks(engine, processes, seconds=population.seconds)
        if not processes.is_first:
            while (order := cast(RoundOrder | None, cast(Any, processes.broadcast_object(None)))) is not None:
                over_ranks.take_part(order, server.parameters_P, plan=plan)
            return
        ledger = Ledger(Path(arguments.ledger), header=plan.ledger_header(run="ranks"))
        state = RoundState(server, plan, ledger)
        for step, _ in enumerate(sys.stdin):
            begun = time.perf_counter()
            clients = over_ranks if processes.is_distributed else LocalClients(engine)
            done = run_round(state, clients, step=step)
            assert done.private is not None
            assert not done.private.dropped
            print(time.perf_counter() - begun, done.private.audio_seconds, flush=True)
        processes.broadcast_object(None)


class Members:
    """A team of `world` processes, each with one thread."""

    def __init__(self, world: int, folder: Path, options: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, __file__, "--store", str(folder / "store"), *options]
        command += ["--ledger", str(folder / f"ledger-{world}.jsonl")]
        self._processes = []
        for rank in range(world):
            settings_of_rank = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            settings_of_rank |= {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}
            environment = os.environ | {name: str(value) for name, value in settings_of_rank.items()}
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
                )
            )

    @property
    def ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def round(self) -> tuple[float, float]:
        first = self._processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        seconds, audio = map(float, first.stdout.readline().split())
        return seconds, audio

    def end(self) -> None:
        for process in self._processes:
            process.communicate()
            assert process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--cohort", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--store", help=argparse.SUPPRESS)  # set for the members
    parser.add_argument("--ledger", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store:
        member(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        users = [speaker(number, arguments.seconds) for number in range(USERS_PER_CLIENT * arguments.cohort)]
        pack_corpus(Corpus("noise", "en", users, as_it_is, ProblemLog()), Path(folder) / "store", workers=1)
        options = ["--size", arguments.size, "--cohort", str(arguments.cohort), "--seconds", str(arguments.seconds)]
        options += ["--local-steps", str(arguments.local_steps)]
        teams = {world: Members(world, Path(folder), options) for world in (1, arguments.ranks)}
        Console(width=110).print(table(teams, arguments))
        for team in teams.values():
            team.end()


def table(teams: dict[int, Members], arguments: argparse.Namespace) -> Table:
    times: dict[int, list[float]] = {world: [] for world in teams}
    audio: dict[int, float] = {}
    for repeat in range(arguments.rounds + 1):  # the first warms up
        for world, team in teams.items():
            seconds, audio[world] = team.round()
            if repeat:
                times[world].append(seconds)
    found = Table("processes", "s per round", "spread", "audio s/s", title="benchmarks/ranks.py, one thread each")
    for world, seconds_of in times.items():
        median = statistics.median(seconds_of)
        spread = f"{min(seconds_of):.2f}–{max(seconds_of):.2f}"
        found.add_row(str(world), f"{median:.2f}", spread, f"{audio[world] / median:,.0f}")
    ratios = [one / several for one, several in zip(*times.values(), strict=True)]
    found.add_row("ratio", f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}–{max(ratios):.2f}", "")
    return found


if __name__ == "__main__":
    main()
