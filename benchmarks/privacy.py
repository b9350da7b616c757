"""What privacy costs around a client's training: clip + accumulate, noise, fingerprint, accounting and the ledger.

    python benchmarks/privacy.py [--device cuda] [--blocks 36] [--rounds 15] [--sweep]

Updates have the shapes of the base model (255.7M parameters in 294 tensors with --blocks 36). Variants are measured
interleaved, each time as several calls back to back; the table shows the median of the time per call, the bytes that
must move at least, and how long the device needs to move as many by plain copying (the floor).
"""

import argparse
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.flat import segments
from sottovoce.flat.layout import ALIGNMENT, Layout, tensor_layers
from sottovoce.privacy.clipping import Clipper, Normalise, Share, layer_scales
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.mechanism import optimal_banded, optimal_blt
from sottovoce.privacy.noise import add_gaussian, add_secure_gaussian, grid_spacing
from sottovoce.privacy.randomness import SecureRandom
from sottovoce.privacy.round_noise import CorrelatedNoise
from sottovoce.privacy.strategies import Strategy

CLIP_BOUND = 0.01
Variants = dict[str, tuple[Callable[[], object], float]]  # name: (call, bytes moved at least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=None, help="transformer blocks (36 on cuda, 4 on cpu)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--calls", type=int, default=None, help="calls back to back in a round (10 on cuda, 1 on cpu)")
    parser.add_argument("--sweep", action="store_true", help="also try chunk sizes and warps of the Triton kernels")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    layout = base_layout(arguments.blocks or (36 if cuda else 4))
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu"
    print(f"{name}, torch {torch.__version__}, {layout.dimension / 1e6:.1f}M in {len(layout.names)} tensors")

    variants = clip_variants(layout, device)
    if cuda:
        variants |= compiled_variant(layout, device)
    if arguments.sweep and cuda:
        variants |= sweep_variants(layout, device)
    variants |= noise_variants(layout, device)
    source = torch.zeros(layout.flat_size, device=device)
    target = torch.zeros_like(source)
    variants = {"copy (bandwidth)": (lambda: target.copy_(source), 8.0 * layout.flat_size)} | variants
    times = measure(variants, device, arguments.rounds, arguments.calls or (10 if cuda else 1))
    show(variants, times)
    if importlib.util.find_spec("dp_accounting") is None:
        print("accounting and ledger: left out, dp-accounting is not installed")
    else:
        for line in (*accounting_lines(), ledger_line(steps=2000)):
            print(line)


def base_layout(blocks: int) -> Layout:
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (1536, 80, 7), "conv.bias": (1536,)}
    for block in range(blocks):
        for tensor, shape in {
            "ln1.weight": (768,),
            "ln1.bias": (768,),
            "wqkv": (2304, 768),
            "wf": (768, 768),
            "ln2.weight": (768,),
            "ln2.bias": (768,),
            "w1": (3072, 768),
            "w2": (768, 3072),
        }.items():
            shapes[f"blocks.{block}.{tensor}"] = shape
    shapes |= {"norm.weight": (768,), "norm.bias": (768,), "out.weight": (30, 768), "out.bias": (30,)}
    return Layout(tuple(shapes), tuple(shapes.values()))


def random_update(layout: Layout, device: torch.device, *lead: int) -> Tensor:
    update = layout.zeros(*lead, device=device)
    update.normal_(generator=torch_stream(1, "update", device=device))
    layout.clear_padding(update)
    return update.mul_(0.7 / layout.dimension**0.5)


def clip_variants(layout: Layout, device: torch.device) -> Variants:
    """One pass to know the norm (4 bytes per parameter), one to read update and total and write total (12)."""
    update, total = random_update(layout, device), layout.zeros(device=device)
    tensors, totals = list(layout.views(update).values()), list(layout.views(total).values())
    layers, moved = tensor_layers(layout), 16.0 * layout.flat_size

    def foreach_global() -> None:
        norm = torch.stack(torch._foreach_norm(tensors)).norm()
        scale = (CLIP_BOUND / norm).clamp(max=1.0)
        torch._foreach_add_(totals, torch._foreach_mul(tensors, scale))

    def foreach_per_layer() -> None:
        bound = CLIP_BOUND / len(tensors) ** 0.5
        for tensor, to, norm in zip(tensors, totals, torch._foreach_norm(tensors), strict=True):
            to.addcmul_(tensor, (bound / norm).clamp(max=1.0))

    def ours(share: Share, normalise: Normalise = Normalise.NEVER) -> Callable[[], object]:
        clipper = Clipper(layers=layers, clip_bound=CLIP_BOUND, share=share, normalise=normalise)
        return lambda: clipper.accumulate(total, update)

    grid = grid_spacing(clip_bound=CLIP_BOUND, most_users=34_753, std=CLIP_BOUND)
    exact, exact_total = (
        Clipper(layers=layers, clip_bound=CLIP_BOUND, grid=grid),
        layout.zeros(device=device, dtype=torch.float64),
    )
    clients = 4
    stack = random_update(layout, device, clients)
    stacked = Clipper(layers=layers, clip_bound=CLIP_BOUND, share=Share.DIM)
    return {
        "foreach, global (naive)": (foreach_global, moved),
        "foreach, per layer (naive)": (foreach_per_layer, moved),
        "clip + accumulate, global": (ours(Share.GLOBAL), moved),
        "clip + accumulate, uniform": (ours(Share.UNIFORM), moved),
        "clip + accumulate, dim": (ours(Share.DIM), moved),
        "clip + accumulate, dim, normalise": (ours(Share.DIM, Normalise.ABOVE), moved),
        "clip + accumulate, secure (grid)": (lambda: exact.accumulate(exact_total, update), 24.0 * layout.flat_size),
        f"clip + accumulate, dim, {clients} stacked": (
            lambda: stacked.accumulate(total, stack),
            (8.0 * clients + 8.0) * layout.flat_size,
        ),
        "  its first half: layer norms": (lambda: segments.layer_norms(update, layers), 4.0 * layout.flat_size),
    }


