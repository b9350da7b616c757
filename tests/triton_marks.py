"""What tests of Triton kernels share: they run on a CUDA device, or anywhere in Triton's interpreter."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="a CUDA device is meant, not the interpreter")
somewhere = [
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"),
    # Of the interpreter itself.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
