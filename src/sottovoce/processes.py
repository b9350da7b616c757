"""Several processes under torchrun: who this one is, and how gradients are averaged over all of them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among `world`. The first one alone writes."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in place."""
        if self.world == 1:
            return
        for tensor in tensors:
            dist.all_reduce(tensor)
        torch._foreach_div_(list(tensors), float(self.world))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process: then all of them go the same way."""
        if self.world == 1:
            return flag
        votes = torch.tensor(int(flag))  # on the host: no process waits for its GPU
        dist.all_reduce(votes)
        return bool(votes)

    def wait(self) -> None:
        """Go on when all have come here."""
        self.any(False)


ALONE = Processes()


def own_device(device: torch.device) -> torch.device:
    """Under torchrun each process has the GPU of its own number; otherwise `device` as it is."""
    if device.type != "cuda":
        return device
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
    torch.cuda.set_device(own)
    return own


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """The processes that torchrun started: gloo on the host and NCCL between GPUs. `ALONE` without torchrun."""
    if "RANK" not in os.environ:
        yield ALONE
        return
    # The first process evaluates while the others wait for its next gradients: give it time.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    try:
        yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
    finally:
        dist.destroy_process_group()
