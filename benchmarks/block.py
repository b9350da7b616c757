"""What one block of the 255.8M model takes in local training, and what variants of its kernels would.

    python benchmarks/block.py [--frames 3328 3584] [--only WORDS] [--autotune]

`benchmarks/step_counts.py` says what it must do. Dropout and layer-drop 0.3, bfloat16, SGD. Times are
medians of replays of a CUDA graph that does the work `--repeats` times, on as many sets of weights. "Error" is
‖found − plain‖ ÷ ‖plain‖, the largest of the output's and all gradients', without dropout; plain is float32.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from step_counts import SETTINGS, matrices, products
from torch import Tensor

from sottovoce.base.seeds import derive
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer import network
from sottovoce.models.transformer.dropout import keyed_attention, relu_dropout
from sottovoce.models.transformer.linear import attend_segments
from sottovoce.models.transformer.network import BlockWeights
from sottovoce.models.transformer.rows import plan_packing
from sottovoce.models.transformer.settings import Settings, parameter_shapes
from sottovoce.optimisers import SGD
from sottovoce.optimisers.weights import Weights

SEED = 1


@dataclass
class Bench:
    device: torch.device
    repeats: int
    only: str
    table: Table

    def row(
        self, name: str, work: Callable[[int], object], *, flops: float = 0.0, error: Callable[[], str] = str
    ) -> None:
        """`work(i)` is done with the i-th set of tensors."""
        if self.only not in name:
            return
        try:
            ms = self.milliseconds(work)
            rate = f"{flops / ms / 1e9:,.0f}" if flops else ""
            self.table.add_row(name, f"{ms * 1e3:.1f}", rate, error())
        except Exception as problem:  # a variant that this version of torch does not have costs only its own row
            self.table.add_row(name, "", "", f"{type(problem).__name__}: {str(problem).splitlines()[0][:60]}")

    def milliseconds(self, work: Callable[[int], object]) -> float:
        if self.device.type != "cuda":
            work(0)
            return math.nan
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(self.repeats):
                work(number)
        times: list[float] = []
        for _ in range(13):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / self.repeats)
        return statistics.median(times[3:])


def random(*shape: int, device: torch.device, number: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device).manual_seed(derive(SEED, "tensor", number, *shape))
    return torch.randn(*shape, device=device, dtype=dtype, generator=generator)


def measure_products(bench: Bench, frames: int, settings: Settings) -> None:
    """Each product alone; in FP8 with operands made before; and a layer's two backward products, also side by side."""
    side = torch.cuda.Stream() if bench.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    drawn = partial(random, device=bench.device)
    for name, (rows, columns, depth) in products(frames, settings.width).items():
        # As they lie: all matrices are [out, in], all else [frames, …].
        down, across = name.endswith("weight"), not name.endswith("forwards")
        left = [
            drawn(depth, rows, number=2 * i).t() if down else drawn(rows, depth, number=2 * i)
            for i in range(bench.repeats)
        ]
        right = [
            drawn(depth, columns, number=2 * i + 1) if across else drawn(columns, depth, number=2 * i + 1).t()
            for i in range(bench.repeats)
        ]
        flops = 2 * rows * columns * depth
        bench.row(f"{frames} {name}", partial(_product, left, right), flops=flops)
        left_type = torch.float8_e5m2 if across else torch.float8_e4m3fn
        left8 = [tensor.contiguous().to(left_type) for tensor in left]
        right8 = [tensor.t().contiguous().to(torch.float8_e4m3fn).t() for tensor in right]
        one = torch.ones((), device=bench.device)
        bench.row(f"{frames} {name}, FP8", partial(_product8, left8, right8, one), flops=flops)
    for name, (out, inner) in matrices(settings.width).items():
        g, x, w = (
            [drawn(*shape, number=3 * i + n) for i in range(bench.repeats)]
            for n, shape in enumerate(((frames, out), (frames, inner), (out, inner)))
        )
        flops = 4 * frames * out * inner
        for label, stream in (("both backwards", None), ("both backwards, two streams", side)):
            bench.row(f"{frames} {name}, {label}", partial(_both_gradients, g, x, w, stream), flops=flops)


def _product(left: list[Tensor], right: list[Tensor], i: int) -> Tensor:
    return left[i] @ right[i]


