"""`serve` and `join` as processes, with what they have cost; and the same recipe as a simulation on the same grid."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch

from networks.relay import Passed, Relay
from sottovoce.config import Recipe, load_recipe
from sottovoce.data.store import Store
from sottovoce.federated.cohort import CohortSum, LocalClients
from sottovoce.models.model_files import PARAMETERS, PART
from sottovoce.models.recogniser import Recogniser
from sottovoce.network import keys
from sottovoce.network.roster import format_roster_entry
from sottovoce.network.server.setup import with_word_sums
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.plan import Plan
from sottovoce.training.checkpoint import LATEST
from sottovoce.training.engines import build_engine
from sottovoce.training.remote_clients import RemoteClients
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import build_recipe_population
from sottovoce.training.run_folder import LEDGER, RunFolder

CPU = torch.device("cpu")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder with keys, a roster, runs and stores. `stores_of` says where somebody's own speech lies."""

    folder: Path
    recipe: str
    overrides: tuple[str, ...]
    people: tuple[str, ...]
    store_of: Callable[[str], Path]

    def loaded(self, *more: str) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, *more])

    @property
    def around(self) -> RunContext:
        return RunContext(self.folder / "runs", self.folder / "stores", CPU)

    def settle(self) -> None:
        """Keys and a roster, unless they are there."""
        now, folder = datetime.now(UTC), self.folder / "keys"
        if not (folder / "server").exists():
            keys.make_authority(folder / "authority", now=now)
            keys.make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=now)
        for name in self.people:
            if not (folder / name).exists():
                keys.make_node(folder / name)
        lines = [format_roster_entry(name, keys.load_public_key(folder / name / keys.NODE)) for name in self.people]
        (self.folder / "roster.yaml").write_text("\n".join(["users:", *lines, ""]))


def simulate(place: Place, out: Path, *more: str) -> float:
    """As `sottovoce run` does, but on the grid that a network's sums are on; processor seconds of it all."""
    recipe = place.loaded(*more)
    store = Store(place.around.stores / recipe.data.store)
    population = build_recipe_population(recipe, store, recipe.federated.clients.population(recipe.data))

    def clients(run: RunFolder, plan: Plan, start: Recogniser) -> _Here:
        return _Here(LocalClients(build_engine("sequential", recipe, population, start, plan, device=CPU)))

    begun = sum(os.times()[:2])
    run_recipe(
        recipe, out=out, resume=False, context=place.around, remote=RemoteClients(population, with_word_sums, clients)
    )
    return sum(os.times()[:2]) - begun


