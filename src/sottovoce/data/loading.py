"""Utterances to train on: which rows of a store, their tokens, and batches of them in a repeatable order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.batches import Batch, BatchPiece, assign_pieces, group_into_steps, plan_epoch
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import Tokens

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Speech:
    """Utterances of a store that can be trained on, and how many cannot, by reason."""

    store: Store
    rows: Rows
    lengths: Rows
    tokens: Sequence[NDArray[np.int32]]
    left_out: dict[str, int]

    @property
    def hours(self) -> float:
        return float(self.lengths.sum()) / SAMPLE_RATE / 3600

    def __str__(self) -> str:
        counts = [f"{count:,} {reason}" for reason, count in self.left_out.items() if count]
        left_out = f" (left out: {', '.join(counts)})" if counts else ""
        return f"{len(self.rows):,} utterances, {self.hours:.2f} h{left_out}"


class UsableCheck(Protocol):
    """A model family that says why it cannot learn from so many samples with these tokens; None if it can."""

    @property
    def unusable(self) -> Callable[[Any, int, Sequence[int]], str | None]: ...


def load_speech(
    store: Store,
    rows: Rows,
    tokens: Tokens | None,
    *,
    family: UsableCheck,
    settings: Any,
    longest_seconds: float,
    fastest: float = 1.0,
) -> Speech:
    """Encode the texts of `rows` and leave out, counted, what no loss can be computed for, also at the `fastest` speed.

    `tokens=None`, or an empty set, is for learning from speech alone: no text is read.
    """
    tokens = None if tokens is None or not tokens.size else tokens
    left_out = {"without text": 0, "too long": 0, "text outside the token set": 0}
    kept, encoded = [], []
    lengths = np.asarray(store.audio_offsets[rows + 1] - store.audio_offsets[rows])
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        if length > longest_seconds * SAMPLE_RATE:
            left_out["too long"] += 1
            continue
        ids: Sequence[int] = ()
        if tokens is not None:
            text = store.utterance(row).text
            if not text:
                left_out["without text"] += 1
                continue
            try:
                ids = tokens.encode(text)
            except InputError:
                left_out["text outside the token set"] += 1
                continue
        if (reason := family.unusable(settings, int(length / fastest), ids)) is not None:
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        kept.append((row, length))
        encoded.append(np.array(ids, dtype=np.int32))
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        raise InputError(f"store {store.path}: no utterance to train on ({reasons or 'none there'})")
    table = np.array(kept, dtype=np.int64)
    return Speech(store, table[:, 0], table[:, 1], encoded, left_out)


@dataclass(frozen=True)
class DataPosition:
    """Where training stands in its data: the next step of an epoch."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, eq=False)
class StepData:
    """What a process trains on in one step, and where the step after it begins."""

    following: DataPosition
    pieces: Sequence[tuple[BatchPiece, Waveforms]]
    audio_seconds: float  # of the whole step, whoever does it


def iterate_steps(
    speech: Speech,
    *,
    start: DataPosition,
    max_seconds: float,
    seed: int,
    device: torch.device,
    batches: int = 1,
    max_utterances: int | None = None,
    ascending: bool = False,
    rank: int = 0,
    world: int = 1,
) -> Iterator[StepData]:
    """Steps of so many `batches`, epoch after epoch from `start` on; the same for the same seed, whatever `world`."""
    epoch, first = start.epoch, start.batch
    batching: Any = {"max_seconds": max_seconds, "max_utterances": max_utterances, "ascending": ascending}
    while True:
        steps = _plan_steps(speech.lengths, batches=batches, seed=seed, epoch=epoch, **batching)
        for number in range(first, len(steps)):
            own = assign_pieces(steps[number], rank=rank, world=world)
            yield StepData(
                DataPosition(epoch, number + 1) if number + 1 < len(steps) else DataPosition(epoch + 1, 0),
                [(piece, load_batch(speech, piece.batch, device=device)) for piece in own],
                sum(int(speech.lengths[batch.rows].sum()) for batch in steps[number]) / SAMPLE_RATE,
            )
        epoch, first = epoch + 1, 0


def count_epoch_steps(lengths: Rows, *, batches: int = 1, **batching: Any) -> int:
    """How many steps `iterate_steps` makes of one epoch of utterances with these `lengths`, of any epoch and seed.

    `batching` is what it takes besides: `max_seconds`, `max_utterances`, `ascending`. Padded to rungs, utterances are
    cut at the same places in whatever order they are shuffled.
    """
    return len(_plan_steps(lengths, batches=batches, seed=0, epoch=0, **batching))


def _plan_steps(lengths: Rows, *, batches: int, seed: int, epoch: int, **batching: Any) -> list[tuple[Batch, ...]]:
    plan = plan_epoch(lengths, seed=seed, epoch=epoch, fixed_shapes=True, **batching)
    return group_into_steps(plan, size=batches)


def load_batch(speech: Speech, batch: Batch, *, device: torch.device) -> Waveforms:
    """Read one batch's samples from the store and send them to `device`."""
    samples = [speech.store.samples(int(speech.rows[i])) for i in batch.rows]
    texts = [speech.tokens[i].tolist() for i in batch.rows]
    return pad_waveforms(samples, texts, padded_samples=batch.padded_samples, device=device)


def plan_reading(speech: Speech, batches: Sequence[Batch], *, most_seconds: float) -> tuple[Rows, list[Tensor]]:
    """Which utterances to read, each once, and the places of each batch's utterances among them.

    All of `speech` where that is at most so many seconds; else those of `batches`.
    """
    if speech.lengths.sum() <= most_seconds * SAMPLE_RATE:
        used = np.arange(len(speech.rows))
    else:
        used = np.unique(np.concatenate([batch.rows for batch in batches]))
    return used, [torch.from_numpy(np.searchsorted(used, batch.rows)) for batch in batches]


def read_speech(speech: Speech, used: Rows) -> tuple[list[NDArray[np.int16]], list[NDArray[np.int32]]]:
    """Samples and tokens of the utterances `used`."""
    samples = [speech.store.samples(row) for row in speech.rows[used].tolist()]
    return samples, [speech.tokens[i] for i in used.tolist()]


T = TypeVar("T")


def prefetch(items: Iterable[T], *, depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made in one other thread, up to `depth` before they are asked for.

    Its errors are raised here; closing it ends the thread.

    >>> list(prefetch(n * n for n in range(4)))
    [0, 1, 4, 9]
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        waiting = deque(thread.submit(next, source, end) for _ in range(depth))
        try:
            while (item := waiting.popleft().result()) is not end:
                waiting.append(thread.submit(next, source, end))
                yield item  # type: ignore[misc]  # it is no sentinel, hence a T
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
