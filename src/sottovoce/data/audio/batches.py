"""Dynamic batches: rows of a list of utterances, grouped by length so that a batch fills a given number of seconds.

`max_seconds` counts padding (utterances times the longest of them), since that is what memory must hold. Only indices
and lengths in samples come in here, and only indices go out; `waveforms.py` makes tensors of what is read.

Lengths are rounded up to rungs that lie some per cent apart. Each epoch shuffles the utterances within a rung, cuts
them from the longest rung down into full batches, and shuffles the batches. So an epoch holds every utterance exactly
once, only the batch of its shortest is not full, and padding stays near half the distance between rungs. In ascending
order nothing is shuffled: from the shortest utterance to the longest, in every epoch.

    B  utterances of a batch    N  samples of its longest, or of its rung
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import keyed_order
from sottovoce.data.audio.features import frame_count, sample_count
from sottovoce.data.corpora.corpus import SAMPLE_RATE

# Rungs are at most a tenth apart or, among the shortest, 6 frames: a multiple of what the recogniser's front strides.
RUNG_FRAMES = 6
RUNG_RATIO = 1.1

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one batch, and the samples that each is padded to."""

    rows: Rows
    padded_samples: int

    @property
    def padded_seconds(self) -> float:
        return len(self.rows) * self.padded_samples / SAMPLE_RATE


