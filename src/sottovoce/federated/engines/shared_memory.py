"""Memory that several processes see: tensors of the same bytes, and objects whose arrays lie there once for all.

Anonymous files (`memfd_create`): they are gone with the last process that holds them, and `/dev/shm`, which containers
keep small, does not limit them. Pages that nobody has touched cost nothing.

Shapes: N rows, P flat length.
"""

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # a cache line, and the widest vector register


def new_file(size: int) -> int:
    """A file in memory, of zeros; who holds the descriptor holds the file."""
    descriptor = os.memfd_create("sottovoce")
    os.ftruncate(descriptor, size)
    return descriptor


def shared_rows(descriptor: int, *, length: int) -> Tensor:
    """The whole file as float32 [N, P], P being `length`."""
    size = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.float32).view(-1, length)


def rows_size(count: int, *, length: int) -> int:
    return count * length * torch.float32.itemsize


class _Pickler(pickle.Pickler):
    """Tensors go the way of NumPy's arrays; on their own they would carry whole storages, and copy them."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return NotImplemented
        flat = thing.detach().contiguous().view(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), thing.dtype, tuple(thing.shape))


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def put(thing: object) -> int:
    """A file that holds `thing`; its arrays and tensors on the host are laid out so that `got` need not copy them."""
    arrays: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    _Pickler(body, protocol=5, buffer_callback=arrays.append).dump(thing)
    parts = [body.getbuffer(), *(array.raw() for array in arrays)]
    sizes = [part.nbytes for part in parts]
    table = pickle.dumps(sizes)
    head = len(table).to_bytes(8, "little") + table
    starts, end = _places(len(head), sizes)
    descriptor = new_file(end)
    with mmap.mmap(descriptor, end) as memory:
        memory[: len(head)] = head
        for start, part in zip(starts, parts, strict=True):
            memory[start : start + part.nbytes] = part
    return descriptor


def got(descriptor: int) -> object:
    """What `put` laid down. Its arrays share memory with everybody else's; what is written to them stays here."""
    memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    head = 8 + int.from_bytes(memory[:8], "little")
    sizes: list[int] = pickle.loads(memory[8:head])
    starts, _ = _places(head, sizes)
    body, *arrays = (memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return pickle.loads(body, buffers=arrays)


def _places(head: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of `sizes` start behind a head, and where the last one ends."""
    starts, end = [], head
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end
