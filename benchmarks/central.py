"""Central training and evaluation of the flagship's model on one GPU, in seconds of audio per second.

    python benchmarks/central.py [--size base] [--seconds 120 960] [--steps 20]

A step is everything: waveforms from pinned memory to the device, features, SpecAugment, forward, backward, gradient
clipping, LARS, and the refresh of the bfloat16 copies. Waveforms are noise of the shapes that dynamic batches give
(utterances of 3 to 10 s, as in Common Voice, padding under 10 %): arithmetic does not depend on what is said. Padding
does not count as audio.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from sottovoce.audio.augment import SpecAugmentSettings
from sottovoce.audio.batches import plan_epoch
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.models.ctc_transformer import Settings, init, named_settings
from sottovoce.models.decoding import greedy
from sottovoce.models.recogniser import (
    PLAIN,
    Compute,
    SpeechBatch,
    batch_loss,
    compiled,
    draw_step,
    log_probabilities,
    make_batch,
)
from sottovoce.optimisers import LARS
from sottovoce.seeds import stream, torch_stream
from sottovoce.training.weights import Weights

SEED = 1
AUGMENT = SpecAugmentSettings()
CHARACTERS_PER_SECOND = 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base")
    parser.add_argument("--seconds", type=float, nargs="+", default=[120, 960])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    hardware = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    table = Table("what", "ms per step", "audio s/s", "asked for", title=f"benchmarks/central.py: {hardware}")
    for drop, asked in ((0.0, {120: 4500, 960: 6000}), (0.3, {120: 6000, 960: 8000})):
        settings = named_settings(arguments.size, tokens=30, dropout=drop, layer_drop=drop)
        for name, compute in (("plain", PLAIN), ("features compiled", compiled())):
            for seconds in arguments.seconds:
                ms = training(settings, seconds, compute, device, steps=arguments.steps)
                label = f"{arguments.size}, {seconds:.0f} s a step, dropout = layer-drop = {drop}, {name}"
                wanted = f"≥ {asked[int(seconds)]:,}" if compute is not PLAIN and int(seconds) in asked else ""
                table.add_row(label, f"{ms:.1f}", f"{seconds / ms * 1e3:,.0f}", wanted)
                print(label, f"{ms:.1f} ms, {seconds / ms * 1e3:,.0f} audio s/s", flush=True)
    for seconds in arguments.seconds:
        table.add_row(*front_end_row(seconds, compiled(), device, steps=arguments.steps))
    for name, compute in (("plain", PLAIN), ("features compiled", compiled())):
        table.add_row(*evaluation_row(10.0, name, compute, device))
    Console(width=140).print(table)


def batches(max_seconds: float, device: torch.device, *, total_seconds: float) -> list[SpeechBatch]:
    """Dynamic batches of noise, waveforms on the host, pinned."""
    rng = stream(SEED, "lengths")
    lengths = rng.integers(3 * SAMPLE_RATE, 10 * SAMPLE_RATE, size=int(total_seconds / 6.5))
    noise = rng.integers(-3000, 3000, size=10 * SAMPLE_RATE).astype("int16")
    epoch = plan_epoch(lengths, max_seconds=max_seconds, seed=SEED, epoch=0, fixed_shapes=True)
    whole = [b for b in epoch.batches if b.padded_seconds > 0.8 * max_seconds]
    made = []
    for batch in whole:
        texts = [
            rng.integers(1, 30, size=int(lengths[r] / SAMPLE_RATE * CHARACTERS_PER_SECOND)).tolist() for r in batch.rows
        ]
        ready = make_batch([noise[: lengths[r]] for r in batch.rows], texts, padded_samples=batch.padded_samples)
        made.append(replace(ready, waveforms_BN=ready.waveforms_BN.pin_memory()))
    return made


def training(settings: Settings, seconds: float, compute: Compute, device: torch.device, *, steps: int) -> float:
    """Milliseconds per step, scaled to exactly `seconds` of audio (padding does not count as audio)."""
    weights = Weights(init(settings, generator=torch_stream(SEED, "init")), LARS(), device=device, dtype=torch.bfloat16)
    ready = batches(seconds, device, total_seconds=8 * seconds + 200)
    names = list(weights.working)

    def step(number: int) -> float:
        batch = ready[number % len(ready)]
        batch = replace(batch, waveforms_BN=batch.waveforms_BN.to(device, non_blocking=True))
        draws = draw_step(batch, settings=settings, spec_augment=AUGMENT, generator=torch_stream(SEED, "step", number))
        loss = batch_loss(weights.working, batch, settings=settings, spec_augment=AUGMENT, draws=draws, compute=compute)
        leaves = [weights.working[name] for name in names]
        weights.set_gradients(torch.autograd.grad(loss, leaves, allow_unused=True))
        weights.clip(1.0)
        weights.step(lr=0.0)
        return batch.audio_seconds

    for number in range(2 * len(ready)):  # every shape, and every depth that layer-drop is likely to leave
        step(number)
    torch.cuda.synchronize()
    rates = []
    for repeat in range(3):
        started = time.perf_counter()
        audio = sum(step(repeat * steps + number) for number in range(steps))
        torch.cuda.synchronize()
        rates.append((time.perf_counter() - started) / audio)
    return statistics.median(rates) * seconds * 1e3


def timed(work: Callable[[], object], *, steps: int) -> float:
    """Median milliseconds of `work` on the device."""
    times: list[float] = []
    for number in range(steps + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def front_end_row(seconds: float, compute: Compute, device: torch.device, *, steps: int) -> tuple[str, ...]:
    settings = named_settings("tiny", tokens=30)
    batch = batches(seconds, device, total_seconds=2 * seconds + 200)[0]
    draws = draw_step(batch, settings=settings, spec_augment=AUGMENT, generator=torch_stream(SEED, "step", 0))
    assert draws.masks is not None
    on_device = batch.waveforms_BN.to(device), batch.lengths_B.to(device), draws.masks.to(device)
    ms = timed(lambda: compute.inputs(*on_device, AUGMENT), steps=steps)
    return (f"features and SpecAugment, {seconds:.0f} s", f"{ms:.2f}", f"{seconds / ms * 1e3:,.0f}", "≤ 3 % of a step")


@torch.no_grad()
def evaluation_row(hours: float, name: str, compute: Compute, device: torch.device) -> tuple[str, ...]:
    """Waveforms on the host to token lists on the host, `small`, one pass."""
    settings = named_settings("small", tokens=30)
    parameters = {
        n: p.to(device, torch.bfloat16) for n, p in init(settings, generator=torch_stream(SEED, "init")).items()
    }
    ready = batches(1600, device, total_seconds=8000)
    passes = int(hours * 3600 / sum(batch.audio_seconds for batch in ready)) + 1

    def recognise(batch: SpeechBatch) -> None:
        batch = replace(batch, waveforms_BN=batch.waveforms_BN.to(device, non_blocking=True))
        greedy(*log_probabilities(parameters, batch, settings=settings, compute=compute))

    for batch in ready:
        recognise(batch)
    torch.cuda.synchronize()
    started, audio = time.perf_counter(), 0.0
    for _ in range(passes):
        for batch in ready:
            recognise(batch)
            audio += batch.audio_seconds
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    label = f"small, evaluation of {audio / 3600:.1f} h, {name}"
    return (label, f"{elapsed * 1e3:.0f} in all", f"{audio / elapsed:,.0f}", "≥ 10,000")


if __name__ == "__main__":
    main()