def compiled_variant(layout: Layout, device: torch.device) -> Variants:
    """The same from torch.compile: rows of 32 elements (a layer is a whole number of them) instead of own kernels."""
    update, total = random_update(layout, device), layout.zeros(device=device)
    rows = torch.tensor(layout.padded_sizes, device=device) // ALIGNMENT
    layer_of_row = torch.repeat_interleave(torch.arange(len(rows), device=device), rows)
    clipper = Clipper(layers=tensor_layers(layout), clip_bound=CLIP_BOUND, share=Share.DIM)
    bounds = torch.tensor(clipper.layer_bounds, dtype=torch.float64, device=device)

    @torch.compile(dynamic=False)
    def step(update: Tensor, total: Tensor) -> None:
        squares = update.view(-1, ALIGNMENT).double().square().sum(1)
        norms = torch.zeros_like(bounds).index_add_(0, layer_of_row, squares).sqrt()
        scales = layer_scales(
            norms,
            norms.norm(),
            bounds=bounds,
            clip_bound=CLIP_BOUND,
            share=Share.DIM,
            normalise=Normalise.NEVER,
        )
        total.view(-1, ALIGNMENT).add_(update.view(-1, ALIGNMENT) * scales[layer_of_row].float()[:, None])

    return {"torch.compile, dim": (lambda: step(update, total), 16.0 * layout.flat_size)}


def sweep_variants(layout: Layout, device: torch.device) -> Variants:
    from sottovoce.flat import segments_triton as kernels

    update, total, layers = random_update(layout, device), layout.zeros(device=device), tensor_layers(layout)
    scales = torch.full((len(layers.names),), 0.5, dtype=torch.float64, device=device)

    def both(chunk: int, warps: int) -> Variants:
        return {
            f"  norms, chunk {chunk}, warps {warps}": (
                lambda: kernels.layer_norms_on_gpu(update, layers, chunk=chunk, warps=warps),
                4.0 * layout.flat_size,
            ),
            f"  add, chunk {chunk}, warps {warps}": (
                lambda: kernels.add_scaled_on_gpu(total, update, scales, layers, chunk=chunk, warps=warps),
                12.0 * layout.flat_size,
            ),
        }

    settings = [(chunk, warps) for chunk in (1024, 2048, 4096, 8192, 16384) for warps in (4, 8, 16)]
    return {name: value for chunk, warps in settings for name, value in both(chunk, warps).items()}


def noise_variants(layout: Layout, device: torch.device) -> Variants:
    """Noise is made on the chip: total is read and written, nothing else must move."""
    total = layout.zeros(device=device)
    secure_total = layout.zeros(device=device, dtype=torch.float64)
    generator = torch_stream(1, "noise", device=device)
    grid = grid_spacing(clip_bound=CLIP_BOUND, most_users=34_753, std=CLIP_BOUND)

    def at_once() -> None:
        total.add_(torch.randn(total.shape, generator=generator, device=device), alpha=0.01)

    def secure() -> None:
        add_secure_gaussian(secure_total, std=0.01, grid=grid, random=SecureRandom(), layout=layout)

    def correlated(strategy: Strategy) -> Callable[[], object]:
        def fresh(_: int) -> Tensor:
            return add_gaussian(layout.zeros(device=device), std=1.0, generator=generator, layout=layout)

        rows = CorrelatedNoise(strategy, layout=layout, draw=fresh, device=device)
        return lambda: total.add_(rows.row(rows.rows), alpha=0.01)

    variants: Variants = {
        "noise, at once (naive)": (at_once, 8.0 * layout.flat_size),
        "noise": (
            lambda: add_gaussian(total, std=0.01, generator=generator, layout=layout),
            8.0 * layout.flat_size,
        ),
        "fingerprint of the parameters": (lambda: fingerprint_tensor(total), 4.0 * layout.flat_size),
        # The memory is read, and one row of it, or all, is written.
        "noise, banded, 8": (correlated(optimal_banded(steps=2000, bands=8, cycle=8)), 40.0 * layout.flat_size),
        "noise, BLT, 3": (correlated(optimal_blt(steps=2000, buffers=3, cycle=100)), 32.0 * layout.flat_size),
    }
    if importlib.util.find_spec("cryptography") is None:
        print("noise, secure: left out, cryptography is not installed")
        return variants
    return variants | {"noise, secure": (secure, 16.0 * layout.flat_size)}


