"""One federated workload on Sottovoce, on Apple's `pfl` and on Flower's simulation, round by round in turn.

    sh benchmarks/peers/setup.sh                          # once: .venv-pfl and .venv-flower
    python benchmarks/peers.py tiny small                 # two CPU cores
    python benchmarks/peers.py 5M-gpu --device cuda --sides sottovoce floor pfl

Every side is a process of its own that stays alive and does one round when asked (peers/turns.py); the others hold
still meanwhile. Before anything is timed, one round without noise must give every side the model of a plain loop, and
one with noise must add what was asked for. In every round the steps and batches computed must be the same.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sottovoce.base.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
CORES = os.cpu_count() or 1

Model = NDArray[np.float64]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """How a contestant is started: its script, its virtual environment (None: this one), and its own arguments."""

    script: str
    venv: str | None = None
    arguments: tuple[str, ...] = ()


# On the CPU both peers get all cores in the two ways there are: threads of one process, or processes of one thread.
# pfl computes in float32 there unless asked; Sottovoce by the model's size.
SIDES: Mapping[str, Side] = {
    "floor": Side("sottovoce_side.py", arguments=("--engine", "floor")),
    "loop": Side("sottovoce_side.py", arguments=("--engine", "loop")),
    "sottovoce": Side("sottovoce_side.py", arguments=("--engine", "auto")),
    "sottovoce-bfloat16": Side("sottovoce_side.py", arguments=("--engine", "auto", "--precision", "bfloat16")),
    "sottovoce-float32": Side("sottovoce_side.py", arguments=("--engine", "auto", "--precision", "float32")),
    "sottovoce-sequential": Side("sottovoce_side.py", arguments=("--engine", "sequential")),
    "pfl": Side("pfl_side.py", venv=".venv-pfl"),
    "pfl-processes": Side("pfl_side.py", venv=".venv-pfl", arguments=("--processes", f"{CORES}", "--threads", "1")),
    "pfl-processes-bfloat16": Side(
        "pfl_side.py",
        venv=".venv-pfl",
        arguments=("--processes", f"{CORES}", "--threads", "1", "--precision", "bfloat16"),
    ),
    "flower-default": Side("flower_side.py", venv=".venv-flower", arguments=("--threads", f"{CORES}")),
    "flower": Side("flower_side.py", venv=".venv-flower", arguments=("--processes", f"{CORES}", "--threads", "1")),
}
CONTEST = [
    "sottovoce",
    "sottovoce-bfloat16",
    "sottovoce-float32",
    "pfl",
    "pfl-processes",
    "pfl-processes-bfloat16",
    "flower-default",
    "flower",
]
REFERENCE = "loop"
# Between models after one round, in units of the clip bound; in bfloat16 each side rounds in its own order.
DIFFERENCE_ALLOWED = {"float32": 1e-3, "bfloat16": 0.05}
NOISE_ALLOWED = 0.02  # relative error of the measured standard deviation


@dataclass
class Contestant:
    """A running side, and all its answers."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    about: Answer = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    def read_answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early. Its last words:\n{self.log.read_text()[-3000:]}")
        answer: Answer = json.loads(line)
        return answer

    def one_round(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.answers.append(self.read_answer())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def start(
    name: str, workload: str, *, options: argparse.Namespace, rounds: int, save: Path, extra: Sequence[str] = ()
) -> Contestant:
    """Start a side and wait until it is ready for its first round. Its log goes beside the model that it saves."""
    side = SIDES[name]
    packages = dict(pair.split("=", 1) for pair in options.packages).get(side.venv or "")
    python = Path(sys.executable)
    if side.venv is not None and packages is None:
        python = options.venvs / side.venv / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{name}: {python} is not there: run sh benchmarks/peers/setup.sh, or leave {name} out")
    command = [str(python), str(PEERS / side.script), workload, "--rounds", str(rounds), "--device", options.device]
    log = save.with_suffix(".log")
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    paths = filter(None, [str(ROOT / "src"), packages, environment.get("PYTHONPATH")])
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *side.arguments, "--save", str(save), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        )
    contestant = Contestant(name, process, log)
    contestant.about = contestant.read_answer()
    return contestant


def models_without_noise(workload: str, options: argparse.Namespace, folder: Path) -> dict[str, Model]:
    """The server's model of every side after one round without noise; the floor has none."""
    models = {}
    for name in dict.fromkeys([REFERENCE, *options.sides]):
        file = folder / f"{name}-clean.npy"
        contestant = start(name, workload, options=options, rounds=1, save=file, extra=("--noise-multiplier", "0"))
        contestant.one_round()
        contestant.end()
        if file.exists():
            models[name] = np.load(file).astype(np.float64)
    return models


