"""`serve` and `join` as people run them: a process for the server, and one for each node, over TLS.

One run is made once for most tests: nine people, three rounds. It is compared with a simulation of the same people.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.deployment.village import NAMES, content

pytest.importorskip("flwr", reason="flwr is not installed (the extra `federation`)")

from sottovoce.config import Recipe, load_recipe  # noqa: E402
from sottovoce.deployment import keys  # noqa: E402
from sottovoce.deployment.network import in_words  # noqa: E402
from sottovoce.deployment.roster import entry  # noqa: E402
from sottovoce.federated.cohort import ClientsHere  # noqa: E402
from sottovoce.models.saved import PARAMETERS, Recogniser  # noqa: E402
from sottovoce.privacy.plan import Plan  # noqa: E402
from sottovoce.store import Store  # noqa: E402
from sottovoce.training.checkpoint import LATEST  # noqa: E402
from sottovoce.training.engines import build_engine  # noqa: E402
from sottovoce.training.run_folder import DIAGNOSTICS, LEDGER, RunFolder  # noqa: E402
from sottovoce.training.speakers import population_of  # noqa: E402
from sottovoce.training.stages import Elsewhere, Surroundings, run_recipe  # noqa: E402

ROUNDS = 3
CPU = torch.device("cpu")


@dataclass
class Place:
    """Keys, a roster, a recipe, and the processes that were started here. `stores` holds everybody's own by name."""

    folder: Path
    stores: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    def sottovoce(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sottovoce", *arguments],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def serve(self, out: str, *more: str, port: int = 0) -> "Serving":
        options = {"--roster": "roster.yaml", "--keys": "keys/server", "--stores": str(self.stores), "--device": "cpu"}
        listen = ["--listen", f"127.0.0.1:{port}"]
        server = self.sottovoce(
            "serve", str(self.recipe), *(word for pair in options.items() for word in pair), *listen, "--out", out, *more
        )
        for line in lines_of(server):
            if line.startswith("listening at "):
                return Serving(server, int(line.split()[2].split(":")[1]), line.split()[-1])
        raise AssertionError(f"the server ended with {server.wait()}")

    def join(self, name: str, serving: "Serving", *more: str, accept: str | None = None) -> subprocess.Popen[str]:
        return self.sottovoce(
            *("join", f"https://127.0.0.1:{serving.port}", "--data", str(self.stores / name), "--device", "cpu"),
            *("--key", f"keys/{name}", "--ca", "keys/server/ca.pem", "--accept", accept or serving.digest, *more),
        )

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    port: int
    digest: str

    def finish(self) -> str:
        """Everything that it says until it ends well."""
        said = "\n".join(lines_of(self.process))
        assert self.process.wait() == 0, said
        return said


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    out: IO[str] | None = process.stdout
    assert out is not None
    return (line.rstrip() for line in out)


def until(process: subprocess.Popen[str], start: str) -> str:
    """The next line of a process that begins with `start`; waits for it."""
    said = []
    for line in lines_of(process):
        said.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"it ended with {process.wait()} and never said {start!r}: {said}")


Build = Callable[..., Place]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, village_stores: Path) -> Iterator[Build]:
    built: list[Place] = []

    def made(**federation: Any) -> Place:
        place = Place(tmp_path_factory.mktemp("place"), village_stores)
        built.append(place)
        recipe = content(steps=ROUNDS, evaluate_every=2, checkpoint_every=1, **federation)
        place.recipe.write_text(yaml.safe_dump(recipe))
        now, folder = datetime.now(UTC), place.folder / "keys"
        keys.make_authority(folder / "authority", now=now)
        keys.make_server(folder / "server", authority=folder / "authority", hosts=["127.0.0.1"], now=now)
        for name in NAMES:
            keys.make_node(folder / name)
        roster = [entry(name, keys.load_public_key(folder / name / "node.pub")) for name in NAMES]
        (place.folder / "roster.yaml").write_text("users:\n" + "\n".join(roster) + "\n")
        return place

    yield made
    for place in built:
        place.close()


@dataclass(frozen=True)
class _Here:
    """All clients in this process, always ready."""

    here: ClientsHere

    def ready(self, interrupted: Callable[[], bool]) -> bool:
        return True

    def sum(self, *arguments: Any, **named: Any) -> Any:
        return self.here.sum(*arguments, **named)

    def close(self) -> None:
        self.here.close()


def simulate(place: Place, out: str) -> Path:
    """The same recipe and people in this process, on the grid that a network needs."""
    recipe: Recipe = load_recipe(str(place.recipe))
    store = Store(place.stores / "tones")
    population = population_of(recipe, store, recipe.federated.clients.population(recipe.data))

    def clients(run: RunFolder, plan: Plan, start: Recogniser) -> _Here:
        return _Here(ClientsHere(build_engine("sequential", recipe, population, start, plan, device=CPU)))

    around = Surroundings(place.folder / "runs", place.stores, CPU)
    folder = place.folder / out
    run_recipe(recipe, out=folder, resume=False, around=around, elsewhere=Elsewhere(population, in_words, clients))
    return folder


def check_same(served: Path, simulated: Path) -> None:
    """The same model to the bit, and the same ledger to the byte."""
    one, other = (load_file(folder / "checkpoints" / LATEST / PARAMETERS) for folder in (served, simulated))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (served / LEDGER).read_bytes() == (simulated / LEDGER).read_bytes()


@pytest.mark.parametrize("sums", ["open", "secure"])
def test_nine_processes_make_the_model_of_a_simulation(build: Build, sums: str) -> None:
    place = build()
    serving = place.serve("served", "--sums", sums, "--wait-for", "9")
    for name in NAMES:
        place.join(name, serving)
    said = serving.finish()
    assert "waiting until at least 9 of 9 nodes are here" in said
    assert "ε spent" in said
    check_same(place.folder / "served", simulate(place, "simulated"))