def measure(variants: Variants, device: torch.device, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call, round by round; every variant runs once beforehand, to compile and to warm up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    slow = {name for name, (call, _) in variants.items() if timed(call, 1, wait) > 1.0}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name, (call, _) in variants.items():
            if name not in slow or turn < 3:
                times[name].append(timed(call, 1 if name in slow else calls, wait))
    return times


def timed(call: Callable[[], object], calls: int, wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - started) / calls


def show(variants: Variants, times: dict[str, list[float]]) -> None:
    """In plain text, so that it runs on a machine with little more than torch."""
    copy_bytes = next(iter(variants.values()))[1]
    bandwidth = copy_bytes / statistics.median(next(iter(times.values())))
    print(f"{'per call':<36}{'median ms':>11}{'spread':>22}{'GB at least':>13}{'floor ms':>10}{'of floor':>10}")
    for name, (_, moved) in variants.items():
        median, floor = statistics.median(times[name]), moved / bandwidth
        spread = f"{min(times[name]) * 1e3:.3f}–{max(times[name]) * 1e3:.3f}"
        floors = f"{moved / 1e9:>13.2f}{floor * 1e3:>10.3f}{median / floor:>9.2f}×"
        print(f"{name:<36}{median * 1e3:>11.3f}{spread:>22}{floors}")
    ours = {name: statistics.median(values) for name, values in times.items()}
    ratio = ours["clip + accumulate, dim"] / ours["clip + accumulate, global"]
    naive = ours["foreach, global (naive)"] / ours["clip + accumulate, global"]
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s; dim ÷ global {ratio:.3f}; naive ÷ ours {naive:.2f}")


def accounting_lines() -> list[str]:
    """A plan (RDP and PLD), a calibration and a choice of noise, nothing cached, at the paper's private rows."""
    from sottovoce.privacy import accounting, calibration, rdp
    from sottovoce.privacy.noise_planner import NoiseRequest, plan_noise
    from sottovoce.privacy.planner import plan_run

    def seconds(**noise: float) -> float:
        rdp.release_curve.cache_clear()
        accounting.epsilon.cache_clear()
        calibration.calibrate_run_noise.cache_clear()
        started = time.perf_counter()
        plan_run(3_475_300, cohort_size=102_400, central_steps=2006, delta=1e-9, **noise)  # type: ignore[arg-type]
        return time.perf_counter() - started

    plans = ", ".join(f"z={z:g} {seconds(noise_multiplier=z):.2f} s" for z in (0.5, 0.6144, 1.024, 2.048))
    targets = ", ".join(f"ε={target:g} {seconds(target_epsilon=target):.2f} s" for target in (1, 8))
    started = time.perf_counter()
    plan_noise(NoiseRequest(max_cohort=204_800, central_steps=2034, delta=1e-9, sigma_dp=3e-6, target_epsilon=8.0))
    return [
        f"plan with PLD (asked for: 5 s): {plans}",
        f"calibration (asked for: 30 s): {targets}",
        f"choice of noise (asked for: 30 s): {time.perf_counter() - started:.1f} s",
    ]


def ledger_line(steps: int) -> str:
    """A run's accounting and ledger: one intent, one fsync and one commitment per step, a commit every 50."""
    from sottovoce.privacy.ledger import Ledger, cohort_commitment, verify
    from sottovoce.privacy.plan import Plan
    from sottovoce.privacy.settings import PrivacySettings

    settings = PrivacySettings(
        population_size=34_753,
        privacy_unit="speaker",
        cohort_size=1024,
        clip_bound=CLIP_BOUND,
        noise_multiplier=1.024,
        delta=1e-9,
        root_seed=1,
    )
    plan = Plan(settings, Layout(("w",), ((8,),)))
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        path = Path(folder) / "ledger.jsonl"
        started = time.perf_counter()
        ledger = Ledger(path, header=plan.ledger_header(run="benchmark"))
        mark = ledger.mark
        for step in range(steps):
            commitment = cohort_commitment(plan.sample(step), nonce=plan.cohort_nonce(step))
            plan.charge(ledger, step=step, parameters="float32-255700000-" + "0" * 32, cohort=commitment)
            if step % 50 == 49:
                mark = ledger.commit(step=step, result="float32-255700000-" + "0" * 32)
        written = time.perf_counter() - started
        started = time.perf_counter()
        report = verify(path)
        read = time.perf_counter() - started
        assert report.mark == mark
        size = path.stat().st_size
    return (
        f"ledger of {steps} steps: {written:.2f} s with sampling, accounting and one fsync each (asked for: 10 s), "
        f"{size / 1e6:.1f} MB; verified in {read:.2f} s; epsilon {report.epsilon.headline:.3g}"
    )


if __name__ == "__main__":
    main()
