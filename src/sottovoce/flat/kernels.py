"""Whether there are Triton kernels to call: they are optional, and nothing of Triton is loaded before one is needed."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def triton_kernels(module: str) -> ModuleType | None:
    """The kernels of `module`, by its full name; None where Triton is not installed."""
    return import_module(module) if has_triton() else None
