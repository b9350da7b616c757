"""From utterances of a store to texts, as fast as the device goes.

    thread: read and pad ─► device: features, model ─► thread: decode, spell

Batches are full and of like lengths. While the device computes one, a thread pads the next ones (into pinned memory,
for a GPU) and another decodes those before, so on a GPU neither waits for the other.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.audio.batches import Batch, plan_epoch
from sottovoce.errors import InputError
from sottovoce.evaluation.decoder import Decoder
from sottovoce.evaluation.prefetch import ahead
from sottovoce.models.decoding import greedy
from sottovoce.models.family import recordings_heard
from sottovoce.models.saved import Recogniser
from sottovoce.models.utterances import Recordings, record_lines
from sottovoce.store import Store
from sottovoce.text.tokens import Tokens

DEVICE = "SOTTOVOCE_DEVICE"
# Seconds of padded audio in a batch: enough to fill a GPU; on a processor, little enough for its caches.
BATCH_SECONDS = {"cuda": 2_000.0}
CPU_BATCH_SECONDS = 60.0
# Batches that may wait to be decoded: their log-probabilities stay in the device's memory until then.
IN_FLIGHT = 3

Progress = Callable[[int], None]


def choose_device(name: str | None = None) -> torch.device:
    """The device called `name`, or by $SOTTOVOCE_DEVICE, which must be there; else a GPU if there is one."""
    name = name or os.environ.get(DEVICE)
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device={name}: cannot be used here ({reason}); expected cpu, cuda or cuda:N") from None
    return device


def placed(recogniser: Recogniser, device: torch.device) -> Recogniser:
    """`recogniser` on `device`, in the precision in which it evaluates there: bfloat16 on a GPU, else float32."""
    return recogniser.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def emissions(recogniser: Recogniser, recordings: Recordings) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T, V] of what was said, and their lengths [B] on the host."""
    family, settings = recogniser.family, recogniser.settings
    if family.recognition is None:
        raise InputError(f"models of family={family.name} do not write down what they hear")
    features = recordings_heard(family, recordings, settings=settings)
    return family.recognition.emit(recogniser.parameters, features, settings=settings)


def batch_seconds_on(device: torch.device) -> float:
    return BATCH_SECONDS.get(device.type, CPU_BATCH_SECONDS)


def recognise(
    recogniser: Recogniser,
    store: Store,
    rows: NDArray[np.int64],
    *,
    device: torch.device | str = "cpu",
    decode: Decoder = greedy,
    batch_seconds: float | None = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """The text of each utterance in `rows` of `store`, words separated by single spaces.

    `on_progress` is told how many utterances have been computed. On a GPU batches are padded to few different
    lengths, so that a compiled family is compiled few times.
    """
    device = torch.device(device)
    recogniser = placed(recogniser, device)
    lengths = store.audio_offsets[rows + 1] - store.audio_offsets[rows]
    max_seconds = batch_seconds_on(device) if batch_seconds is None else batch_seconds
    plan = plan_epoch(
        lengths,
        max_seconds=max_seconds,
        seed=0,
        epoch=0,
        fixed_shapes=device.type == "cuda",  # elsewhere nothing is gained by it, and padding costs
        allow_overlong=True,
    )
    texts = [""] * len(rows)
    waiting: deque[tuple[Batch, Future[list[str]]]] = deque()
    done = 0

    def collect() -> None:
        batch, found = waiting.popleft()
        for place, text in zip(batch.rows.tolist(), found.result(), strict=True):
            texts[place] = text

    with torch.no_grad(), ThreadPoolExecutor(1, thread_name_prefix="decode") as thread:
        for batch, speech in ahead(_speech(store, rows, plan.batches, device)):
            log_probs_BTV, lengths_B = emissions(recogniser, speech)
            waiting.append((batch, thread.submit(spell, recogniser.tokens, decode, log_probs_BTV, lengths_B)))
            if len(waiting) > IN_FLIGHT:
                collect()
            done += len(batch.rows)
            if on_progress is not None:
                on_progress(done)
        while waiting:
            collect()
    return texts


def spell(tokens: Tokens, decode: Decoder, log_probs_BTV: Tensor, lengths_B: Tensor) -> list[str]:
    """The decoded texts of a batch. Two spaces in a row, or one at an end, mean no more than one between words."""
    hypotheses = decode(log_probs_BTV, lengths_B)
    return [" ".join(tokens.decode(hypothesis.tokens).split()) for hypothesis in hypotheses]


def _speech(
    store: Store, rows: NDArray[np.int64], batches: tuple[Batch, ...], device: torch.device
) -> Iterator[tuple[Batch, Recordings]]:
    for batch in batches:
        samples = [store.samples(row) for row in rows[batch.rows].tolist()]
        yield batch, record_lines(samples, padded_samples=batch.padded_samples, device=device)
