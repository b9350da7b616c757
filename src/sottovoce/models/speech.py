"""Utterances to train on: which rows of a store, their tokens, and batches of them in a repeatable order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.audio.batches import Batch, Piece, in_steps, pieces_of, plan_epoch
from sottovoce.base.errors import InputError
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.models.family import Family
from sottovoce.models.utterances import Recordings, record_lines
from sottovoce.store import Store
from sottovoce.text.tokens import Tokens

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


def load_speech(
    store: Store, rows: Rows, tokens: Tokens | None, *, family: Family[Any, Any], settings: Any, longest_seconds: float
) -> Speech:
    """Encode the texts of `rows` and leave out, counted, what no loss can be computed for.

    `tokens=None`, or none at all in it, is for who learns from speech alone: no text is looked at, and none is missed.
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
        if (reason := family.unusable(settings, length, ids)) is not None:
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
class Place:
    """Where training stands in its data: the next step of an epoch."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a process does of one step: pieces with their speech. `following` is where the next step stands."""

    following: Place
    pieces: Sequence[tuple[Piece, Recordings]]
    audio_seconds: float  # of the whole step, whoever does it


def endless_steps(
    speech: Speech,
    *,
    start: Place,
    max_seconds: float,
    seed: int,
    device: torch.device,
    batches: int = 1,
    max_utterances: int | None = None,
    ascending: bool = False,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Loaded]:
    """Steps of so many `batches`, epoch after epoch from `start` on; the same for the same seed, whatever `world`."""
    epoch, first = start.epoch, start.batch
    while True:
        plan = plan_epoch(
            speech.lengths,
            max_seconds=max_seconds,
            seed=seed,
            epoch=epoch,
            max_utterances=max_utterances,
            ascending=ascending,
            fixed_shapes=True,
        )
        steps = in_steps(plan.batches, size=batches)
        for number in range(first, len(steps)):
            own = pieces_of(steps[number], rank=rank, world=world)
            yield Loaded(
                Place(epoch, number + 1) if number + 1 < len(steps) else Place(epoch + 1, 0),
                [(piece, load_batch(speech, piece.batch, device=device)) for piece in own],
                sum(int(speech.lengths[batch.rows].sum()) for batch in steps[number]) / SAMPLE_RATE,
            )
        epoch, first = epoch + 1, 0


def load_batch(speech: Speech, batch: Batch, *, device: torch.device) -> Recordings:
    """Read one batch's samples from the store and send them to `device`."""
    samples = [speech.store.samples(int(speech.rows[i])) for i in batch.rows]
    texts = [speech.tokens[i].tolist() for i in batch.rows]
    return record_lines(samples, texts, padded_samples=batch.padded_samples, device=device)


def batch_lines(speech: Speech, batches: Sequence[Batch], *, most_seconds: float) -> tuple[Rows, list[Tensor]]:
    """Which utterances are to be read, and the places of each batch's utterances among them.

    All of `speech` where that is at most so many seconds; else those of `batches`, each once however often it occurs.
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
