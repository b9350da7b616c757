"""Rounds that train some of the tensors: what is clipped, summed and noised, and what they hold, which is zero.

Shapes: P flat length, N users.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import Normalise, Share, centred_count
from sottovoce.privacy.ledger import Charge
from sottovoce.privacy.mechanism import Correlated
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings
from sottovoce.privacy.strategies import Banded

SHAPES = {"w.lora_a": torch.zeros(2, 50), "w.lora_b": torch.zeros(30, 2), "output": torch.zeros(7)}
ALTERNATE = Layout.of(SHAPES, held=(("w.lora_a",), ("w.lora_b",)))
PROJECT = Layout.of(SHAPES, held=(("w.lora_a",),))
LAYOUTS = {"alternate": ALTERNATE, "project": PROJECT}
BOUND = 0.5


def plan_of(layout: Layout, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "population_size": 100,
        "privacy_unit": "speaker",
        "cohort_size": 10,
        "clip_bound": BOUND,
        "noise_multiplier": 1.5,
        "delta": 1e-5,
        "root_seed": 7,
    }
    return Plan(PrivacySettings(**values | changes), layout)


def updates(layout: Layout, seed: int, *, users: int, scale: float = 1.0) -> Tensor:
    """[N, P]; of clients who do not care what a round holds."""
    generator = torch_stream(seed, "updates")
    sent_NP = scale * torch.randn(users, layout.flat_size, generator=generator)
    layout.clear_padding(sent_NP)
    return sent_NP


SECURE: dict[str, Any] = {"mode": Mode.SECURE, "root_seed": None}
CHANGES: dict[str, dict[str, Any]] = {
    "global": {},
    "uniform": {"share": Share.UNIFORM},
    "dim, rescaled": {"share": Share.DIM, "normalise": Normalise.ALWAYS},
    "weighted": {"share": Share.WEIGHTED, "alpha": {"w.lora_*": 3.0}},
    "groups": {"share": Share.UNIFORM, "layer_groups": {"low rank": ["w.*"]}},
    "release": SECURE,
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(seed=st.integers(0, 10**6), step=st.integers(0, 9), scale=st.sampled_from([1e-3, 1.0, 1e6]))
def test_one_user_more_moves_the_sum_by_at_most_c_and_nothing_that_is_held(
    layout: Layout, changes: dict[str, Any], seed: int, step: int, scale: float
) -> None:
    plan, sent_NP = plan_of(layout, **changes), updates(layout, seed, users=3, scale=scale)
    held = layout.held_at(step)
    clipped_NP = plan.clip(sent_NP, step=step)
    assert bool((clipped_NP.double().norm(dim=1) <= BOUND).all())
    assert not any(layout.views(clipped_NP)[name].any() for name in held)
    assert all(layout.views(clipped_NP)[name].any() for name in layout.names if name not in held)
    totals = []
    for users in (2, 3):
        total = plan.new_total()
        plan.accumulate(total, sent_NP[:users], step=step)
        totals.append(total.double())
    # In float32 a sum of three is rounded three times, to 2⁻²⁴ of its own size each; on a release's grid it is exact.
    rounding = 0.0 if plan.grid is not None else 3 * 2.0**-24 * 3 * BOUND
    assert float((totals[1] - totals[0]).norm()) <= BOUND + rounding
    torch.testing.assert_close(totals[1] - totals[0], clipped_NP[2].double(), rtol=0, atol=rounding)


@pytest.mark.parametrize("name", ["uniform", "dim, rescaled", "weighted", "groups"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_bound_is_shared_among_what_a_round_trains(layout: Layout, name: str) -> None:
    """All layers above their share: together they have length C, as in a plan of just these tensors."""
    for step in (0, 1):
        held = layout.held_at(step)
        alone = Layout.of({name: tensor for name, tensor in SHAPES.items() if name not in held})
        sent_P = updates(layout, 3, users=1, scale=100.0)[0]
        own = {name: view for name, view in layout.views(sent_P).items() if name not in held}
        expected = alone.views(plan_of(alone, **CHANGES[name]).clip(alone.flatten(own)))
        found = plan_of(layout, **CHANGES[name]).clip(sent_P, step=step)
        assert float(found.double().norm()) == pytest.approx(BOUND, rel=1e-6)
        for tensor, view in expected.items():
            torch.testing.assert_close(layout.views(found)[tensor], view, rtol=1e-6, atol=0)


def test_what_is_held_is_in_no_norm_and_no_count() -> None:
    """Nor is it looked at: what is not finite there does not spoil the rest."""
    plan, sent_P = plan_of(PROJECT), PROJECT.zeros()
    PROJECT.views(sent_P)["output"].fill_(0.1)
    PROJECT.views(sent_P)["w.lora_a"].fill_(math.nan)
    before_P = sent_P.clone()
    stats = plan.accumulate(plan.new_total(), sent_P, step=0)
    assert float(stats.norm) == pytest.approx(0.1 * math.sqrt(7))
    assert float(centred_count(stats)) == 0.5
    assert torch.equal(plan.clip(sent_P, step=0).nan_to_num(9.0), before_P.nan_to_num(0.0))
    assert torch.equal(sent_P.nan_to_num(9.0), before_P.nan_to_num(9.0)), "a client's update is left as it is"


@pytest.mark.parametrize("changes", [{}, SECURE], ids=["simulation", "release"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_noise_is_zero_in_what_is_held_and_as_promised_elsewhere(layout: Layout, changes: dict[str, Any]) -> None:
    """Even where somebody's sum is not zero there. 200 rounds: a deviation of n draws is off by 1/√(2n) on average."""
    plan = plan_of(layout, **changes)
    drawn: dict[str, list[Any]] = {name: [] for name in SHAPES}
    for step in range(200):
        total = plan.new_total()
        layout.views(total)["w.lora_a"].fill_(plan.grid or 1.0)
        charge = Charge(plan.event, step=step, clip_bound=plan.clip_bound)
        for name, view in layout.views(plan.add_noise(total, charge)).items():
            if name in layout.held_at(step):
                assert not view.any()
            elif name != "w.lora_a":
                drawn[name] += view.reshape(-1).tolist()
    for name in ("w.lora_b", "output"):
        count = len(drawn[name])
        assert np.std(drawn[name]) == pytest.approx(1.5 * BOUND, rel=5 / math.sqrt(2 * count))
        assert np.mean(drawn[name]) == pytest.approx(0, abs=5 * 1.5 * BOUND / math.sqrt(count))


