"""How a run computes: in which precision, and what is compiled or recorded as CUDA graphs, where that pays."""

from functools import partial
from typing import Literal

import torch

from sottovoce.audio.features import frame_count
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.models.ctc_transformer import STRIDE, Parameters, Settings, block, run_blocks
from sottovoce.models.graphed import graphed_blocks
from sottovoce.models.packing import ROW_MULTIPLE
from sottovoce.models.recogniser import PLAIN, Compute, inputs

Precision = Literal["auto", "bfloat16", "float32"]

WORTH_COMPILING = 2000  # steps: compiling takes half a minute
# Clients trained in a run: stacks come in many shapes, a minute of compiling in all, for a tenth of the time.
WORTH_COMPILING_STACKS = 100_000

SHAPES = 32  # how many shapes of rows may be compiled in one run; torch's own limit is 8

# width² · seconds of audio a step, up to which a block takes the host longer to launch (some 0.8 ms) than it takes a
# large GPU to run (12·width² weights, 6 operations each per frame of 30 ms, at 400 TFLOP/s): 250 s for `base`.
HOST_BOUND = 1.5e8


def precision(chosen: Precision, device: torch.device) -> torch.dtype:
    """What the forward pass computes in; `auto` is bfloat16 on a GPU."""
    return torch.bfloat16 if chosen == "bfloat16" or (chosen == "auto" and device.type == "cuda") else torch.float32


def one_model(
    working: Parameters | None, *, settings: Settings, steps: int, batch_seconds: float, device: torch.device
) -> Compute:
    """For training one model, whose weights are `working`, with `steps` steps of at most `batch_seconds`.

    None where only a part of it is trained: graphs record whole models.
    """
    if device.type != "cuda" or steps < WORTH_COMPILING:
        return PLAIN
    rows = row_multiple(batch_seconds)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    fused = torch.compile(block, dynamic=False)
    if working is None or settings.width**2 * batch_seconds > HOST_BOUND:
        return Compute(torch.compile(inputs), blocks=partial(run_blocks, block=fused), row_multiple=rows)
    return Compute(
        torch.compile(inputs), blocks=graphed_blocks(working, settings=settings, block=fused), row_multiple=rows
    )


def many_models(*, steps: int, batch_seconds: float, device: torch.device) -> Compute:
    """For stacked clients; `steps` counts those of each."""
    if device.type != "cuda" or steps < WORTH_COMPILING_STACKS:
        return PLAIN
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    fused = torch.compile(block, dynamic=False)
    rows = row_multiple(batch_seconds, lengths=4)
    return Compute(blocks=partial(run_blocks, block=fused), row_multiple=rows, full_stacks=True)


def row_multiple(batch_seconds: float, *, lengths: int = 16) -> int:
    """What rows end on, so that batches up to `batch_seconds` have few lengths, and nearly full ones one or two."""
    frames = frame_count(int(batch_seconds * SAMPLE_RATE)) // STRIDE
    return -(-frames // (lengths * ROW_MULTIPLE)) * ROW_MULTIPLE
