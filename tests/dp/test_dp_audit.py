"""The audit of the chain that runs of one's own use: honest ones pass, and planted faults are found."""

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sottovoce import dp
from sottovoce.audit.canary_audit import AuditVerdict
from sottovoce.privacy.plan import Plan

# Everybody in every round: there an audit is at its sharpest.
PLANNED = dp.plan_run(100, cohort_size=100, central_steps=4, delta=1e-3, noise_multiplier=4.0, clip_bound=0.5)
MODEL = {"w": np.zeros((40, 20), dtype=np.float32), "b": np.zeros(200, dtype=np.float32)}


def pull(user: int, model: dict[str, Any]) -> dict[str, Any]:
    return {name: one - 1 for name, one in model.items()}


def test_an_honest_chain_passes() -> None:
    found = dp.audit_plan(PLANNED, MODEL, canaries=300, local_update=pull)
    assert (found.verdict, found.people, found.rounds) == (AuditVerdict.CONSISTENT, 100, 4)
    assert found.promised == pytest.approx(PLANNED.epsilon.headline, rel=1e-6)
    assert found.fit.low <= found.promised


def test_noise_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Plan.add_noise

    def half(plan: Plan, total: Tensor, charge: Any, **options: Any) -> Tensor:
        before = total.clone()
        return before + 0.5 * (honest(plan, total, charge, **options) - before)

    monkeypatch.setattr(Plan, "add_noise", half)
    assert dp.audit_plan(PLANNED, MODEL, canaries=300).verdict is AuditVerdict.BROKEN


def test_updates_that_nobody_clips_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "accumulate", lambda plan, total, update, **_: (total.add_(update), _Finite())[1])
    assert dp.audit_plan(PLANNED, MODEL, canaries=300).verdict is AuditVerdict.ALARM


class _Finite:
    non_finite = False