def test_a_simulations_noise_is_that_of_a_plan_that_holds_nothing() -> None:
    """No other number is drawn: what is held is set to zero after it."""
    for layout in LAYOUTS.values():
        whole, ours = (
            plan.add_noise(plan.new_total(), Charge(plan.event, step=3, clip_bound=BOUND))
            for plan in (plan_of(Layout.of(SHAPES)), plan_of(layout))
        )
        layout.clear(whole, layout.held_at(3))
        assert torch.equal(ours, whole)


def test_the_ledger_and_the_ranks_know_what_rounds_hold() -> None:
    plain, ours = plan_of(Layout.of(SHAPES)).describe(), plan_of(ALTERNATE).describe()
    assert ours.pop("held") == [["w.lora_a"], ["w.lora_b"]]
    assert ours == plain
    assert plan_of(ALTERNATE).event == plan_of(Layout.of(SHAPES)).event


def test_noise_that_cancels_between_rounds_is_refused() -> None:
    mechanism = Correlated(cycle=2, strategy=Banded(column=(1.0, 0.5)))
    for layout in LAYOUTS.values():
        with pytest.raises(InputError, match=r"mechanism with LoRA's factors=alternate or project: .* expected no"):
            plan_of(layout, cohort_size=50, mechanism=mechanism)
