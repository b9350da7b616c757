"""How seconds and memory grow with a round's clients, its population, its model and its processes.

    python benchmarks/growth.py clients [--engine stacked] [--cohorts 64 512 4096 50000] [--steps 4] [--no-caches]
    python benchmarks/growth.py plans
    python benchmarks/growth.py population
    python benchmarks/growth.py parameters
    python benchmarks/growth.py processes
    python benchmarks/growth.py write            # the tables of docs/growth.md, with fits and the cluster's estimate

What is measured is kept in benchmarks/growth.json, or in the file that `--json` names. On a GPU:

    python benchmarks/growth.py parameters --device cuda --json FILE
    python benchmarks/growth.py clients --device cuda --json FILE
    python benchmarks/growth.py write --json FILE          # takes over what the file has
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from growth_of import clients, page, parameters, plans, population, processes
from rich.console import Console
from rich.table import Table

from sottovoce.base.files import read_json, write_json


def keep(name: str, measured: dict[str, Any], path: Path) -> None:
    """Put `measured` in the place of what the file says of `name`."""
    kept = read_json(path) if path.exists() else {}
    write_json(path, dict(sorted((kept | {name: measured}).items())))


def measure(asked: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """What is asked for, and what to call it."""
    device, where = torch.device(asked.device), "" if asked.device == "cpu" else " cuda"
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    match asked.what:
        case "clients":
            on_gpu = device.type == "cuda"
            engine = asked.engine or ("stacked" if on_gpu else "sequential")
            name = f"clients {engine}{where}{' without caches' if asked.no_caches else ''}"
            return name, clients.measure(
                asked.cohorts or (clients.COHORTS[:3] if on_gpu else clients.COHORTS),
                engine=engine,
                device=device,
                seconds=asked.seconds or (3.0 if on_gpu else 0.2),
                steps=asked.steps,
                caches=not asked.no_caches,
            )
        case "plans":
            return "plans", plans.measure()
        case "population":
            return "population", population.measure(asked.populations)
        case "parameters":
            seconds = asked.seconds or (20.0 if device.type == "cuda" else 1.0)
            return f"parameters{where}", parameters.measure(asked.sizes, device=device, seconds=seconds)
        case _:
            return "processes", processes.measure(processes.WORLDS, size="tiny")


def show(name: str, measured: dict[str, Any]) -> None:
    """The rows as a table, the last thing that is printed."""
    for part in ("points", "rounds", "plans", "sizes", "populations", "processes"):
        if rows := measured.get(part):
            table = Table(*rows[0], title=f"{name}: {measured['machine']}")
            for row in rows:
                table.add_row(*(str(row.get(column, "")) for column in rows[0]))
            Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clients", "plans", "population", "parameters", "processes", "write"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda, of clients and parameters")
    parser.add_argument("--json", type=Path, default=page.KEPT, help="where to keep what is measured")
    parser.add_argument("--seconds", type=float, help="of audio in each local step")
    parser.add_argument("--engine", choices=["sequential", "stacked"])
    parser.add_argument("--cohorts", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=1, help="local steps of each client")
    parser.add_argument("--no-caches", action="store_true", help="keep nothing of a client's speech after its turn")
    parser.add_argument("--populations", type=int, nargs="+", default=population.POPULATIONS)
    parser.add_argument("--sizes", nargs="+", default=[*parameters.SIZES], choices=[*parameters.SIZES])
    asked = parser.parse_args()
    if asked.what == "write":
        if asked.json != page.KEPT:  # what another machine has measured
            for name, measured in read_json(asked.json).items():
                keep(name, measured, page.KEPT)
        page.write()
        return
    torch.set_num_threads(1)
    name, measured = measure(asked)
    keep(name, measured, asked.json)
    show(name, measured)


if __name__ == "__main__":
    main()
