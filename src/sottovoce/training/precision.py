"""In which precision a run computes."""

from typing import Literal

import torch

Precision = Literal["auto", "bfloat16", "float32"]


def precision(chosen: Precision, device: torch.device) -> torch.dtype:
    """What the forward pass computes in; `auto` is bfloat16 on a GPU."""
    return torch.bfloat16 if chosen == "bfloat16" or (chosen == "auto" and device.type == "cuda") else torch.float32
