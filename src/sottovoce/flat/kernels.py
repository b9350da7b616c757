"""Whether there are Triton kernels to call: they are optional, and nothing of Triton is loaded before one is needed."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def triton_kernels(module: str) -> ModuleType | None:
    """The kernels of `module`, by its full name; None where Triton is not installed."""
    return None if find_spec("triton") is None else import_module(module)
