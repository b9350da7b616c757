"""Processor time of what the demo does on a CPU: speaking, features, clipping, and rounds of `tiny` in one process.

    python benchmarks/demo_cpu.py [--rounds 4]

One thread. Processor seconds, because other work on the machine then counts for little; to compare two versions, run
both in turn. `floor` and `sequential` are sides of benchmarks/peers.py: the local steps alone, and whole rounds.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import pack_waveforms, pad_waveforms
from sottovoce.data.corpora import synthetic
from sottovoce.data.corpora.synthetic import espeak
from sottovoce.flat.layout import Layout, tensor_layers
from sottovoce.models.log_mel import extract_log_mel
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import named_settings
from sottovoce.privacy.clipping import Clipper

REPEATS = 9


def used_ms() -> float:
    """Processor milliseconds of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return 1e3 * sum(one.ru_utime + one.ru_stime for one in used)


def show(what: str, measured: list[float]) -> None:
    low, middle, high = statistics.quantiles(measured, n=4, method="inclusive")
    print(f"{what}: {middle:.2f} ms ({low:.2f}-{high:.2f})", flush=True)


def timed(work: Callable[[], object], *, times: int) -> list[float]:
    work()
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began) / times * 1e3)
    return found


def speak(task: str, *, users: int, hours: float, seed: int) -> None:
    """Ten speakers at a time; a process of espeak-ng that waits is ended to be counted."""
    speakers = synthetic.read_synthetic(task, users=users, hours=hours, seed=seed).speakers
    found = []
    for first in range(0, 30, 10):
        began = used_ms()
        for speaker in speakers[first : first + 10]:
            synthetic.render_speaker(speaker)
        getattr(espeak, "_end_idle", lambda: None)()  # earlier versions had none
        found.append((used_ms() - began) / 10)
    show(f"a speaker of {task}", found)


def extract(seconds: float, shortest: float, longest: float) -> None:
    rng = stream(1, "lengths")
    samples: list[NDArray[np.int16]] = []
    while sum(len(own) for own in samples) < seconds * 16_000:
        count = int(rng.uniform(shortest, longest) * 16_000)
        samples.append(rng.integers(-3000, 3000, size=count).astype(np.int16))
    for name, recordings in (("packed", pack_waveforms(samples)), ("in padded lines", pad_waveforms(samples))):
        show(f"features of {seconds:g} s {name}", timed(partial(extract_log_mel, recordings), times=3))


def clip() -> None:
    parameters = FAMILY.init(named_settings("tiny", tokens=27), generator=torch_stream(1, "init"))
    layout = Layout.of(parameters)
    update, total = layout.flatten(parameters), layout.zeros()
    clipper = Clipper(layers=tensor_layers(layout), clip_bound=0.1)
    show("an update of tiny clipped and added", timed(lambda: clipper.accumulate(total, update), times=30))


def make_rounds(count: int) -> None:
    import sottovoce_side as side  # a script beside its module `workload`
    from workload import WORKLOADS, Tally, Task

    task = Task(workload=WORKLOADS["tiny"], rounds=count + 1, device=torch.device("cpu"))
    sides = {"floor": side.floor(task), "sequential": side.rounds(task, "tiny", "sequential")}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(count + 1):
        for name, one_round in sides.items():
            began = time.process_time()
            one_round(number, Tally())
            found[name].append((time.process_time() - began) * 1e3)
    for name, measured in found.items():
        show(f"a round of tiny, {name}", measured[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds of tiny; 0 for none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speak("digits-noise", users=1500, hours=3, seed=1)
    speak("digits-studio", users=34, hours=0.35, seed=2)
    extract(28, 1, 4)
    extract(60, 2, 8)
    extract(7, 0.8, 2)
    clip()
    if options.rounds > 1:
        make_rounds(options.rounds)


if __name__ == "__main__":
    main()
