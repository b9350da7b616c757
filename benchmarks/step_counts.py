"""What a local step of the 255.8M model must do, counted: operations, bytes, padding. Nothing is measured.

    python benchmarks/step_counts.py [--users 80]

The step is that of `benchmarks/round.py` with the same users' utterances: batches of at most 120 s, dropout and
layer-drop 0.3, bfloat16, SGD. "Least" is at the rates of one H200 for large products and for a copy.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from round import noise_speaker

from sottovoce.data.audio.batches import plan_client_batches
from sottovoce.data.audio.features import frame_count
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer.family import row_multiple
from sottovoce.models.transformer.rows import ROW_MULTIPLE, TAIL_PIECE
from sottovoce.models.transformer.settings import STRIDE, named_settings, parameter_shapes

BATCH_SECONDS, LOCAL_STEPS = 120, 10
SETTINGS = named_settings("base", tokens=30, dropout=0.3, layer_drop=0.3)
# Of one H200: the rate of large bfloat16 products, and the bandwidth of a measured copy (docs/benchmarks.md).
FLOPS, BANDWIDTH, PROCESSORS = 790e12, 4.1e12, 132
TILES = (128, 256), (128, 192), (128, 128)  # of a product on Hopper, one a processor at a time
# A weight's gradient is read for the norm and for the step, its master read and written, its copy written.
SGD_BYTES = 2 + 2 + 4 + 4 + 2
# Tensors of [frames, width] that a block's kernels read or write, compiled as they are.
ELEMENT_WISE = {
    "first norm": 2,
    "sum and second norm": 4,
    "ReLU with dropout": 8,
    "last sum": 3,
    "ReLU with dropout, backwards": 12,
    "second norm and sum, backwards": 4 + 2,
    "gradients of q, k and v in one tensor": 6,
    "first norm and sum, backwards": 4 + 2,
}


def matrices(width: int) -> dict[str, tuple[int, int]]:
    """[out, in] of a block's matrices."""
    return {
        "qkv": (3 * width, width),
        "attention output": (width, width),
        "MLP hidden": (4 * width, width),
        "MLP output": (width, 4 * width),
    }


def products(frames: int, width: int) -> dict[str, tuple[int, int, int]]:
    """Rows, columns and depth of every product of a block, forwards and backwards."""
    made = {}
    for name, (out, inner) in matrices(width).items():
        made[f"{name}, forwards"] = frames, out, inner
        made[f"{name}, of its input"] = frames, inner, out
        made[f"{name}, of its weight"] = out, inner, frames
    return made


def segments_of_batches(users: int) -> tuple[list[list[int]], float]:
    """Frames of the utterances of each local step, as `round.py` has them, and seconds of audio a step."""
    steps, seconds = [], []
    for user in range(users):
        speaker = noise_speaker(user, seconds=BATCH_SECONDS * 5, letters="a", per_second=14)
        lengths = np.array([len(utterance.samples) for utterance in speaker.utterances])
        for batch in plan_client_batches(
            lengths, max_seconds=BATCH_SECONDS, seed=user, local_steps=LOCAL_STEPS, fixed_shapes=True
        ):
            steps.append([frame_count(int(samples)) // STRIDE for samples in lengths[batch.rows]])
            seconds.append(lengths[batch.rows].sum() / SAMPLE_RATE)
    return steps, statistics.mean(seconds)


def print_counts(users: int) -> None:
    steps, seconds = segments_of_batches(users)
    filled = np.array([sum(step) for step in steps])
    print(f"{len(steps)} local steps: {seconds:.1f} s of audio and {filled.mean():,.0f} frames each\n")
    for multiple in (ROW_MULTIPLE, 128, row_multiple(BATCH_SECONDS)):
        rows = -(-filled // multiple) * multiple
        print(f"rows end on {multiple}: padding {rows.sum() / filled.sum() - 1:.1%}, {len(np.unique(rows))} lengths")
    rows = -(-filled // row_multiple(BATCH_SECONDS)) * row_multiple(BATCH_SECONDS)
    table = Table("of a local step", "counted", "least, ms", title="base, dropout and layer-drop 0.3")
    for name, amount, least in counted_terms(steps, rows):
        table.add_row(name, amount, f"{least:.2f}")
    Console(width=120).print(table)


def counted_terms(steps: Sequence[Sequence[int]], rows: NDArray[Any]) -> Iterator[tuple[str, str, float]]:
    """What a step does, how much, and the fewest milliseconds it takes at the chip's own rates."""
    width, blocks = SETTINGS.width, SETTINGS.layers * (1 - SETTINGS.layer_drop)
    flops, widest, best = [], [], []
    for frames in rows.tolist():
        shapes = products(frames, width).values()
        flops.append(sum(2 * math.prod(shape) for shape in shapes) * blocks)
        widest.append(sum(in_whole_waves(shape, TILES[0]) for shape in shapes) * blocks)
        best.append(sum(min(in_whole_waves(shape, tile) for tile in TILES) for shape in shapes) * blocks)
    yield _operations("matrix products", flops, FLOPS)
    yield _operations("the same in whole waves of 132 tiles of 128 × 256", widest, FLOPS)
    yield _operations("the same, the best of 128 × 256, 192 and 128", best, FLOPS)
    squares = [sum(n * n for n in step) + (row - sum(step)) * TAIL_PIECE for step, row in zip(steps, rows, strict=True)]
    # Two products forwards, five backwards: FlashAttention makes the scores anew.
    yield _operations("attention", [7 * 2 * square * width * blocks for square in squares], FLOPS)
    frames = float(rows.mean())
    yield _bytes("attention, read and written", 2 * frames * width * blocks * (3 + 1 + 3 + 1 + 1 + 3))
    yield _bytes("norms, sums, ReLU with dropout", 2 * frames * width * blocks * sum(ELEMENT_WISE.values()))
    size = Layout.of(
        {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(SETTINGS).items()}
    ).flat_size
    kept = 1 - SETTINGS.layer_drop
    yield _bytes("gradients copied into one vector", size * (4 * kept + 2 * (1 - kept)))
    yield _bytes("SGD over all weights", size * SGD_BYTES)
    yield _bytes("SGD over kept blocks' weights", size * kept * SGD_BYTES)


def in_whole_waves(shape: tuple[int, int, int], tile: tuple[int, int]) -> int:
    """Operations that all processors have time for until the last tile of a product is done."""
    rows, columns, depth = shape
    tiles = -(-rows // tile[0]) * -(-columns // tile[1])
    return -(-tiles // PROCESSORS) * PROCESSORS * 2 * math.prod(tile) * depth


def _operations(name: str, flops: Sequence[float], rate: float) -> tuple[str, str, float]:
    return name, f"{statistics.mean(flops) / 1e12:.2f} Tflop", statistics.mean(flops) / rate * 1e3


def _bytes(name: str, amount: float) -> tuple[str, str, float]:
    return name, f"{amount / 1e9:.2f} GB", amount / BANDWIDTH * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=80)
    print_counts(parser.parse_args().users)


if __name__ == "__main__":
    main()