def _product8(left8: list[Tensor], right8: list[Tensor], one: Tensor, i: int) -> Tensor:
    return torch._scaled_mm(left8[i], right8[i], one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _both_gradients(g: list[Tensor], x: list[Tensor], w: list[Tensor], side: Any, i: int) -> tuple[Tensor, Tensor]:
    return linear_gradients(g[i], x[i], w[i], side)


def linear_gradients(g: Tensor, x: Tensor, w: Tensor, side: Any) -> tuple[Tensor, Tensor]:
    """Of the input, and of the weight on stream `side`, if there is one, which is waited for."""
    of_weight = torch.empty_like(w)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with nullcontext() if side is None else torch.cuda.stream(side):
        torch.mm(g.t(), x, out=of_weight)
    of_input = g @ w
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    return of_input, of_weight


def measure_attention(bench: Bench, frames: int, settings: Settings) -> None:
    width, heads = settings.width, settings.heads
    ends, longest = packed_ends(frames, bench.device)
    shape, flops = (frames, 3, heads, width // heads), 14 * float((ends.diff() ** 2).sum()) * width
    tensors = [random(*shape, device=bench.device, number=i).requires_grad_() for i in range(bench.repeats)]
    gradient = random(frames, *shape[2:], device=bench.device)
    keys = torch.tensor([SEED], device=bench.device)

    def passes(attend: Callable[[Tensor], Tensor]) -> Callable[[int], object]:
        return lambda i: torch.autograd.grad(attend(tensors[i]), tensors[i], gradient)

    def flash(dropout: float, bound: int) -> Callable[[Tensor], Tensor]:
        return lambda qkv: attend_segments(*qkv.unbind(1), ends=ends, longest=bound, dropout=dropout)

    exact = int(ends.diff().max())
    bench.row(f"{frames} attention, FlashAttention", passes(flash(settings.dropout, longest)), flops=flops)
    bench.row(f"{frames} attention, the same, longest {exact}", passes(flash(settings.dropout, exact)), flops=flops)
    bench.row(f"{frames} attention, the same without dropout", passes(flash(0.0, longest)), flops=flops)
    keyed = passes(lambda qkv: keyed_attention(qkv, keys, ends=ends, longest=longest, dropout=settings.dropout))
    bench.row(f"{frames} attention, stacked clients' kernels", keyed, flops=flops)
    hidden = [random(frames, 4 * width, device=bench.device, number=i).requires_grad_() for i in range(bench.repeats)]
    above = random(frames, 4 * width, device=bench.device)
    bench.row(
        f"{frames} ReLU with dropout",
        lambda i: torch.autograd.grad(relu_dropout(hidden[i], settings.dropout), hidden[i], above),
    )


def packed_ends(frames: int, device: torch.device) -> tuple[Tensor, int]:
    lengths: list[int] = []
    rng = np.random.default_rng(SEED)
    while (rest := frames - 100 - sum(lengths)) >= 100:  # utterances of one rung, 3 to 10 s
        lengths.append(min(rest, int(rng.integers(190, 210))))
    packing = plan_packing(lengths, padded_frames=max(lengths), device=device, row_multiple=frames)
    return packing.segment_ends, packing.longest


# --- whole blocks ----------------------------------------------------------------------------------------------------


def two_streams_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert bias is None
    found: Tensor = _linear(x, weight)
    return found


@torch.library.custom_op("bench::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("bench::linear_gradients", mutates_args=())
def _gradients(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    side = SIDE[0] if g.is_cuda else None
    of_x, of_weight = linear_gradients(g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), weight, side)
    return of_x.view(x.shape), of_weight


SIDE: list[Any] = []


@_gradients.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


_linear.register_autograd(
    lambda ctx, g: _gradients(g.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in FP8 so that its largest number is the type's, and what undoes it."""
    most = torch.finfo(dtype).max
    scale = most / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def scaled_product(left: Tensor, right: Tensor, left_type: torch.dtype) -> Tensor:
    """left · rightᵀ."""
    a, of_a = scaled(left, left_type)
    b, of_b = scaled(right, torch.float8_e4m3fn)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return scaled_product(g, weight.t(), torch.float8_e5m2), scaled_product(g.t(), x.t(), torch.float8_e5m2)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert bias is None
    found: Tensor = _Float8Linear.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], -1)


@contextmanager
def linear_is(linear: Any) -> Iterator[None]:
    with nullcontext() if linear is None else patch.object(network, "linear", linear):
        yield


def measure_blocks(bench: Bench, frames: int, settings: Settings, *, autotune: bool) -> None:
    """A block as it is compiled today, and with other products."""
    if bench.device.type == "cuda" and not SIDE:
        SIDE.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    ends, longest = packed_ends(frames, bench.device)
    shapes = {
        name.partition(".")[2].partition(".")[2]: shape
        for name, shape in parameter_shapes(settings).items()
        if name.startswith("blocks.00.")
    }
    stack = [
        [random(*s, device=bench.device, number=i).mul_(s[-1] ** -0.5).requires_grad_() for s in shapes.values()]
        for i in range(bench.repeats)
    ]
    x = random(1, frames, settings.width, device=bench.device, number=1).requires_grad_()
    above = random(1, frames, settings.width, device=bench.device, number=2)
    options = {"longest": longest, "heads": settings.heads, "norm": settings.norm, "own": None}

    def both(form: Callable[..., Tensor], x: Tensor, weights: list[Tensor], above: Tensor, drop: float) -> list[Tensor]:
        after = form(x, BlockWeights(*weights), where=ends, dropout=drop, **options)
        return [after.detach(), *torch.autograd.grad(after, [x, *weights], above)]

    wide = [weight.detach().float().requires_grad_() for weight in stack[0]]
    plain = both(network.block, x.detach().float().requires_grad_(), wide, above.float(), 0.0)
    flops = sum(2 * math.prod(shape) for shape in products(frames, settings.width).values())
    forms: list[tuple[str, Any, dict[str, Any]]] = [
        ("as compiled", None, {}),
        ("two streams backwards", two_streams_linear, {}),
        ("FP8", float8_linear, {}),
    ]
    if autotune:
        forms.append(("as compiled, autotuned", None, {"mode": "max-autotune-no-cudagraphs"}))
    for name, linear, how in forms:
        with linear_is(linear):
            torch._dynamo.reset()
            form = torch.compile(network.block, dynamic=False, **how)

            def error(form: Callable[..., Tensor] = form) -> str:
                found = both(form, x, stack[0], above, 0.0)
                return f"{max(float((f - p).norm() / p.norm()) for f, p in zip(found, plain, strict=True)):.1e}"

            def passes(i: int, form: Callable[..., Tensor] = form) -> object:
                return both(form, x, stack[i], above, settings.dropout)

            bench.row(f"{frames} block, {name}", passes, flops=flops, error=error)


def measure_optimiser(bench: Bench, settings: Settings) -> None:
    shapes = parameter_shapes(settings)
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    weights = Weights(Layout.of(meta), SGD(), device=bench.device, dtype=torch.bfloat16)
    weights.reset(torch.zeros_like(weights.master))
    every = [torch.zeros_like(weight) for weight in weights.working.values()]
    for name, kept in (("all blocks", settings.layers), ("7 of 10 blocks", round(0.7 * settings.layers))):
        out = tuple(f"blocks.{layer:02d}." for layer in range(kept, settings.layers))
        given = [
            None if out and name.startswith(out) else gradient for name, gradient in zip(shapes, every, strict=True)
        ]
        if bench.only in f"SGD, {name}" and bench.device.type == "cuda":
            times = []
            for _ in range(13):  # not in a graph: what it tells the device each time is part of it
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                weights.set_gradients(given)
                weights.step(lr=0.0, max_norm=1.0)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            bench.table.add_row(f"SGD, {name}", f"{statistics.median(times[3:]) * 1e3:.1f}", "", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[3584])
    parser.add_argument("--width", type=int, default=SETTINGS.width)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="rows with these words in their names")
    parser.add_argument("--autotune", action="store_true")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    settings = replace(SETTINGS, width=arguments.width)
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    table = Table("what", "µs", "Tflop/s", "error", title=f"{where}, torch {torch.__version__}")
    bench = Bench(device, arguments.repeats, arguments.only, table)
    try:
        for frames in arguments.frames:
            measure_products(bench, frames, settings)
            measure_attention(bench, frames, settings)
            measure_blocks(bench, frames, settings, autotune=arguments.autotune)
        measure_optimiser(bench, settings)
    finally:
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
