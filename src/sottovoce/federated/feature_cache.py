"""What is kept of clients between rounds, within bounds in bytes: their tokens, and features of their speech."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar, final

import torch

from sottovoce.data.audio.waveforms import Features
from sottovoce.data.loading import Speech

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

    def take(self, client: int) -> T | None:
        """What is kept of `client`, and keep it no longer."""
        what, size = self._kept.pop(client, (None, 0))
        self._bytes -= size
        return what


@final
class FeatureCache:
    """Features of clients' speech, within `limit` bytes. One thread may ask while another keeps."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._cache: SizedCache[Features] = SizedCache(limit)
        self._lock = Lock()

    def get(self, client: int) -> Features | None:
        with self._lock:
            return self._cache.get(client)

    def keep(self, client: int, features: Features) -> None:
        with self._lock:
            self._cache.keep(client, features, size=features_bytes(features))


def feature_cache_bytes(device: torch.device) -> int:
    """How many bytes of features to keep: a tenth of what is free on a GPU, 256 MiB in the memory of a process."""
    return int(0.1 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2**28


def features_bytes(features: Features) -> int:
    """What it takes to keep `features`."""
    tensors = features.features_UTF, features.frames_U, features.tokens_UL, features.token_lengths_U
    return sum(tensor.nbytes + TENSOR_BYTES for tensor in tensors)


def speech_bytes(speech: Speech) -> int:
    """What it takes to keep `speech`: tokens of each utterance, with its row and length."""
    return CLIENT_BYTES + sum(tokens.nbytes + ARRAY_BYTES + 16 for tokens in speech.tokens)