@dataclass(frozen=True)
class _Here:
    """All clients in this process, always ready."""

    here: LocalClients

    def ready(self, interrupted: Callable[[], bool], *, row: int | None = None) -> bool:
        return True

    def begin(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the benchmark's rounds do not overlap")

    def end(self, rounds: int) -> None:
        pass

    def sum(self, *arguments: Any, **named: Any) -> CohortSum:
        return self.here.sum(*arguments, **named)

    def wer(self, *_: Any, **__: Any) -> CohortSum:
        raise NotImplementedError("the benchmark's recipes measure no client")

    def close(self) -> None:
        self.here.close()


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a round has cost between the first report and the last, evaluations included.

    Processor seconds of the server and of a node that was asked, and its bytes. `homes` have everybody's own ledgers.
    """

    server_seconds: float
    node_seconds: float
    bytes_up: float
    bytes_down: float
    homes: Path


@final
class Processes:
    """Some processes of this benchmark; all are ended with it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[subprocess.Popen[str]]()

    def start(self, *command: str, log: str | None = None) -> subprocess.Popen[str]:
        """With its output in the file `log`, or to be read from."""
        output = subprocess.PIPE if log is None else (self._folder / log).open("w")
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self._folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def serve(place: Place, out: Path, *options: str, more: Sequence[str] = ()) -> Costs:
    """One served run with a process for everybody in the roster."""
    homes = out.parent / f"{out.name}-homes"
    with closing(Processes(place.folder)) as processes:
        server = processes.start(
            *("-m", "sottovoce", "serve", place.recipe, *place.overrides, *more, "--listen", "127.0.0.1:0"),
            *("--wait-for", str(len(place.people)), "--out", str(out), "--device", "cpu", *options),
        )
        words = _until(server, "listening at ").split()
        relay, digest = Relay(place.people, port=int(words[2].split(":")[1])), words[-1]
        nodes = {
            name: processes.start(
                *("-m", "sottovoce", "join", f"https://127.0.0.1:{relay.ports[name]}", "--user", name),
                *("--data", str(place.store_of(name)), "--key", f"keys/{name}", "--ca", "keys/server/ca.pem"),
                *("--home", str(homes / name), "--accept", digest, "--device", "cpu"),
                log=f"{out.name}-{name}.log",
            )
            for name in place.people
        }
        reports: list[_Report] = []
        for line in _lines(server):
            print(f"  {out.name}: {line}", flush=True)
            if line.startswith("round ") and not line.startswith("round 0:"):
                taken = [processor_seconds(node.pid) for node in nodes.values()]
                step = int(line.split()[1].rstrip(":").replace(",", ""))
                reports.append(_Report(step, relay.total(), processor_seconds(server.pid), sum(taken)))
        if server.wait():
            raise SystemExit(f"{out}: the server has failed")
        relay.close()
    first, last = reports[0], reports[-1]
    rounds = last.step - first.step
    asked = sum(first.step < step <= last.step for step, _ in _trained(homes))
    return Costs(
        server_seconds=(last.server - first.server) / rounds,
        node_seconds=(last.nodes - first.nodes) / asked,
        bytes_up=(last.passed.up - first.passed.up) / asked,
        bytes_down=(last.passed.down - first.passed.down) / asked,
        homes=homes,
    )


@dataclass(frozen=True)
class _Report:
    """Where everything stood when the server told of a round."""

    step: int
    passed: Passed
    server: float
    nodes: float


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return (line.rstrip() for line in process.stdout)


def _until(process: subprocess.Popen[str], start: str) -> str:
    said = []
    for line in _lines(process):
        said.append(line)
        if line.startswith(start):
            return line
    raise SystemExit("\n".join([*said, f"it ended with {process.wait()}"]))


def processor_seconds(pid: int) -> float:
    """What a running process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def peak_mib(pid: int) -> float:
    """The most memory that a running process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


def round_seconds(run: Path) -> dict[int, float]:
    """By step, counted from 1."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["seconds"] for record in records if "seconds" in record}


def training_seconds(homes: Path) -> dict[int, float]:
    """By step, how long the slowest node trained."""
    slowest: dict[int, float] = {}
    for step, seconds in _trained(homes):
        slowest[step] = max(slowest.get(step, 0.0), seconds)
    return slowest


def _trained(homes: Path) -> Iterator[tuple[int, float]]:
    """Steps, counted from 1, and seconds of all training, as everybody's own ledger has it."""
    for ledger in homes.glob("*/ledger.jsonl"):
        for line in ledger.read_text().splitlines():
            record = json.loads(line)["record"]
            if record.get("answered") == "train":
                yield record["step"] + 1, record["seconds"]


def same_model(one: Path, other: Path) -> bool:
    """Whether two runs have ended with the same parameters, to the bit, and their ledgers say the same.

    But for digests of what was read and written, as a server knows silos by their names, and not who is in them; and
    for who signs, which a simulation need not.
    """
    besides = ("inputs", "recipe", "files", "signer")
    models = [folder / "checkpoints" / LATEST for folder in (one, other)]
    files = [(model / (PART if (model / PART).exists() else PARAMETERS)).read_bytes() for model in models]
    ledgers = [
        [{name: value for name, value in record.items() if name not in besides} for record in found]
        for found in (read_chain(folder / LEDGER).records for folder in (one, other))
    ]
    return files[0] == files[1] and ledgers[0] == ledgers[1]
