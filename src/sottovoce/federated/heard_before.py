"""What was heard of clients in earlier rounds: features do not depend on the round, so they need not be made again."""

from collections import OrderedDict
from threading import Lock
from typing import final

import torch

from sottovoce.models.heard import Heard


@final
class HeardBefore:
    """What was heard of clients before, the latest kept, within `limit` bytes: to be neither read nor heard again.

    One thread may ask while another keeps.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._heard: OrderedDict[int, Heard] = OrderedDict()
        self._lock = Lock()

    def get(self, client: int) -> Heard | None:
        with self._lock:
            if client in self._heard:
                self._heard.move_to_end(client)
            return self._heard.get(client)

    def keep(self, client: int, heard: Heard) -> None:
        with self._lock:
            if client not in self._heard and heard.features_UTF.nbytes <= self._limit:
                self._heard[client] = heard
                self._bytes += heard.features_UTF.nbytes
            while self._bytes > self._limit:
                self._bytes -= self._heard.popitem(last=False)[1].features_UTF.nbytes


def room_for_hearing(device: torch.device) -> int:
    """How many bytes of features to keep: a tenth of what is free on a GPU, 256 MiB in the memory of a process."""
    return int(0.1 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2**28
