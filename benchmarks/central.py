"""Central training and evaluation of the flagship's model on one GPU, in seconds of audio per second.

    python benchmarks/central.py [--size base] [--seconds 120 960] [--steps 20] [--rounds 5] [--only WORDS] [--profile]

A step is everything: waveforms from pinned memory to the device, features, SpecAugment, forward, backward, gradient
clipping, LARS, and the refresh of the bfloat16 copies. Waveforms are noise of the shapes that dynamic batches give
(utterances of 3 to 10 s, as in Common Voice, padding under 10 %): arithmetic does not depend on what is said. Padding
does not count as audio. All rows take turns, so that whatever slows the machine slows them alike; medians of rounds.

`--profile` says instead what the GPU is busy with during a step.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.augment import SpecAugmentSettings, apply_masks
from sottovoce.data.audio.batches import plan_epoch
from sottovoce.data.audio.features import compile_features, frame_lengths, normalise_features
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.flat.layout import Layout
from sottovoce.models import log_mel
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.family import (
    Family,
    StepDraws,
    accelerate_family,
    draw_steps,
    extract_float32_features,
    step_loss,
)
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.features import amplitude_mel
from sottovoce.models.transformer.settings import Settings, named_settings
from sottovoce.optimisers import LARS
from sottovoce.optimisers.weights import Weights
from sottovoce.training.run_context import deterministic_kernels

SEED = 1
AUGMENT = SpecAugmentSettings()
CHARACTERS_PER_SECOND = 14
# Audio seconds per second that the flagship's model should reach, by (dropout = layer-drop, seconds a step).
ASKED: Mapping[tuple[float, int], int] = {(0.0, 120): 4500, (0.0, 960): 6000, (0.3, 120): 6000, (0.3, 960): 8000}
# What a kernel's name says of its work; the first match counts.
WORK: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitk", "xmma"),
    "CTC": ("ctc", "_walk", "_occupancy"),
    "optimiser": ("_sums", "_step"),
    "layer norm": ("layer_norm", "gammabeta"),
    "dropout": ("dropout",),
    "copies": ("memcpy", "memset", "copy", "catarray"),
    "features": ("triton_", "fft"),
    "reductions": ("reduce",),
    "element-wise": ("elementwise",),
}


@dataclass(frozen=True)
class Row:
    """One thing to measure: steps of `settings` on batches of at most `seconds`."""

    name: str
    settings: Settings
    seconds: float
    family: Family[Settings, Any]
    batches: list[Waveforms]
    repeatable: bool = False

    @property
    def asked(self) -> str:
        wanted = ASKED.get((self.settings.dropout, int(self.seconds)))
        return f"≥ {wanted:,}" if wanted is not None else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base")
    parser.add_argument("--seconds", type=float, nargs="+", default=[120, 960])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="training rows with these words in their names, and no evaluation")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    weights, rows = training_rows(arguments.size, arguments.seconds, device)
    rows = [row for row in rows if arguments.only in row.name]
    if arguments.profile:
        for row in rows:
            print_profile(weights, row)
        return
    line_features, mask = compile_features(log_mel.normalised_log_mel), torch.compile(apply_masks)
    by_lines = partial(log_mel.extract_log_mel, by_lines=line_features)
    front_end = replace(FAMILY.front_end, extract_features=by_lines, mask=mask)
    features_compiled = replace(FAMILY, front_end=front_end)
    hardware = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    table = Table("what", "ms per step", "spread", "audio s/s", "asked for", title=f"benchmarks/central.py: {hardware}")
    for row, ms in zip(rows, measured(weights, rows, steps=arguments.steps, rounds=arguments.rounds), strict=True):
        rate = row.seconds / statistics.median(ms) * 1e3
        spread = f"{min(ms):.1f}–{max(ms):.1f}"
        table.add_row(row.name, f"{statistics.median(ms):.1f}", spread, f"{rate:,.0f}", row.asked)
    for seconds in arguments.seconds:
        for features, name in ((line_features, ""), (released_features, ", features as released")):
            table.add_row(*front_end_row(seconds, features, mask, device, name=name, steps=arguments.steps))
    for name, family in () if arguments.only else (("plain", FAMILY), ("features compiled", features_compiled)):
        table.add_row(*evaluation_row(10.0, name, family, device))
    Console(width=140).print(table)


# --- training --------------------------------------------------------------------------------------------------------


def training_rows(size: str, seconds: list[float], device: torch.device) -> tuple[Weights, list[Row]]:
    """Both drops and all batch sizes, plainly and as a long run computes, on one set of weights."""
    whole = named_settings(size, tokens=30, dropout=0.0, layer_drop=0.0)
    parameters = FAMILY.init(whole, generator=torch_stream(SEED, "init"))
    weights = Weights(Layout.of(parameters), LARS(), device=device, dtype=torch.bfloat16)
    weights.load(parameters)

    def fast(seconds: float) -> Family[Settings, Any]:
        return accelerate_family(
            FAMILY, weights.working, settings=whole, steps=10**6, batch_seconds=seconds, device=device
        )

    long, again = {s: fast(s) for s in seconds}, {s: fast(s) for s in seconds}  # what is recorded differs
    ready = {s: batches(s, total_seconds=8 * s + 200) for s in seconds}
    rows = [
        Row(
            name=f"{size}, {s:.0f} s a step, dropout = layer-drop = {drop}, {name}",
            settings=replace(whole, dropout=drop, layer_drop=drop),
            seconds=s,
            family=family,
            batches=ready[s],
            repeatable=family is again[s],
        )
        for s in seconds
        for drop in (0.0, 0.3)
        for name, family in (("plain", FAMILY), ("as in long runs", long[s]), ("the same, repeatable", again[s]))
    ]
    return weights, rows


def batches(max_seconds: float, *, total_seconds: float) -> list[Waveforms]:
    """Dynamic batches of noise, waveforms on the host, pinned."""
    rng = stream(SEED, "lengths")
    lengths = rng.integers(3 * SAMPLE_RATE, 10 * SAMPLE_RATE, size=int(total_seconds / 6.5))
    noise = rng.integers(-3000, 3000, size=10 * SAMPLE_RATE).astype("int16")
    epoch = plan_epoch(lengths, max_seconds=max_seconds, seed=SEED, epoch=0, fixed_shapes=True)
    whole = [b for b in epoch if b.padded_seconds > 0.8 * max_seconds]
    made = []
    for batch in whole:
        texts = [
            rng.integers(1, 30, size=int(lengths[r] / SAMPLE_RATE * CHARACTERS_PER_SECOND)).tolist() for r in batch.rows
        ]
        ready = pad_waveforms([noise[: lengths[r]] for r in batch.rows], texts, padded_samples=batch.padded_samples)
        made.append(replace(ready, samples_N=ready.samples_N.pin_memory()))
    return made


def sent(batch: Waveforms, device: torch.device) -> Waveforms:
    """`batch` on its way from pinned memory to the device."""
    return replace(batch, samples_N=batch.samples_N.to(device, non_blocking=True))


def drawn(batch: Waveforms, settings: Settings, number: int) -> StepDraws:
    """What chance decides in step `number`."""
    (draws,) = draw_steps(
        FAMILY,
        [len(batch)],
        samples=[batch.padded_UN.shape[1]],
        settings=settings,
        spec_augment=AUGMENT,
        generator=torch_stream(SEED, "step", number),
    )
    return draws


def step(weights: Weights, row: Row, number: int) -> float:
    """One whole step; returns the seconds of audio in it."""
    with deterministic_kernels(row.repeatable, weights.master.device):
        return _step(weights, row, number)


def _step(weights: Weights, row: Row, number: int) -> float:
    batch = sent(row.batches[number % len(row.batches)], weights.master.device)
    draws = drawn(batch, row.settings, number)
    features = extract_float32_features(row.family, batch, settings=row.settings)
    loss = step_loss(row.family, weights.working, features, settings=row.settings, draws=draws)
    weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
    weights.step(lr=0.0, max_norm=1.0)
    return batch.audio_seconds


def measured(weights: Weights, rows: list[Row], *, steps: int, rounds: int) -> list[list[float]]:
    """Milliseconds per step of every row and round, scaled to exactly `row.seconds` of audio."""
    for row in rows:
        for number in range(2 * len(row.batches)):  # every shape
            step(weights, row, number)
    times: list[list[float]] = [[] for _ in rows]
    for round_number in range(rounds):
        for row, own in zip(rows, times, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            audio = sum(step(weights, row, round_number * steps + number) for number in range(steps))
            torch.cuda.synchronize()
            own.append((time.perf_counter() - started) / audio * row.seconds * 1e3)
    return times


def print_profile(weights: Weights, row: Row, *, steps: int = 4) -> None:
    """Milliseconds of GPU work in a step, by kind and by kernel, and how long the GPU had nothing to do."""
    from torch.profiler import ProfilerActivity, profile

    for number in range(2 * len(row.batches)):
        step(weights, row, number)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        for number in range(steps):
            step(weights, row, number)
        torch.cuda.synchronize()
        whole = (time.perf_counter() - started) / steps * 1e3
    kernels = {e.key: e.self_device_time_total / steps / 1e3 for e in profiler.key_averages()}
    counts = {e.key: e.count / steps for e in profiler.key_averages()}
    kinds: dict[str, float] = {}
    for name, ms in kernels.items():
        kind = next((kind for kind, words in WORK.items() if any(w in name.lower() for w in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + ms
    busy = sum(kernels.values())
    print(f"\n{row.name}: {whole:.1f} ms a step under the profiler, GPU busy {busy:.1f} ms")
    print("  " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])))
    for name, ms in sorted(kernels.items(), key=lambda item: -item[1])[:12]:
        print(f"  {ms:7.2f} ms {counts[name]:6.0f} × {name[:100]}")


# --- the rest --------------------------------------------------------------------------------------------------------


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


def released_features(lines_UN: Tensor, lengths_U: Tensor) -> Tensor:
    """As `model.as_released` has them: neither compiled nor in pieces."""
    return normalise_features(amplitude_mel(lines_UN, lengths_U), frame_lengths(lengths_U))


def front_end_row(
    seconds: float,
    line_features: Callable[..., Tensor],
    mask: Callable[..., Tensor],
    device: torch.device,
    *,
    name: str,
    steps: int,
) -> tuple[str, ...]:
    batch = batches(seconds, total_seconds=2 * seconds + 200)[0]
    draws = drawn(batch, named_settings("tiny", tokens=30), 0)
    assert draws.masks is not None
    lines_UN, lengths_U, masks = batch.padded_UN.to(device), batch.lengths_U.to(device), draws.masks.to(device)
    frames_U = frame_lengths(lengths_U)
    ms = timed(lambda: mask(line_features(lines_UN, lengths_U), frames_U, draws=masks, settings=AUGMENT), steps=steps)
    label = f"features and SpecAugment, {seconds:.0f} s{name}"
    return (label, f"{ms:.2f}", "", f"{seconds / ms * 1e3:,.0f}", "≤ 3 % of a step")


@torch.no_grad()
def evaluation_row(hours: float, name: str, family: Family[Settings, Any], device: torch.device) -> tuple[str, ...]:
    """Waveforms on the host to token lists on the host, `small`, one pass."""
    settings = named_settings("small", tokens=30)
    start = family.init(settings, generator=torch_stream(SEED, "init"))
    parameters = {n: p.to(device, torch.bfloat16) for n, p in start.items()}
    assert family.recognition is not None
    emit = family.recognition.emit
    assert emit is not None, "log-probabilities for CTC are measured"
    ready = batches(1600, total_seconds=8000)
    passes = int(hours * 3600 / sum(batch.audio_seconds for batch in ready)) + 1

    def recognise(batch: Waveforms) -> None:
        features = extract_float32_features(family, sent(batch, device), settings=settings)
        decode_greedily(*emit(parameters, features, settings=settings))

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
    return (label, f"{elapsed * 1e3:.0f} in all", "", f"{audio / elapsed:,.0f}", "≥ 10,000")


if __name__ == "__main__":
    main()
