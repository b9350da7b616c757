"""From utterances of a store to texts, as fast as the device goes.

    thread: read and pad ─► device: features, model ─► thread: decode
                                            (or search)

Batches are full and of like lengths. While the device computes one, a thread pads the next ones (into pinned memory,
for a GPU) and another decodes those before, so on a GPU neither waits for the other.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.processes import Processes, split_by_load
from sottovoce.data.audio.batches import Batch, plan_epoch
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.loading import prefetch
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import Tokens
from sottovoce.evaluation.decoder import Decoder, choose_greedy
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.family import Recognition, extract_float32_features
from sottovoce.models.precision import choose_dtype
from sottovoce.models.recogniser import Recogniser

Progress = Callable[[int], None]

DEVICE = "SOTTOVOCE_DEVICE"
# Seconds of padded audio in a batch: enough to fill a GPU, or for a search on a processor, each step of which reads all
# weights for one token of each utterance.
BATCH_SECONDS = {"cuda": 2_000.0}
CPU_BATCH_SECONDS = 60.0
# By CTC on a processor: little enough for its caches.
CPU_CTC_SECONDS = 20.0
# The same times the width of a beam, where that is more: every hypothesis has its own attention.
SEARCH_SECONDS = {"cuda": 40_000.0}
CPU_SEARCH_SECONDS = 600.0
# Batches that may wait to be decoded: their log-probabilities stay in the device's memory until then.
IN_FLIGHT = 3


def choose_device(name: str | None = None) -> torch.device:
    """The device called `name`, or by $SOTTOVOCE_DEVICE, which must be there; else a GPU if there is one."""
    name = (os.environ.get(DEVICE) or None) if name is None else name
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device={name}: cannot be used here ({reason}); expected cpu, cuda or cuda:N") from None
    return device


def place_for_evaluation(recogniser: Recogniser, device: torch.device) -> Recogniser:
    """`recogniser` on `device`, in the precision in which it evaluates there (`choose_dtype`)."""
    return recogniser.to(device, choose_dtype("auto", device, family=recogniser.family, settings=recogniser.settings))


def compute_emissions(recogniser: Recogniser, recordings: Waveforms) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T, V] of what was said, and their lengths [B] on the host."""
    recognition, settings = require_recognition(recogniser), recogniser.settings
    if recognition.emit is None:
        raise InputError(f"models of family={recogniser.family.name} cannot be decoded by CTC")
    features = extract_float32_features(recogniser.family, recordings, settings=settings)
    return recognition.emit(recogniser.parameters, features, settings=settings)


def search_texts(recogniser: Recogniser, recordings: Waveforms, how: SearchOptions) -> list[Hypothesis]:
    """The best text of each recording, by the family's own search."""
    recognition, settings = require_recognition(recogniser), recogniser.settings
    if recognition.search is None:
        raise InputError(f"models of family={recogniser.family.name} have no search but CTC's")
    features = extract_float32_features(recogniser.family, recordings, settings=settings)
    return [texts[0] for texts in recognition.search(recogniser.parameters, features, settings=settings, how=how)]


def search_timed_texts(recogniser: Recogniser, recordings: Waveforms, how: SearchOptions) -> list[Hypothesis]:
    """The same, each token with the frame in which it was said, as well as the model knows."""
    texts, recognition = search_texts(recogniser, recordings, how), require_recognition(recogniser)
    if recognition.align is None or recognition.untimed(recogniser.settings) is not None:
        return texts
    settings, lengths_U = recogniser.settings, recordings.lengths_U.cpu()
    features = extract_float32_features(recogniser.family, recordings, settings=settings)
    return recognition.align(recogniser.parameters, features, texts, lengths_U=lengths_U, settings=settings)


def require_recognition(recogniser: Recogniser) -> Recognition[Any]:
    """How `recogniser` writes text; refuses one that does not."""
    if recogniser.family.recognition is None:
        raise InputError(f"models of family={recogniser.family.name} write no text")
    return recogniser.family.recognition


def choose_batch_seconds(device: torch.device, decode: Decoder | SearchOptions | None = None) -> float:
    """How much a batch holds that is decoded so; None: that is not decoded."""
    seconds = BATCH_SECONDS.get(device.type, CPU_BATCH_SECONDS)
    if decode is None:
        return seconds
    if not isinstance(decode, SearchOptions):
        return BATCH_SECONDS.get(device.type, CPU_CTC_SECONDS)
    return min(seconds, SEARCH_SECONDS.get(device.type, CPU_SEARCH_SECONDS) / decode.width)


