"""Audits of rounds that train some of the tensors: canaries lie in those, and are told apart as well as is promised."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.audit.linear import EVERYBODY, LAYOUT, PEOPLE, SOME, LinearPeople, plan_of, server_of
from tests.audit.planted import less_noise
from tests.audit.test_canary_audit import is_far_above

from sottovoce.audit.canaries import UPDATE_SCALE, Canaries, CanaryEngine, MatchedFilter, canary_scores, others_in
from sottovoce.audit.canary_audit import Audit, AuditVerdict, Observer, audit_rounds
from sottovoce.audit.rounds import AuditedRounds
from sottovoce.flat.layout import Layout
from sottovoce.privacy.plan import Plan

LAYOUTS = {
    "in turn": replace(LAYOUT, held=(("blocks.0.lora_a",), ("output",))),
    "one never": replace(LAYOUT, held=(("blocks.0.lora_a",),)),
}
ROUNDS = 4


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    found: Layout = request.param
    return found


def held_plan(layout: Layout, **changes: Any) -> Plan:
    return Plan(plan_of(**changes).settings, layout)


def audit_of(layout: Layout, *, seed: int, canaries: int = 1500, **changes: Any) -> Audit:
    observer = changes.pop("observer", Observer.RELEASES)
    return audit_rounds(
        held_plan(layout, **changes),
        AuditedRounds(server_of(layout), ROUNDS),
        [(LinearPeople(), PEOPLE)],
        canaries=canaries,
        seed=seed,
        observer=observer,
    )


@pytest.mark.parametrize("share", ["global", "uniform", "dim"])
def test_a_canary_is_clipped_to_its_direction_of_that_round(share: str, layout: Layout) -> None:
    plan = held_plan(layout, share=share)
    canaries = Canaries(plan, 40, seed=3)
    for step in (0, 1):
        directions_NP = canaries.directions(range(40), step=step)
        assert torch.allclose(directions_NP.norm(dim=1), torch.ones(40))
        clipped_NP = plan.clip(directions_NP * UPDATE_SCALE * plan.clip_bound, step=step)
        assert torch.allclose(clipped_NP, directions_NP * plan.clip_bound, atol=1e-6)
        for name, view in layout.views(directions_NP).items():
            assert bool(view.any()) != (name in layout.held_at(step))
    assert float(np.square(canaries.shares_H).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("share", ["global", "uniform"])
def test_what_the_other_canaries_bring_is_known(share: str, layout: Layout) -> None:
    """By adding up what rounds with every canary leave, each round's along its own directions."""
    plan = held_plan(layout, population_size=40, cohort_size=40, share=share)
    canaries = Canaries(plan, 40, seed=3)
    best = MatchedFilter(plan, first=0, signs_T=np.ones(5))
    expected_N = np.zeros(40)
    for step in range(5):
        directions_NP = canaries.directions(range(40), step=step).double().numpy()
        product_NN = directions_NP @ directions_NP.T
        np.fill_diagonal(product_NN, 0.0)
        expected_N += product_NN[:, canaries.is_in].sum(axis=1)
    assert np.allclose(others_in(canaries, best).sum(1), expected_N, atol=1e-4)


def test_a_score_adds_up_what_a_canary_leaves_in_each_round(layout: Layout) -> None:
    """One in every round, and no noise: as many times a length of 1 as there are rounds."""
    plan = held_plan(layout)
    canaries = Canaries(plan, 40, seed=3)
    one = int(np.flatnonzero(canaries.is_in)[0])
    seen_P = layout.zeros(dtype=torch.float64)
    for step in range(ROUNDS):
        left_P = canaries.directions([one], step=step)[0].double()
        for part, gain in zip(layout.parts(left_P), canaries.gains_at(step), strict=True):
            part.mul_(float(gain))
        seen_P += left_P
    scores_NH = canary_scores(canaries, seen_P[None], np.zeros(40, dtype=np.int64))
    assert scores_NH[one].sum() == pytest.approx(ROUNDS, rel=1e-5)


def test_canaries_send_nothing_where_a_round_holds(layout: Layout) -> None:
    canaries = Canaries(held_plan(layout), 40, seed=3)
    for step in (0, 1):
        for trained in CanaryEngine(canaries, signs=True).train(layout.zeros(), range(40), step=step):
            for name in layout.held_at(step):
                assert not layout.views(trained.update)[name].any()


def test_with_everybody_in_every_round_the_estimate_meets_what_is_promised(layout: Layout) -> None:
    """ε is that of rounds which train everything: an observer of fewer numbers sees as much of a canary."""
    found = audit_of(layout, seed=4)
    assert found.promised == pytest.approx(2.0, abs=0.1)
    assert not is_far_above(found), found.why
    assert found.fit.epsilon + 2.15 * (found.fit.high - found.fit.epsilon) > found.promised
    assert found.noise is not None
    assert not found.noise.is_missing
    assert found.noise.share == pytest.approx(1.0, abs=0.2), "what is held is not called missing noise"


@pytest.mark.parametrize("base", [SOME, {**SOME, "share": "dim"}, {**EVERYBODY, "observer": Observer.FINAL}])
def test_honest_rounds_are_consistent(base: dict[str, Any], layout: Layout) -> None:
    found = audit_of(layout, seed=2, canaries=600, **base)
    assert not is_far_above(found), found.why
    assert found.bound.epsilon < found.promised
    assert found.drawn is not None
    assert not found.drawn.stands_out
    assert found.noise is not None
    assert not found.noise.is_missing


def test_half_of_the_noise_is_found(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    less_noise(2)(monkeypatch)
    found = audit_of(layout, seed=4)
    assert found.fit.low > found.promised
    assert found.noise is not None
    assert found.noise.is_missing
    assert found.verdict is AuditVerdict.BROKEN
