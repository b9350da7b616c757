"""Pretrained models in local training, one client after another and stacked, beside a plain transformers + peft loop.

    python benchmarks/pretrained.py --models moonshine-tiny-en wav2vec2-bert-300m --json out.json
    python benchmarks/pretrained.py --models wav2vec2-bert-600m --trains 'lora(r=8)' --stacks 16
    python benchmarks/pretrained.py --trains 'lora(r=8)' --check --profile 64 --turns 3 --seconds 0.7
    python benchmarks/pretrained.py --quick --device cpu --models tiny-encoder --check --profile 3

Every row does the same steps: from the server's part of the model, local steps of SGD on utterances of equal length,
and the difference as the client's update. `moonshine-tiny-en` is found through $SOTTOVOCE_MODELS; the others have
random weights. All ways of a model are made first, then measured in turns, each turn beginning with another one. A row
has the median and quartiles of its turns, and of its ratio to the plain loop in the same turn, and to our own clients
one after another (`times_single`). `peak_gib` is what a way
took of the device's memory while it was made and tried, the model's own weights included.

`short` rows have clients with three clips of one second each, as spoken words are.

`--check` compares updates in float32: of three clients of a stack, and of the same ones trained by themselves, with
those of the plain loop from the same adapters. More than 1e-4 apart, relative to their length, is an error. In bfloat16
it says how far each is from float32, the plain loop too. `--random-from FOLDER` is for a machine without the weights of
Moonshine: the other files of its folder, and random weights.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pretrained_ways import PLAIN, SHORT, USUAL, Bench, Clips, Step, find_model, make_bench, ours, plain
from torch import Tensor

from sottovoce.flat.layout import Layout
from sottovoce.models.huggingface import family as hf

MOST_APART = 1e-4


@dataclass(eq=False)
class Way:
    """How local training is done, and what was measured of it, in seconds of audio a second."""

    name: str
    audio_seconds: float
    make: Callable[[], Step]
    step: Step | None = None
    peak_gib: float | None = None
    obstacle: str | None = None
    rates: list[float] = field(default_factory=list)

    def try_out(self, device: torch.device) -> None:
        """Make it, and do three steps: the first ones set libraries up, and record."""
        cuda = device.type == "cuda"
        _forget_memory(device)
        before = torch.cuda.memory_reserved(device) if cuda else 0
        try:
            self.step = self.make()
            for _ in range(3):
                self.step()
        except torch.OutOfMemoryError:
            self.step, self.obstacle = None, "out of memory"
        if cuda:
            torch.cuda.synchronize(device)
            self.peak_gib = round((torch.cuda.max_memory_reserved(device) - before) / 2**30, 2)

    def measure(self, device: torch.device, *, seconds: float) -> None:
        assert self.step is not None
        _wait(device)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            self.step()
            _wait(device)
            count += 1
        self.rates.append(count * self.audio_seconds / (time.perf_counter() - begun))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.zeros(1, device=device)  # or there are no statistics yet
        torch.cuda.reset_peak_memory_stats(device)


def list_ways(bench: Bench, clips: Clips, stacks: Sequence[int]) -> list[Way]:
    ways = [
        Way(PLAIN, clips.audio_seconds, partial(plain, bench, clips)),
        Way("one after another", clips.audio_seconds, partial(ours, bench, clips, 1)),
        Way("one after another, not recorded", clips.audio_seconds, partial(ours, bench, clips, 1, steps=1)),
    ]
    if hf.stack_obstacle(bench.settings) is None:
        ways += [Way(f"stacks of {n}", n * clips.audio_seconds, partial(ours, bench, clips, n)) for n in stacks]
        name = f"stacks of {max(stacks)}, layers computed again"
        again = partial(ours, bench, clips, max(stacks), recompute=True)
        ways.append(Way(name, max(stacks) * clips.audio_seconds, again))
    return ways


def run_turns(ways: Sequence[Way], device: torch.device, *, turns: int, seconds: float) -> None:
    for way in ways:
        way.try_out(device)
    able = [way for way in ways if way.step is not None]
    for turn in range(turns):
        for place in range(len(able)):
            way = able[(turn + place) % len(able)]
            try:
                way.measure(device, seconds=seconds)
            except torch.OutOfMemoryError:
                way.step, way.obstacle = None, "out of memory beside the others"
                _forget_memory(device)
        able = [way for way in able if way.step is not None]


def summarise(way: Way, reference: Way, single: Way) -> dict[str, Any]:
    if way.obstacle is not None or not way.rates:
        return {"obstacle": way.obstacle, "peak_gib": way.peak_gib}
    found: dict[str, Any] = {
        "audio_seconds_per_second": round(statistics.median(way.rates)),
        "quartiles": [round(own) for own in _quartiles(way.rates)],
        "peak_gib": way.peak_gib,
    }
    if len(reference.rates) == len(way.rates):
        ratios = [own / other for own, other in zip(way.rates, reference.rates, strict=True)]
        found["times_plain"] = round(statistics.median(ratios), 2)
        found["times_plain_quartiles"] = [round(own, 2) for own in _quartiles(ratios)]
        if len(single.rates) == len(way.rates):
            found["times_single"] = round(
                statistics.median(own / other for own, other in zip(way.rates, single.rates, strict=True)), 2
            )
        found["ahead_in_turns"] = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
    return found


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def check_updates(folder: Path, train: str, device: torch.device, clips: Clips, clients: int) -> dict[str, float]:
    """How far updates are from those of the plain loop in float32, relative to their length: the worst of three."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, float] = {}
    expected: dict[int, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        bench = make_bench(folder, train, device, dtype)
        layout, features = Layout.of(bench.part.initial), bench.features(clips, clients)
        stack_NP = ours(bench, clips, clients, features=features)().clone()
        for client in sorted({0, clients // 2, clients - 1}):
            own = features.take(torch.arange(client * clips.count, (client + 1) * clips.count))
            theirs = plain(bench, clips, own)()
            updates = {
                "plain": layout.flatten({name: theirs[name] for name in layout.names}).float(),
                "single": ours(bench, clips, 1, features=own)().clone(),
                "stack": stack_NP[client],
            }
            expected.setdefault(client, updates["plain"])
            for name, update in updates.items():
                apart = float((update - expected[client]).norm() / expected[client].norm())
                found[f"{name}, {dtype}"] = max(apart, found.get(f"{name}, {dtype}", 0.0))
        _forget_memory(device)
    assert found[f"single, {torch.float32}"] <= MOST_APART, found
    assert found[f"stack, {torch.float32}"] <= MOST_APART, found
    return found


def print_profile(way: Way, device: torch.device) -> None:
    """The kernels, or a processor's operations, that take most of one step of a way."""
    assert way.step is not None
    kinds, cuda = [torch.profiler.ProfilerActivity.CPU], device.type == "cuda"
    if cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        way.step()
        _wait(device)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=90), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["moonshine-tiny-en", "wav2vec2-bert-300m"])
    parser.add_argument("--trains", nargs="+", default=["lora(r=8)", "all"])
    parser.add_argument("--stacks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--short", action="store_true", help="also clients with three clips of a second")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in each turn")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--check", action="store_true", help="compare updates with the plain loop's")
    parser.add_argument("--check-clients", type=int, default=16, help="of the stack that is compared")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="stacks of which to list the kernels")
    parser.add_argument("--random-from", type=Path, help="Moonshine's folder without its weights")
    parser.add_argument("--quick", action="store_true", help="two turns of a step or two, with stacks of 3")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.seconds, arguments.stacks, arguments.check_clients = 2, 0.05, [3], 3
    device, found = torch.device(arguments.device), []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            folder = find_model(name, Path(temporary), arguments.random_from)
            for train in arguments.trains:
                bench = make_bench(folder, train, device)
                if arguments.check and hf.stack_obstacle(bench.settings) is None:
                    apart = check_updates(folder, train, device, USUAL, arguments.check_clients)
                    found.append({"model": name, "train": train, "way": "updates", "apart": apart})
                    print(json.dumps(found[-1]), flush=True)
                for clips in (USUAL, SHORT) if arguments.short else (USUAL,):
                    ways = list_ways(bench, clips, arguments.stacks)
                    run_turns(ways, device, turns=arguments.turns, seconds=arguments.seconds)
                    said = f"{clips.count} clips of {clips.seconds} s"
                    for way in ways:
                        row = {"model": name, "train": train, "clips": said, "way": way.name}
                        found.append(row | summarise(way, ways[0], ways[1]))
                        print(json.dumps(found[-1]), flush=True)
                    for way in ways:
                        if way.step is not None and way.name in {f"stacks of {n}" for n in arguments.profile}:
                            print_profile(way, device)
                    del ways, way
                    _forget_memory(device)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
