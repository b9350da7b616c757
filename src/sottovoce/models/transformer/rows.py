"""Utterances end to end in rows, without padding between them: how frames travel between a batch and its packed rows.

    batch [U, T, …]   one utterance a line, padded to the longest
    rows  [N, L, …]   one client a row, its utterances one behind the other, padding only at a row's end

Matrix products and layer norms act on frames alone, so they run on rows. Attention keeps to segments: each utterance is
one, and so is the padding at the end of each row.

Shapes: U utterances, T frames of the longest, N rows, L frames of a row, S segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.models.gathering import gather

# Rows end on a multiple of this, which tensor cores like. Their number of segments, and the longest of them, are
# rounded up to powers of two, and not below these, so that few shapes ever occur: an empty segment costs little.
ROW_MULTIPLE = 64
FEWEST_SEGMENTS = 64
FEWEST_SEGMENTS_A_ROW = 8  # not more: each empty one is still a block of attention's kernel for every head
LEAST_LONGEST = 512
TAIL_PIECE = 128  # padding at a row's end, in pieces: attention's work grows with the square of a segment


@dataclass(frozen=True, eq=False)
class Packing:
    """Where every frame goes. Index tensors are on the device that they were made for."""

    rows: int
    frames: int  # L
    longest: int  # frames of the longest segment, rounded up
    from_batch_NL: Tensor  # int64: which frame of the batch, flattened [U·T], stands here; -1 for padding
    to_batch_UT: Tensor  # int64: where in the rows, flattened [N·L], a frame of the batch is; -1 for padding
    segment_ends: Tensor  # int32 [S + 1]: 0, then the ends of the segments in the flattened rows

    def pack(self, batch_UT: Tensor) -> Tensor:
        """[U, T, …] → [N, L, …]; padding is zero. Gradients flow back."""
        return gather(batch_UT, self.from_batch_NL, self.to_batch_UT)

    def unpack(self, rows_NL: Tensor) -> Tensor:
        """[N, L, …] → [U, T, …]; padding is zero. Gradients flow back."""
        return gather(rows_NL, self.to_batch_UT, self.from_batch_NL)


def plan_packing(
    lengths: Sequence[int],
    *,
    padded_frames: int,
    device: torch.device,
    rows: Sequence[int] | None = None,
    row_count: int = 1,
    row_multiple: int = ROW_MULTIPLE,
) -> Packing:
    """Pack utterances of `lengths` frames; `rows` says which row each belongs to (by default all to one).

    Rows are as long as the fullest needs, rounded up to a `row_multiple`.

    >>> packing = plan_packing([2, 1], padded_frames=2, device=torch.device("cpu"), row_multiple=4)
    >>> packing.from_batch_NL.tolist(), packing.segment_ends[:4].tolist()
    ([[0, 1, 2, -1]], [0, 2, 3, 4])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    row_of = np.zeros(len(sizes), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
    filled = np.bincount(row_of, weights=sizes, minlength=row_count).astype(np.int64)
    width = -(-int(filled.max(initial=1)) // row_multiple) * row_multiple
    order = np.argsort(row_of, kind="stable")
    starts = np.empty(len(sizes), dtype=np.int64)  # of each utterance in the flattened rows
    before = np.cumsum(sizes[order]) - sizes[order]
    row_first = np.cumsum(filled) - filled
    starts[order] = row_of[order] * width + before - row_first[row_of[order]]
    # Frame by frame: which utterance, and how far into it.
    utterance = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(utterance)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    in_rows, in_batch = starts[utterance] + within, utterance * padded_frames + within
    from_batch = np.full(row_count * width, -1, dtype=np.int64)
    from_batch[in_rows] = in_batch
    to_batch = np.full(len(sizes) * padded_frames, -1, dtype=np.int64)
    to_batch[in_batch] = in_rows
    row_starts = np.arange(row_count + 1) * width
    ranges = zip(row_starts[:-1] + filled, row_starts[1:], strict=True)
    tails = [np.arange(start, end, TAIL_PIECE) for start, end in ranges]
    ends = np.unique(np.concatenate([row_starts, starts + sizes, *tails]))
    longest = int(np.diff(ends).max(initial=1))
    padded_ends = np.full(
        _power_of_two(len(ends), max(FEWEST_SEGMENTS, FEWEST_SEGMENTS_A_ROW * row_count)) + 1, ends[-1], dtype=np.int32
    )
    padded_ends[: len(ends)] = ends

    def sent(array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    return Packing(
        rows=row_count,
        frames=width,
        longest=_power_of_two(longest, LEAST_LONGEST),
        from_batch_NL=sent(from_batch).view(row_count, width),
        to_batch_UT=sent(to_batch).view(len(sizes), padded_frames),
        segment_ends=sent(padded_ends),
    )


def _power_of_two(value: int, least: int) -> int:
    return max(least, 1 << (value - 1).bit_length())
