"""What a local step of the 255.8M model must do, counted: operations, bytes, padding. Nothing is measured.

    python benchmarks/step_counts.py [--users 80]

The step is that of `benchmarks/round.py` on the utterances of its users: batches of at most 120 s, dropout and
layer-drop 0.3, bfloat16, SGD. "Least" is at the rates of one H200 for large products and for a copy.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from round import LETTERS, noise_speaker

from sottovoce.data.audio.batches import plan_client_batches
from sottovoce.data.audio.features import frame_count
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.transformer.family import row_multiple
from sottovoce.models.transformer.rows import ROW_MULTIPLE, TAIL_PIECE
from sottovoce.models.transformer.settings import STRIDE, named_settings, parameter_shapes

BATCH_SECONDS, LOCAL_STEPS = 120, 10
SETTINGS = named_settings("base", tokens=30, dropout=0.3, layer_drop=0.3)
BLOCKS = SETTINGS.layers * (1 - SETTINGS.layer_drop)
PARAMETERS = sum(map(math.prod, parameter_shapes(SETTINGS).values()))
# Of one H200: the rate of large bfloat16 products, and the bandwidth of a measured copy (docs/benchmarks.md).
FLOPS, BANDWIDTH, PROCESSORS = 790e12, 4.1e12, 132
TILES = (128, 256), (128, 192), (128, 128)  # of a product on Hopper, one a processor at a time
# A weight's gradient is read for the norm and for the step, its master read and written, its copy written.
SGD_BYTES = 2 + 2 + 4 + 4 + 2
# Tensors of [frames, width] that a block's kernels read or write, compiled as they are.
ATTENTION = {"forwards": 3 + 1, "backwards": 3 + 1 + 1 + 3}
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
        speaker = noise_speaker(user, seconds=BATCH_SECONDS * 5, letters=LETTERS, per_second=14)
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
    for multiple in (ROW_MULTIPLE, 2 * ROW_MULTIPLE, row_multiple(BATCH_SECONDS)):
        rows = -(-filled // multiple) * multiple
        print(f"rows end on {multiple}: padding {rows.sum() / filled.sum() - 1:.1%}, {len(np.unique(rows))} lengths")
    rows = -(-filled // row_multiple(BATCH_SECONDS)) * row_multiple(BATCH_SECONDS)
    products, others, clients = product_terms(rows), step_terms(steps, rows), client_terms()
    table = Table("", "counted", "least, ms", title="base: a local step")
    for term in (*products, *others, *clients):
        table.add_row(term.name, term.amount, f"{term.ms:.2f}", end_section=term in (products[-1], others[-1]))
    rest = sum(term.ms for term in others) + sum(term.ms for term in clients) / LOCAL_STEPS
    for term in products:
        ms = term.ms + rest
        table.add_row(f"all of it, {term.name}", f"{seconds / ms * 1e3:,.0f} audio s/s", f"{ms:.2f}")
    Console(width=120).print(table)


class Term(NamedTuple):
    """Something that is done, how much of it, and the fewest milliseconds that this takes at the chip's own rates."""

    name: str
    amount: str
    ms: float


def product_terms(rows: NDArray[Any]) -> list[Term]:
    """The products of a step, as they are and with the time that processors have nothing to do in."""
    wholes, best, widest = [], [], []
    for frames in rows.tolist():
        shapes = products(frames, SETTINGS.width).values()
        wholes.append(sum(2 * math.prod(shape) for shape in shapes) * BLOCKS)
        best.append(sum(min(in_whole_waves(shape, tile) for tile in TILES) for shape in shapes) * BLOCKS)
        widest.append(sum(in_whole_waves(shape, TILES[0]) for shape in shapes) * BLOCKS)
    return [
        _operations("products", wholes),
        _operations("products in whole waves, the best of three tiles", best),
        _operations("products in whole waves, tiles of 128 × 256", widest),
    ]


def step_terms(steps: Sequence[Sequence[int]], rows: NDArray[Any]) -> list[Term]:
    """What else is done in a step. Attention's operations and bytes are done at once: the longer of them counts."""
    width, frames = SETTINGS.width, float(rows.mean())
    # Two products forwards, five backwards: FlashAttention makes the scores anew.
    squares = [sum(n * n for n in step) + (row - sum(step)) * TAIL_PIECE for step, row in zip(steps, rows, strict=True)]
    attention = _operations("attention", [7 * 2 * square * width * BLOCKS for square in squares])
    moved = _bytes("attention, read and written", 2 * frames * width * BLOCKS * sum(ATTENTION.values()))
    return [
        max(attention, moved, key=lambda term: term.ms),
        _bytes("norms, sums, ReLU with dropout", 2 * frames * width * BLOCKS * sum(ELEMENT_WISE.values())),
        _bytes("SGD, of the blocks that were kept", PARAMETERS * (1 - SETTINGS.layer_drop) * SGD_BYTES),
    ]


def client_terms() -> list[Term]:
    """What is done once for each client's ten steps; models and updates are float32."""
    return [
        _bytes("a client: model and copy made anew", PARAMETERS * (4 + 4 + 4 + 2)),
        _bytes("a client: update", PARAMETERS * 3 * 4),
        _bytes("a client: norms, clipped and added to the sum", PARAMETERS * 4 * 4),
    ]


def in_whole_waves(shape: tuple[int, int, int], tile: tuple[int, int]) -> int:
    """Operations that all processors have time for until the last tile of a product is done."""
    rows, columns, depth = shape
    tiles = -(-rows // tile[0]) * -(-columns // tile[1])
    return -(-tiles // PROCESSORS) * PROCESSORS * 2 * math.prod(tile) * depth


def _operations(name: str, flops: Sequence[float]) -> Term:
    return Term(name, f"{statistics.mean(flops) / 1e12:.2f} Tflop", statistics.mean(flops) / FLOPS * 1e3)


def _bytes(name: str, amount: float) -> Term:
    return Term(name, f"{amount / 1e9:.2f} GB", amount / BANDWIDTH * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=80)
    print_counts(parser.parse_args().users)


if __name__ == "__main__":
    main()
