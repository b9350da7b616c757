"""How long the export of the base model with its guarantee takes, and the check of it by its receiver; and memory.

    python benchmarks/verify.py [--size base] [--rounds 2000]

A release is made up: random weights of the size, and a ledger of as many rounds as a paper's run, written by the ledger
itself. Each command then runs in a process of its own, `export` also with a signature; time and peak memory are its
own, imports included.
"""

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sottovoce.config import load_recipe
from sottovoce.config.loading import as_yaml
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import digest_recogniser, save_recogniser
from sottovoce.network.keys import make_node
from sottovoce.privacy.description import ledger_header
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings
from sottovoce.training.start_model import init_start_model

# The commands of a fresh interpreter, and its peak memory: that of a child would begin with its parent's.
_COMMAND = (
    "import sys; from sottovoce.cli import main\n"
    "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
    "peak = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
    "print(peak[0].split()[1], 'torch' in sys.modules)"
)
RECIPE = """
about: a release that was made up, to be measured
data: {{store: nobody}}
model: {{size: {size}}}
federation:
  steps: {rounds}
  cohort_size: 1024
  local: {{batch_seconds: 4, lr: 0.1, local_steps: 1}}
  server: {{optimiser: {{name: lamb}}, schedule: {{name: constant, lr: 0.01}}}}
  privacy: {{clip_bound: 0.01, noise_multiplier: 2.048, delta: 1e-9, mode: secure}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", help="of the CTC transformer")
    parser.add_argument("--rounds", type=int, default=2000, help="in the ledger")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        parameters = make_release(place / "run", size=arguments.size, rounds=arguments.rounds)
        make_node(place / "key")
        table = Table(title=f"{parameters / 1e6:.1f}M parameters, {arguments.rounds:,} rounds in the ledger")
        for heading in ("", "seconds", "peak memory (MiB)", "torch"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, words in {
            "export": ["export", place / "run", "--out", place / "model"],
            "export --sign": ["export", place / "run", "--out", place / "signed", "--sign", place / "key"],
            "verify": ["verify", place / "model"],
            "verify --key": ["verify", place / "signed", "--key", place / "key" / "node.pub"],
        }.items():
            seconds, mebibytes, has_torch = measure(*map(str, words))
            table.add_row(name, f"{seconds:.1f}", f"{mebibytes:,.0f}", has_torch)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    Console().print(table)


def make_release(run: Path, *, size: str, rounds: int) -> int:
    """The folder of a release that nobody made; how many parameters its model has."""
    run.mkdir()
    (run.parent / "recipe.yaml").write_text(RECIPE.format(size=size, rounds=rounds), encoding="utf-8")
    recipe = load_recipe(str(run.parent / "recipe.yaml"))
    config = as_yaml(recipe)
    (run / "config.yaml").write_text(config, encoding="utf-8")
    tokens = CharacterTokens("abcdefghijklmnopqrstuvwxyz ")
    start = init_start_model(recipe, tokens, None, language="en")
    made = replace(start, about={"recipe": recipe.about, "step": rounds})
    shapes = {name: tuple(p.shape) for name, p in made.parameters.items()}
    settings = PrivacySettings(
        population_size=34_753,
        privacy_unit="speaker",
        cohort_size=1024,
        clip_bound=0.01,
        noise_multiplier=2.048,
        delta=1e-9,
        mode=Mode.SECURE,
    )
    plan = Plan(settings, Layout(tuple(shapes), tuple(shapes.values())))
    digest = hashlib.sha256(config.encode()).hexdigest()
    ledger = Ledger(
        run / "ledger.jsonl", header=ledger_header(plan, run=recipe.about, central_steps=rounds, recipe=digest)
    )
    for step in range(rounds):
        ledger.intend(plan.event, step=step, clip_bound=0.01, parameters=f"made up {step}", cohort="0" * 64)
    ledger.commit(step=rounds - 1, result="made up", model=digest_recogniser(made))
    ledger.close()
    (run / "model").mkdir()
    save_recogniser(made, run / "model")
    return sum(p.numel() for p in made.parameters.values())


def measure(*arguments: str) -> tuple[float, float, str]:
    """Seconds, peak memory and whether torch was loaded."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begun
    kibibytes, has_torch = done.stdout.splitlines()[-1].split()
    return seconds, int(kibibytes) / 1024, "loaded" if has_torch == "True" else "not loaded"


if __name__ == "__main__":
    main()
