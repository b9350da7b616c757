"""Federations over a network, with real processes on this machine: what a round takes, sends and teaches.

    python benchmarks/deployment.py rounds           eight nodes of the demo: seconds beyond training, bytes, to the bit
    python benchmarks/deployment.py silos            the demo's crowd in ten silos: WER, ε, seconds and bytes, accounts
    python benchmarks/deployment.py sums             16 nodes, 5M numbers, sums that the server cannot open
    python benchmarks/deployment.py lora             what base with LoRA (r = 16) sends, to and from eight nodes
    python benchmarks/deployment.py start            its frozen gigabyte, to one node, once
    python benchmarks/deployment.py pretrained       eight real people, Moonshine tiny with LoRA (r = 8): bytes, seconds

It needs the extra `network` (`make setup` installs it). `rounds`, `silos` and `pretrained` run
`sottovoce serve` and `sottovoce join` as they are, each in a process, and a simulation on the same grid, whose model
and ledger must come out the same to the bit. `pretrained` also needs the extra `hf`, $SOTTOVOCE_MODELS with
moonshine-tiny-en and $SOTTOVOCE_DATA with speech-commands-3w. The others have nodes that send fixed vectors
(`networks/light_node.py`).
Figures go to benchmarks/deployment.json, one entry a command. Wall seconds are of a machine that all processes share;
processor seconds count them apart.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from networks.light import Fleet
from networks.ways import EIGHT, PRETRAINED, SILOS, measure_ways

from sottovoce.base.files import write_json

KEPT = Path(__file__).with_suffix(".json")
FLOAT32_BYTES = 4
BASE_LORA = 7_077_888  # numbers that base trains with lora(r=16), of 255,800,093
BASE_BYTES = FLOAT32_BYTES * 255_800_093

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MEASURED])
    parser.add_argument("--folder", type=Path, default=None, help="where keys, stores and runs go (a temporary one)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of `silos`: a run in every way for each")
    parser.add_argument("--share", type=float, default=1.0, help="of `start`: so much of it, where memory is short")
    parser.add_argument("--rounds", type=int, default=5, help="of `sums`, `lora`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = MEASURED[arguments.what](folder, arguments)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    write_json(KEPT, kept | {arguments.what: {"machine": machine, **found}})


def rounds(folder: Path, arguments: argparse.Namespace) -> Figures:
    return measure_ways(EIGHT, folder, seeds=[0])


def silos(folder: Path, arguments: argparse.Namespace) -> Figures:
    return measure_ways(SILOS, folder, seeds=arguments.seeds)


def sums(folder: Path, arguments: argparse.Namespace) -> Figures:
    found = Fleet(folder=folder / "sixteen", nodes=16, length=5_000_000, secure=True).measure(arguments.rounds)
    _show("16 nodes, 5M numbers, secure", found)
    return found


def lora(folder: Path, arguments: argparse.Namespace) -> Figures:
    """Open and secure in turn."""
    found: dict[str, Figures] = {}
    for secure in (False, True):
        name = "secure" if secure else "open"
        fleet = Fleet(folder=folder / "eight", nodes=8, length=BASE_LORA, secure=secure)
        found[name] = fleet.measure(arguments.rounds)
        _show(f"8 nodes, base with lora(r=16), {name}", found[name])
    return found


def start(folder: Path, arguments: argparse.Namespace) -> Figures:
    size = int(arguments.share * BASE_BYTES)
    fleet = Fleet(folder=folder / "one", nodes=1, length=1000, secure=False, start=os.urandom(size))
    begun = time.process_time()
    found = fleet.measure(0) | {"bytes": size, "server_processor_seconds": time.process_time() - begun}
    print(
        f"{size / 1e9:.2f} GB to one node: {found['ready_seconds']:.1f} s, processor of the server "
        f"{found['server_processor_seconds']:.1f} s; the node's memory {found['node_peak_mib'][0]:,.0f} MiB"
    )
    return found


def pretrained(folder: Path, arguments: argparse.Namespace) -> Figures:
    found = measure_ways(PRETRAINED, folder, seeds=[0])
    served = {name: one for name, one in found["runs"].items() if "bytes_up" in one}
    for name, one in served.items():
        sent = one["communication"]
        one["whole_model_bytes"] = FLOAT32_BYTES * sent["frozen_parameters"]  # computed: corrections are no part of it
        low, high = one["round_seconds_range"]
        print(
            f"{name}: a node and round {one['bytes_up'] / 1e6:.3f} MB up, {one['bytes_down'] / 1e6:.3f} MB down (the "
            f"update itself {sent['bytes_up'] / 1e6:.3f}, the whole model {one['whole_model_bytes'] / 1e6:.1f}); "
            f"{low:.1f}–{high:.1f} s a round"
        )
    return found


def _show(title: str, found: Mapping[str, Any]) -> None:
    answers = found["node_answers_processor_seconds"]
    protocol = [sum(answers[kind][node] for kind in answers if kind != "training") for node in range(found["nodes"])]
    taken = [*chain(*found["node_processor_seconds"])]
    print(
        f"{title}: round {_spread(found['round_seconds'])} s; processor: "
        f"server {_spread(found['server_processor_seconds'])} s, a node {_spread(taken)} s, "
        f"of it answers {_spread(protocol)} s; until all were ready {found['ready_seconds']:.1f} s; "
        f"a node's memory {_spread(found['node_peak_mib'])} MiB",
        flush=True,
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


MEASURED: Mapping[str, Callable[[Path, argparse.Namespace], Figures]] = {
    "rounds": rounds,
    "silos": silos,
    "sums": sums,
    "lora": lora,
    "start": start,
    "pretrained": pretrained,
}


if __name__ == "__main__":
    main()
