"""Several processes under torchrun: this one's rank, how work is split, and what they exchange.

Objects travel over gloo on the host, tensors over gloo or NCCL, as they lie on the host or on a GPU.
"""

import heapq
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

WHERE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")  # what torchrun gives each process


@dataclass(frozen=True)
class Processes:
    """This process among `world`. The first one alone writes. What all do together, all must ask for."""

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world > 1

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all processes, in place."""
        if self.is_distributed:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all processes, in the first one; elsewhere it is worth nothing then."""
        if self.is_distributed:
            dist.reduce(tensor, dst=0)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by the first process's, in place."""
        if self.is_distributed:
            dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: T) -> T:
        """The first process's `value`, in all of them."""
        if not self.is_distributed:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Every process's `value`, in the order of their ranks, in the first one; nothing elsewhere."""
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.world if self.is_first else []
        dist.gather_object(value, found if self.is_first else None, dst=0)
        return found

    def all_reduce_max(self, value: float) -> float:
        """The largest `value` of any process."""
        if not self.is_distributed:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process: then all of them go the same way."""
        if not self.is_distributed:
            return flag
        votes = torch.tensor(int(flag))  # on the host: no process waits for its GPU
        dist.all_reduce(votes)
        return bool(votes)

    def barrier(self) -> None:
        """Go on when all have come here."""
        self.any(False)


ALONE = Processes()


def split_by_load(amounts: NDArray[np.number[Any]], parts: int) -> list[NDArray[np.int64]]:
    """Places in `amounts`, split so that the sums are about equal: the largest first, to whoever has least so far.

    The same on every machine. Within a part places are ascending; a part may be empty.

    >>> [part.tolist() for part in split_by_load(np.array([3, 9, 4, 5]), 2)]
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    least = [(0.0, part) for part in range(parts)]
    for place in np.argsort(-amounts, kind="stable").tolist():
        load, part = least[0]
        shares[part].append(place)
        heapq.heapreplace(least, (load + float(amounts[place]), part))
    return [np.sort(np.array(places, dtype=np.int64)) for places in shares]


def local_device(device: torch.device) -> torch.device:
    """Under torchrun each process has the GPU of its own number; otherwise `device` as it is."""
    if device.type != "cuda":
        return device
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
    torch.cuda.set_device(own)
    return own


def was_restarted() -> bool:
    """Whether torchrun started this process in the place of one that was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def process_group(device: torch.device) -> Iterator[Processes]:
    """The processes that torchrun started: gloo on the host and NCCL between GPUs. `ALONE` without torchrun.

    Within another `process_group` they are the same ones, and stay together when the inner one ends.
    """
    if "RANK" not in os.environ:
        yield ALONE
        return
    if dist.is_initialized():
        yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
        return
    # A process may wait for the first one's tests, or for the slowest one's clients: give them time.
    backend, patience = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(hours=2)
    store, rank, world = _place_to_meet(*(os.environ.get(name) for name in WHERE), patience=patience)
    meeting = dist.PrefixStore(_agreed_name(store, rank, world), store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=patience)
    try:
        yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
    finally:
        dist.destroy_process_group()


@cache
def _place_to_meet(*_where: str | None, patience: timedelta) -> tuple["Store", int, int]:
    """The store that all share, this process's rank, and how many they are: found once, and kept to the end.

    Without torchrun the first process is its host, and a run meets twice (what it needs is checked before it begins).
    Were it opened anew, who is early would come to the old one, just before it closes.
    """
    store, rank, world = next(iter(rendezvous("env://", timeout=patience)))
    return store, rank, world


def _agreed_name(store: "Store", rank: int, world: int) -> str:
    """A name for this meeting that no earlier one had.

    torchrun's store outlives the processes that it starts again, and what the lost ones wrote there (where they could
    be reached, above all) would be taken for the new ones'. So everybody asks under a name of their own, drawn afresh,
    and the first one answers until it has an answer from all: neither question nor answer can be an old one's.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"here/{rank}", own)
        agreed: str = store.get(f"answer/{own}").decode()  # waits for it
        store.set(f"answered/{agreed}/{rank}", "")
        return agreed
    silent = set(range(1, world))
    while silent:
        for other in sorted(silent):
            if store.check([f"here/{other}"]):
                store.set(f"answer/{store.get(f'here/{other}').decode()}", own)
        silent = {other for other in silent if not store.check([f"answered/{own}/{other}"])}
        time.sleep(0.01)
    return own
