"""Training that gives the same bits again on a GPU: every sum in a fixed order, at some cost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(asked: bool, device: torch.device) -> Iterator[None]:
    """While this is open no kernel adds in an order of chance; one that cannot do without is an error.

    On a CPU nothing has to be done: there the order is fixed as long as the number of threads is.
    """
    if not asked or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, and cuBLAS reads it once
    fills: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = False  # nothing is read here that was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]