def measure(workload: str, options: argparse.Namespace, folder: Path) -> list[Contestant]:
    """All rounds of all sides, in rotation."""
    rounds = options.warm_ups + options.rounds
    contestants = [
        start(name, workload, options=options, rounds=rounds, save=folder / f"{name}-noisy.npy")
        for name in options.sides
    ]
    for number in range(rounds):
        print(f"{workload}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        # Another one begins each time, so that nobody always follows the same neighbour.
        shift = number % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            contestant.one_round()
            print(f"  {contestant.name}: {contestant.answers[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
        check_same_work(contestants)
    for contestant in contestants:
        contestant.end()
    return contestants


def check_same_work(contestants: Sequence[Contestant]) -> None:
    """All sides computed the same local steps on the same batches in their last round."""
    first = contestants[0]
    for other in contestants[1:]:
        for key in ("steps", "checksum"):
            if other.answers[-1][key] != first.answers[-1][key]:
                found, expected = other.answers[-1][key], first.answers[-1][key]
                raise SystemExit(f"{other.name}: {key}={found} in a round, but {first.name} has {key}={expected}")


def checked(contestant: Contestant, *, clean: Mapping[str, Model], noisy: Model) -> str:
    """Compares the models after one round with the plain loop's, and the noise with what was asked for."""
    about, own = contestant.about, clean[contestant.name]
    distance = float(np.linalg.norm(own - clean[REFERENCE])) / about["clip_bound"]
    if distance > DIFFERENCE_ALLOWED["bfloat16" if about["device"] != "cpu" else about["precision"]]:
        raise SystemExit(
            f"{contestant.name}: after one round its model lies {distance:.2g} clip bounds from the loop's"
        )
    noise = float(np.std(noisy - own)) / about["noise_std_mean"]
    if abs(noise - 1) > NOISE_ALLOWED:
        raise SystemExit(f"{contestant.name}: adds {noise:.3f} of the noise asked for")
    return f"{distance:.0e}, {noise:.3f}"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    side: str
    runs_as: str
    seconds: str
    audio_rate: str
    ratio: str
    check: str


def rows(contestants: Sequence[Contestant], *, warm_ups: int, against: str, checks: Mapping[str, str]) -> list[Row]:
    measured = {c.name: [a["seconds"] for a in c.answers[warm_ups:]] for c in contestants}
    lines = []
    for contestant in contestants:
        seconds = measured[contestant.name]
        ratios = [own / base for own, base in zip(seconds, measured[against], strict=True)]
        audio = statistics.median(a["audio_seconds"] / a["seconds"] for a in contestant.answers[warm_ups:])
        about = contestant.about
        versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        lines.append(
            Row(
                side=contestant.name,
                runs_as=f"{about['processes']} × {about['threads']} threads, {about['precision']}, {versions}",
                seconds=_with_quartiles(seconds, ".3f"),
                audio_rate=f"{audio:,.0f}",
                ratio=_with_quartiles(ratios, ".2f"),
                check=checks.get(contestant.name, ""),
            )
        )
    return lines


def _with_quartiles(values: Sequence[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def compare(workload: str, options: argparse.Namespace) -> tuple[list[Row], str]:
    """Check, measure, and sum up one workload; also the device it ran on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clean = models_without_noise(workload, options, folder) if options.checks else {}
        contestants = measure(workload, options, folder)
        checks = {
            c.name: checked(c, clean=clean, noisy=np.load(folder / f"{c.name}-noisy.npy"))
            for c in contestants
            if c.name in clean
        }
    found = rows(contestants, warm_ups=options.warm_ups, against=options.against, checks=checks)
    return found, str(contestants[0].about["device"])


def show(workload: str, found: Sequence[Row], *, title: str, against: str) -> str:
    """Print the table; returns it as Markdown."""
    header = ("side", "processes × threads", "s per round", "audio s/s", f"÷ {against}", "model, noise")
    table = Table(*header, title=title)
    lines = [f"## {workload}: {title}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in found:
        cells = (row.side, row.runs_as, row.seconds, row.audio_rate, row.ratio, row.check)
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
    Console(width=150).print(table)
    return "\n".join([*lines, ""])


PREFACE = """# Beside the peers

Written by `make bench` (`python benchmarks/peers.py … --markdown`), never by hand; [benchmarks.md](benchmarks.md) says
what is compared and what bounds it. {hardware}
"""


def hardware_name() -> str:
    """The processor and the system, as far as they are known."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    processor = names[0] if names else platform.processor() or "an unknown processor"
    return f"{CORES} cores of {processor}, {platform.system()}, Python {platform.python_version()}."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="names in peers/workload.py")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=CONTEST)
    parser.add_argument("--against", choices=SIDES, default="sottovoce", help="the side that ratios are taken to")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--checks", action=argparse.BooleanOptionalAction, default=True, help="compare models before timing"
    )
    parser.add_argument("--venvs", type=Path, default=ROOT, help="the folder that holds .venv-pfl and .venv-flower")
    parser.add_argument(
        "--packages", nargs="*", default=[], metavar=".VENV=FOLDER", help="a folder of packages instead of a venv"
    )
    parser.add_argument("--markdown", type=Path, help="write the tables here, too")
    options = parser.parse_args()
    if options.against not in options.sides:
        parser.error(f"--against {options.against}: expected one of --sides {' '.join(options.sides)}")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: expected at least 2, to have a spread")
    return options


def main() -> None:
    options, written = arguments(), []
    for workload in options.workloads:
        found, device = compare(workload, options)
        hardware = f"{CORES} CPU cores" if device == "cpu" else device
        title = f"{hardware}, {options.rounds} rounds each, in rotation: median with quartiles"
        written.append(show(workload, found, title=title, against=options.against))
    if options.markdown is not None:
        with write_atomically(options.markdown) as file:
            file.write("\n".join([PREFACE.format(hardware=hardware_name()), *written]).encode())


if __name__ == "__main__":
    main()