def plan_batches(lengths: NDArray[np.int64], *, max_seconds: float, device: torch.device) -> tuple[Batch, ...]:
    """Full batches of like lengths, in the same order every time."""
    fixed_shapes = device.type == "cuda"  # few lengths to compile for; elsewhere padding only costs
    return plan_epoch(lengths, max_seconds=max_seconds, seed=0, epoch=0, fixed_shapes=fixed_shapes, allow_overlong=True)


def recognise_utterances(
    recogniser: Recogniser,
    store: Store,
    rows: NDArray[np.int64],
    *,
    device: torch.device | str = "cpu",
    decode: Decoder | SearchOptions | None = None,
    batch_seconds: float | None = None,
    on_progress: Progress | None = None,
    on_collapse: Progress | None = None,
) -> list[str]:
    """The text of each utterance in `rows` of `store`, words separated by single spaces; greedily by default.

    `on_progress` gets the number of utterances that are done; `on_collapse`, of a search with attention, the number in
    which the attention collapsed.
    """
    device = torch.device(device)
    recogniser = place_for_evaluation(recogniser, device)
    decode = choose_greedy(recogniser.family, recogniser.settings) if decode is None else decode
    lengths = store.audio_offsets[rows + 1] - store.audio_offsets[rows]
    max_seconds = choose_batch_seconds(device, decode) if batch_seconds is None else batch_seconds
    batches = plan_batches(lengths, max_seconds=max_seconds, device=device)
    texts = [""] * len(rows)
    waiting: deque[tuple[Batch, Future[list[str]]]] = deque()
    done = collapsed = 0

    def collect() -> None:
        batch, found = waiting.popleft()
        for place, text in zip(batch.rows.tolist(), found.result(), strict=True):
            texts[place] = text

    with torch.no_grad(), ThreadPoolExecutor(1, thread_name_prefix="decode") as thread:
        for batch, speech in prefetch(_read_batches(store, rows, batches, device)):
            if isinstance(decode, SearchOptions):
                found = search_texts(recogniser, speech, decode)
                collapsed += sum(hypothesis.collapsed for hypothesis in found)
                work = partial(join_tokens, recogniser.tokens, found)
            else:
                work = partial(_decode, recogniser.tokens, decode, *compute_emissions(recogniser, speech))
            waiting.append((batch, thread.submit(work)))
            if len(waiting) > IN_FLIGHT:
                collect()
            done += len(batch.rows)
            if on_progress is not None:
                on_progress(done)
        while waiting:
            collect()
    if on_collapse is not None and isinstance(decode, SearchOptions):
        on_collapse(collapsed)
    return texts


def _decode(tokens: Tokens, decode: Decoder, log_probs_BTV: Tensor, lengths_B: Tensor) -> list[str]:
    return join_tokens(tokens, decode(log_probs_BTV, lengths_B))


def join_tokens(tokens: Tokens, hypotheses: Sequence[Hypothesis]) -> list[str]:
    """The texts of a batch. Two spaces in a row, or one at an end, mean no more than one between words."""
    return [" ".join(tokens.decode(hypothesis.tokens).split()) for hypothesis in hypotheses]


def _read_batches(
    store: Store, rows: NDArray[np.int64], batches: tuple[Batch, ...], device: torch.device
) -> Iterator[tuple[Batch, Waveforms]]:
    for batch in batches:
        samples = [store.samples(row) for row in rows[batch.rows].tolist()]
        yield batch, pad_waveforms(samples, padded_samples=batch.padded_samples, device=device)


def recognise_across_processes(
    recogniser: Recogniser,
    store: Store,
    rows: NDArray[np.int64],
    *,
    processes: Processes,
    on_collapse: Progress | None = None,
    **options: Any,
) -> list[str]:
    """What `recognise_utterances` gives, in the first process, where all of them call this with the same arguments.

    Elsewhere texts are empty. Utterances are dealt out by length. A text may differ from one process's only where
    padding, which depends on who shares a batch, decides between two tokens by its last bit.
    """
    shares = split_by_load(store.audio_offsets[rows + 1] - store.audio_offsets[rows], processes.world)
    own = shares[processes.rank]
    own_texts, collapses = list[str](), list[int]()
    if len(own):
        own_texts = recognise_utterances(recogniser, store, rows[own], on_collapse=collapses.append, **options)
    texts = [""] * len(rows)
    gathered = processes.gather((own_texts, collapses))
    for places, (found, _) in zip(shares, gathered, strict=processes.is_first):
        for place, text in zip(places.tolist(), found, strict=True):
            texts[place] = text
    counted = [count for _, counts in gathered for count in counts]
    if on_collapse is not None and counted:
        on_collapse(sum(counted))
    return texts
