"""What is kept of clients between rounds, within bounds in bytes: what does not depend on the round is not remade."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar, final

import torch

from sottovoce.models.speech import Speech
from sottovoce.models.utterances import Features

T = TypeVar("T")

# What a client, a tensor and an array take beside their numbers, measured. Clients with a word or two have little else,
# and without it their number would be bounded by nothing.
CLIENT_BYTES, TENSOR_BYTES, ARRAY_BYTES = 1_000, 600, 150


@final
class SizedCache(Generic[T]):
    """Something of each client, the latest kept, within `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._kept: OrderedDict[int, tuple[T, int]] = OrderedDict()

    def get(self, client: int) -> T | None:
        if client not in self._kept:
            return None
        self._kept.move_to_end(client)
        return self._kept[client][0]

    def keep(self, client: int, what: T, *, size: int) -> None:
        """Keep `what`, of `size` bytes, in the place of those that were not asked for longest."""
        if client not in self._kept and size <= self._limit:
            self._kept[client] = (what, size)
            self._bytes += size
        while self._bytes > self._limit:
            self._bytes -= self._kept.popitem(last=False)[1][1]


@final
class FeatureCache:
    """What was heard of clients before, within `limit` bytes: to be neither read nor heard again.

    One thread may ask while another keeps.
    """

    def __init__(self, limit: int) -> None:
        self._heard: SizedCache[Features] = SizedCache(limit)
        self._lock = Lock()

    def get(self, client: int) -> Features | None:
        with self._lock:
            return self._heard.get(client)

    def keep(self, client: int, heard: Features) -> None:
        with self._lock:
            self._heard.keep(client, heard, size=features_bytes(heard))


def feature_cache_bytes(device: torch.device) -> int:
    """How many bytes of features to keep: a tenth of what is free on a GPU, 256 MiB in the memory of a process."""
    return int(0.1 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2**28


def features_bytes(heard: Features) -> int:
    """What it takes to keep `heard`."""
    tensors = heard.features_UTF, heard.frames_U, heard.tokens_UL, heard.token_lengths_U
    return sum(tensor.nbytes + TENSOR_BYTES for tensor in tensors)


def speech_bytes(speech: Speech) -> int:
    """What it takes to keep `speech`: tokens of each utterance, with its row and length."""
    return CLIENT_BYTES + sum(tokens.nbytes + ARRAY_BYTES + 16 for tokens in speech.tokens)