def plan_epoch(
    lengths: Rows,
    *,
    max_seconds: float,
    seed: int,
    epoch: int,
    max_utterances: int | None = None,
    ascending: bool = False,
    fixed_shapes: bool = False,
    allow_overlong: bool = False,
) -> tuple[Batch, ...]:
    """Batches of at most `max_seconds` of padded audio, and at most `max_utterances`, from `lengths` in samples.

    They are the same for the same (seed, epoch). With `fixed_shapes` a batch is padded to its rung, not to its longest
    utterance, so that few shapes ever occur and every epoch has as many batches. An utterance longer than `max_seconds`
    is an error, unless `allow_overlong` gives it a batch of its own.

    >>> epoch = plan_epoch(np.array([16_000, 32_000, 31_000, 15_000]), max_seconds=4, seed=1, epoch=0)
    >>> sorted(sorted(batch.rows.tolist()) for batch in epoch)
    [[0, 3], [1, 2]]
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    max_samples = int(max_seconds * SAMPLE_RATE)
    _check_lengths(lengths, max_samples=max_samples, allow_overlong=allow_overlong)
    ladder = _ladder(max(int(lengths.max(initial=1)), max_samples), max_samples=max_samples)
    rungs = np.searchsorted(ladder, lengths)
    if ascending:
        rows = np.argsort(lengths, kind="stable")
    else:
        shuffled = keyed_order(np.arange(len(lengths), dtype=np.uint64), seed, "utterances", epoch)
        # int16 makes the stable sort a radix sort, which takes a million utterances in some hundredths of a second.
        rows = shuffled[np.argsort(-rungs[shuffled].astype(np.int16), kind="stable")]
    padded = ladder[rungs[rows]] if fixed_shapes else lengths[rows]
    starts = _cuts(padded, max_samples=max_samples, max_utterances=max_utterances)
    groups = np.split(rows, starts[1:]) if len(rows) else []
    longest = np.maximum.reduceat(padded, starts) if len(rows) else starts
    order = np.arange(len(groups))
    if not ascending:
        order = keyed_order(order.astype(np.uint64), seed, "batches", epoch)
    return tuple(Batch(rows=groups[i], padded_samples=int(longest[i])) for i in order)


def plan_client_batches(
    lengths: Rows,
    *,
    max_seconds: float,
    seed: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    max_utterances: int | None = None,
    ascending: bool = False,
    fixed_shapes: bool = False,
) -> Iterator[Batch]:
    """One client's local training: so many batches, or so many passes over its data, reshuffled for each pass.

    Exactly one of `local_steps` and `local_epochs` is set. A client with no utterances gives no batches.
    """
    assert (local_steps is None) != (local_epochs is None), "set exactly one of local_steps and local_epochs"
    given = 0
    plan: tuple[Batch, ...] = ()
    for epoch in count() if local_epochs is None else range(local_epochs):
        # What fits into one batch needs no other order: most clients hold little.
        if len(plan) != 1:
            plan = plan_epoch(
                lengths,
                max_seconds=max_seconds,
                seed=seed,
                epoch=epoch,
                max_utterances=max_utterances,
                ascending=ascending,
                fixed_shapes=fixed_shapes,
            )
        for batch in plan:
            if given == local_steps:
                return
            yield batch
            given += 1
        if not plan:
            return


def plan_in_order(lengths: Rows, *, max_seconds: float, max_utterances: int | None = None) -> tuple[Batch, ...]:
    """Every utterance once, in their order: batches of neighbours, each padded to a rung.

    >>> [batch.rows.tolist() for batch in plan_in_order(np.array([16_000] * 5), max_seconds=9, max_utterances=2)]
    [[0, 1], [2, 3], [4]]
    """
    max_samples = int(max_seconds * SAMPLE_RATE)
    _check_lengths(lengths, max_samples=max_samples)
    ladder = _ladder(max_samples, max_samples=max_samples)
    padded = ladder[np.searchsorted(ladder, lengths)]
    starts = _cuts(padded, max_samples=max_samples, max_utterances=max_utterances)
    groups = np.split(np.arange(len(lengths)), starts[1:]) if len(lengths) else []
    return tuple(Batch(rows=rows, padded_samples=int(padded[rows].max())) for rows in groups)


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """What a process trains on at a time: batch `number` of a step, or a `part` of it with so much of its weight."""

    batch: Batch
    number: int
    part: int | None = None
    weight: float = 1.0


def group_into_steps(batches: Sequence[Batch], *, size: int) -> list[tuple[Batch, ...]]:
    """An epoch's batches in steps of `size`: complete, none twice, and no step smaller than another.

    Where their number does not divide, the batches with most utterances are halved until it does; an `InputError` says
    where nothing is left to halve.
    """
    even = list(batches)
    while len(even) % size:
        largest = max(range(len(even)), key=lambda i: len(even[i].rows))
        if len(even[largest].rows) < 2:
            raise InputError(
                f"{len(even)} batches of one utterance each do not make whole steps of batches={size}: "
                "raise batch_seconds, or have fewer batches a step"
            )
        even[largest], rest = _halves(even[largest])
        even.append(rest)
    return [tuple(even[start : start + size]) for start in range(0, len(even), size)]


def assign_pieces(step: Sequence[Batch], *, rank: int, world: int) -> list[BatchPiece]:
    """What process `rank` of `world` does of a step: whole batches in turn, or parts of them where there are too few.

    It is nothing where a step has fewer utterances than there are processes.

    >>> step = [Batch(np.arange(4), 16_000), Batch(np.arange(4, 6), 16_000)]
    >>> [[piece.batch.rows.tolist() for piece in assign_pieces(step, rank=rank, world=3)] for rank in range(3)]
    [[[0, 1]], [[2, 3]], [[4, 5]]]
    """
    assert 0 <= rank < world, f"rank={rank} must be within world={world}"
    parts = [[batch] for batch in step]
    while sum(map(len, parts)) < world:
        number, i = max(
            ((number, i) for number, own in enumerate(parts) for i in range(len(own))),
            key=lambda at: len(parts[at[0]][at[1]].rows),
        )
        if len(parts[number][i].rows) < 2:
            break
        parts[number][i : i + 1] = _halves(parts[number][i])
    pieces = [
        BatchPiece(batch, number, i if len(own) > 1 else None, len(batch.rows) / len(step[number].rows))
        for number, own in enumerate(parts)
        for i, batch in enumerate(own)
    ]
    return pieces[rank::world]


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    middle = len(batch.rows) // 2
    first, second = batch.rows[:middle], batch.rows[middle:]
    return Batch(first, batch.padded_samples), Batch(second, batch.padded_samples)


def _check_lengths(lengths: Rows, *, max_samples: int, allow_overlong: bool = False) -> None:
    """Refuse what cannot be batched."""
    assert lengths.ndim == 1, f"lengths must be a list, got shape {lengths.shape}"
    if len(lengths) and lengths.min() < 1:
        raise InputError(f"utterance {int(lengths.argmin())} has {lengths.min()} samples; at least 1 expected")
    overlong = int((lengths > max_samples).sum())
    if overlong and not allow_overlong:
        raise InputError(
            f"{overlong} of {len(lengths)} utterances are longer than max_seconds={max_samples / SAMPLE_RATE:g} "
            f"(the longest has {lengths.max() / SAMPLE_RATE:.1f} s): leave them out or raise max_seconds"
        )


@lru_cache(maxsize=16)
def _ladder(longest: int, *, max_samples: int) -> Rows:
    """Rising padded lengths in samples, up to one that holds `longest`, and `max_samples` among them."""
    rungs = [sample_count(RUNG_FRAMES)]
    while rungs[-1] < longest:
        frames = frame_count(rungs[-1])
        steps = max(frames // RUNG_FRAMES + 1, int(frames * RUNG_RATIO) // RUNG_FRAMES)
        rungs.append(sample_count(steps * RUNG_FRAMES))
    return np.unique(np.array([*rungs, max_samples], dtype=np.int64))


def _cuts(padded: Rows, *, max_samples: int, max_utterances: int | None) -> Rows:
    """Where each batch starts: one goes on for as long as its longest utterance, times their number, fits."""
    most = len(padded) if max_utterances is None else max_utterances
    starts, start, longest = [], 0, 0
    for i, samples in enumerate(padded.tolist()):
        longest = max(longest, samples)
        if i == 0 or (i - start + 1) * longest > max_samples or i - start == most:
            starts.append(i)
            start, longest = i, samples
    return np.array(starts, dtype=np.int64)
