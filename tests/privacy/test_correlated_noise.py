"""Noise that is correlated over rounds: what is released is what was claimed, and no row is for two sums."""

import dataclasses
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.privacy.test_plan import LAYOUT, large_update, plan_of, secure_plan, settings_of

from sottovoce.errors import BrokenPromise, InputError
from sottovoce.flat.layout import Layout
from sottovoce.privacy.adaptive import AdaptiveClipping
from sottovoce.privacy.correlated_noise import MEMORY, CorrelatedNoise, forget, memory_rows, widening
from sottovoce.privacy.events import CorrelatedRelease
from sottovoce.privacy.ledger import Charge, Ledger, verify
from sottovoce.privacy.mechanism import Correlated, Mechanism
from sottovoce.privacy.noise import NoiseScope
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Sampling
from sottovoce.privacy.strategies import Banded, Blt, Strategy, column_of

BANDED = Banded(column=(1.0, 0.6, 0.4, 0.25))
BLT = Blt(decays=(0.9, 0.4), scales=(0.3, 0.25))
# 1,000 people in ten groups, of which cohorts of 20 are a fifth (banded), or in fifty that are cohorts (BLT).
MECHANISMS = [Correlated(cycle=10, strategy=BANDED), Correlated(cycle=50, strategy=BLT)]
ROWS = 9


def matrix(strategy: Strategy, rows: int = ROWS) -> NDArray[np.float64]:
    """C: lower triangular, every diagonal one number."""
    column = column_of(strategy, rows)
    return np.array([[column[row - col] if row >= col else 0.0 for col in range(rows)] for row in range(rows)])


def paid(plan: Plan, row: int, *, step: int | None = None) -> Charge:
    return Charge(plan.event, step=row if step is None else step, clip_bound=plan.clip_bound, row=row)


def released(plan: Plan, *, rows: int = ROWS, vault: Path | None = None) -> NDArray[np.float64]:
    """The noise that `rows` sums of nothing get, [rows, parameters]."""
    correlated = plan.correlated_noise(vault=vault)
    noised = [plan.add_noise(plan.new_total(), paid(plan, row), correlated=correlated) for row in range(rows)]
    return np.stack([torch.cat(LAYOUT.parts(noise_P)).double().numpy() for noise_P in noised])


def independent(plan: Plan, rows: int = ROWS) -> NDArray[np.float64]:
    """The noise of as many rounds of the same plan without a mechanism."""
    alone = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, mechanism=None))
    noised = [alone.add_noise(alone.new_total(), paid(alone, row)) for row in range(rows)]
    return np.stack([torch.cat(LAYOUT.parts(noise_P)).double().numpy() for noise_P in noised])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_strategy_applied_to_what_is_released_gives_the_independent_draws_back(mechanism: Correlated) -> None:
    """C·y = w, to the rounding of float32: each of `ROWS` products and sums loses at most half a last bit."""
    plan = plan_of(mechanism=mechanism)
    noise, fresh = released(plan), independent(plan)
    largest = np.abs(fresh).max()
    tolerance = 4 * ROWS * 2.0**-24 * largest * np.abs(np.linalg.inv(matrix(mechanism.strategy))).sum()
    np.testing.assert_allclose(matrix(mechanism.strategy) @ noise, fresh, rtol=0, atol=tolerance)
    assert np.abs(noise - fresh).max() > 100 * tolerance  # a strategy that does nothing would be seen
    assert np.array_equal(noise[0], fresh[0])


def test_one_band_is_independent_noise_to_the_bit() -> None:
    plan = plan_of(mechanism=Correlated(cycle=10, strategy=Banded(column=(1.0,))))
    assert np.array_equal(released(plan), independent(plan))
