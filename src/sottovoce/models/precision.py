"""What a model computes in: bfloat16 where the device multiplies it and the model gains by it, else float32.

A processor without instructions for bfloat16 emulates them, many times slower; one that has them multiplies matrices
two to four times as fast as in float32. Small products gain nothing, so a family says from which size on its models do
(`Family.gains_in_bfloat16`): by its settings, never by a clock, so that the same recipe computes the same bits.

Weights, sums and losses stay in float32 either way (`optimisers.weights`, `models.ctc`).
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from sottovoce.models.family import Family

Precision = Literal["auto", "bfloat16", "float32"]

PROCESSOR_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
OLDER = frozenset({"DEFAULT", "NO AVX", "AVX2"})  # what torch calls instructions without any for bfloat16


def choose_dtype(precision: Precision, device: torch.device, *, family: Family[Any, Any], settings: Any) -> torch.dtype:
    """What the forward pass of a model computes in on `device`.

    `auto` is bfloat16 on a GPU, and on a processor that multiplies it for models that gain by it.
    """
    if precision == "auto":
        gains = device.type == "cuda" or (family.gains_in_bfloat16(settings) and multiplies_bfloat16())
        return torch.bfloat16 if gains else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16, and torch uses what it has."""
    try:
        lines = PROCESSOR_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    # ATEN_CPU_CAPABILITY=avx2 makes torch compute as on a processor without AVX-512.
    return not BFLOAT16_FLAGS.isdisjoint(flags) and torch.backends.cpu.get_cpu_capability() not in OLDER
