"""Every optimiser and schedule against optax; tests/golden/make_optimisers.py made the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sottovoce.optimisers import build_optimiser, build_schedule

GOLDEN = Path(__file__).parents[1] / "golden"
OPTIMISERS = json.loads((GOLDEN / "optimisers.json").read_text())
SCHEDULES = json.loads((GOLDEN / "optimisers_schedules.json").read_text())


def tensors(values: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=dtype) for value in values]


def label(case: dict[str, Any]) -> str:
    return "-".join([case["optimiser"], *case["settings"], *(["scheduled"] if isinstance(case["lr"], dict) else [])])


# float64 shows that the formula is optax's; float32, what is used, that its rounding does no harm: in five steps of
# six or seven roundings of at most 2⁻²⁴ each, 2e-6.
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=["f64", "f32"])
@pytest.mark.parametrize("case", OPTIMISERS["cases"], ids=label)
def test_optimiser_is_optax(case: dict[str, Any], dtype: torch.dtype, rtol: float) -> None:
    optimiser = build_optimiser(case["optimiser"], **case["settings"])
    lr = case["lr"] if isinstance(case["lr"], dict) else {"lr": case["lr"]}
    schedule = build_schedule("exponential" if len(lr) > 1 else "constant", **lr)
    parameters = tensors(OPTIMISERS["parameters"], dtype)
    state = optimiser.init(parameters)
    checked = 0
    for step, gradients in enumerate(OPTIMISERS["gradients"]):
        ratios = optimiser.step(parameters, tensors(gradients, dtype), state, lr=schedule(step))
        expected = case["after"].get(str(step + 1))
        if expected is None:
            continue
        checked += 1
        # atol: where a parameter has crossed zero, its own size is no measure of rounding.
        for ours, theirs in zip(parameters, tensors(expected["parameters"], dtype), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
        if expected["trust_ratios"] is None:
            assert ratios is None
        else:
            assert ratios is not None
            torch.testing.assert_close(ratios, torch.tensor(expected["trust_ratios"], dtype=dtype), rtol=rtol, atol=0)
    assert checked == 3


@pytest.mark.parametrize("case", SCHEDULES["cases"], ids=lambda case: "-".join([case["schedule"], *case["settings"]]))
def test_schedule_is_optax(case: dict[str, Any]) -> None:
    schedule = build_schedule(case["schedule"], **case["settings"])
    assert [schedule(step) for step in case["steps"]] == pytest.approx(case["values"], rel=1e-12)
