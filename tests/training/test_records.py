"""Norms by layer are of all steps since they were last asked for; who had no gradient in a step counts for nothing."""

from typing import Any

import numpy as np
import pytest
import torch

from sottovoce.models.family import ParameterPlace
from sottovoce.training.records import StepLog

NAMES = ["blocks.0.w", "blocks.1.w", "out.weight", "out.bias"]
# Block 0 is left out of the second step, block 1 of all of them.
STEPS = [[3.0, 0.0, 6.0, 8.0], [0.0, 0.0, 3.0, 4.0], [5.0, 0.0, 6.0, 8.0]]


def place(name: str) -> ParameterPlace:
    first, second, *_ = name.split(".")
    return ParameterPlace("w", int(second)) if first == "blocks" else ParameterPlace("out")


def log_of(*steps: list[float], into: StepLog | None = None) -> StepLog:
    log = StepLog(NAMES, place=place) if into is None else into
    for norms in steps:
        log.add(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(norms), audio_seconds=1.0)
    log.check(step=len(steps))
    return log


def test_a_block_that_was_left_out_of_a_step_is_not_counted_as_zero() -> None:
    found = log_of(*STEPS).norms_by_layer()
    assert found["gradient_norms"]["w"] == pytest.approx([4.0, 0.0])
    assert found["gradient_deviations"]["w"] == pytest.approx([np.std([3.0, 5.0]), 0.0])
    # Weight and bias as one vector: the norm of their means, and of their deviations.
    assert found["gradient_norms"]["out"] == pytest.approx(np.hypot(np.mean([6, 3, 6]), np.mean([8, 4, 8])))
    assert found["gradient_deviations"]["out"] == pytest.approx(np.hypot(np.std([6, 3, 6]), np.std([8, 4, 8])))


def test_every_window_begins_anew() -> None:
    log = log_of(*STEPS)
    log.norms_by_layer()
    assert log_of([7.0, 1.0, 0.0, 0.0], into=log).norms_by_layer()["gradient_norms"]["w"] == [7.0, 1.0]


def test_a_resumed_window_has_the_same_bits_wherever_it_was_saved() -> None:
    steps = torch.rand(20, len(NAMES), generator=torch.Generator().manual_seed(1)).tolist()
    whole = log_of(*steps).norms_by_layer()
    for saved_at in (1, 7, 19):
        resumed = StepLog(NAMES, place=place)
        resumed.restore(log_of(*steps[:saved_at]).state())
        assert log_of(*steps[saved_at:], into=resumed).norms_by_layer() == whole


def test_a_checkpoint_from_before_there_were_windows_can_be_gone_on_from() -> None:
    state: dict[str, Any] = log_of(*STEPS).state()
    del state["window"]
    log = StepLog(NAMES, place=place)
    log.restore(state)
    assert log_of(STEPS[0], into=log).norms_by_layer()["gradient_norms"]["w"] == [3.0, 0.0]
