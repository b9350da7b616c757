"""The plan: what it does is what it accounts for, and what it refuses."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import AdaptiveClipping, Normalise, Share, centred_count
from sottovoce.privacy.events import GaussianRelease, NoGuarantee
from sottovoce.privacy.ledger import BudgetSpent, Charge, Ledger, verify
from sottovoce.privacy.noise import NoiseScope
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings, Sampling, Weighting

LAYOUT = Layout(("blocks.0.w1", "blocks.0.norm", "out"), ((60, 50), (50,), (7,)))


def settings_of(**changes: Any) -> PrivacySettings:
    values: dict[str, Any] = {
        "population_size": 1000,
        "privacy_unit": "speaker",
        "cohort_size": 20,
        "clip_bound": 0.5,
        "noise_multiplier": 0.8,
        "delta": 1e-6,
        "root_seed": 7,
    }
    return PrivacySettings(**{**values, **changes})


def plan_of(**changes: Any) -> Plan:
    return Plan(settings_of(**changes), LAYOUT)


def secure_plan(**changes: Any) -> Plan:
    pytest.importorskip("cryptography", reason="the secure mode draws from cryptography's AES")
    return plan_of(mode=Mode.SECURE, root_seed=None, **changes)


def paid(plan: Plan, step: int) -> Charge:
    return Charge(plan.event, step=step, clip_bound=plan.clip_bound)


def noise_of(plan: Plan, step: int) -> torch.Tensor:
    return torch.cat(LAYOUT.parts(plan.add_noise(plan.new_total(), paid(plan, step))))


def large_update() -> torch.Tensor:
    return LAYOUT.flatten(
        {name: torch.full(shape, 3.0) for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)}
    )


@pytest.mark.parametrize("make", [plan_of, secure_plan])
@pytest.mark.parametrize("share", list(Share))
@pytest.mark.parametrize("normalise", list(Normalise))
def test_what_is_done_is_what_is_accounted(make: Any, share: Share, normalise: Normalise) -> None:
    """The event's multiplier times the most that one user adds is the noise that is really there."""
    plan = make(share=share, normalise=normalise)
    event = plan.event
    assert isinstance(event, GaussianRelease)
    total = plan.new_total()
    plan.accumulate(total, large_update())
    most = float(total.double().norm())
    assert most <= 0.5
    assert most == pytest.approx(0.5, rel=1e-5)
    measured = float(noise_of(plan, 0).double().std())
    assert measured == pytest.approx(event.noise_multiplier * most, rel=5 / math.sqrt(2 * LAYOUT.dimension))
    members = np.concatenate([plan.sample(step) for step in range(300)])
    assert event.sampling_rate == 0.02
    assert len(members) / 300 == pytest.approx(20, abs=5 * math.sqrt(20 / 300))


def test_fixed_size_cohorts_are_accounted_as_such() -> None:
    plan = plan_of(sampling=Sampling.FIXED_SIZE)
    assert plan.event == GaussianRelease(0.8, "fixed_size", "replace_one", cohort_size=20, population_size=1000)
    assert {len(plan.sample(step)) for step in range(20)} == {20}
    assert "replacing one" in plan.guarantee


def test_units_of_the_glossary() -> None:
    # z = 0.8, C = 0.5, S = 20: z·C = 0.4, z·C/S = 0.02, σ_DP = 0.04; and back from σ_DP.
    plan = plan_of()
    assert (plan.noise_std_sum, plan.noise_std_mean, plan.sigma_dp) == pytest.approx((0.4, 0.02, 0.04))
    assert plan_of(noise_multiplier=None, sigma_dp=0.04).event == plan.event
    assert (plan.sampling_rate, plan.cohort_size, plan.denominator) == (0.02, 20, 20.0)
    assert plan_of(denominator=8.0).noise_std_mean == pytest.approx(0.05)


def test_a_seeded_run_repeats_and_its_steps_differ() -> None:
    plan, again = plan_of(), plan_of()
    assert np.array_equal(plan.sample(3), again.sample(3))
    assert not np.array_equal(plan.sample(3), plan.sample(4))
    assert torch.equal(noise_of(plan, 3), noise_of(again, 3))
    assert not torch.equal(noise_of(plan, 3), noise_of(plan, 4))
    assert plan.cohort_nonce(3) == again.cohort_nonce(3) != plan.cohort_nonce(4)
    assert "simulated" in plan.guarantee
    # torch's CPU generator keeps 32 bits of a seed: no two steps of a run may share them.
    assert len({plan.noise.random.noise_seed(step, 1) % 2**32 for step in range(200_000)}) == 200_000


def test_a_later_attempt_at_a_step_draws_anew() -> None:
    plan = plan_of()
    assert plan.sample(3).tolist() == plan.sample(3, attempt=1).tolist() != plan.sample(3, attempt=2).tolist()
    noises = []
    for attempt in (1, 2, 3):
        charge = Charge(plan.event, step=3, clip_bound=plan.clip_bound, attempt=attempt)
        noises.append(plan.add_noise(plan.new_total(), charge))
    assert torch.equal(torch.cat(LAYOUT.parts(noises[0])), noise_of(plan, 3))
    assert not torch.equal(noises[0], noises[1])
    assert not torch.equal(noises[1], noises[2])


def test_a_secure_run_never_repeats_not_even_the_same_step() -> None:
    plan, resumed = secure_plan(), secure_plan()
    draws = [noise_of(p, step).double().numpy() for p in (plan, resumed) for step in (0, 0, 1)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            # By chance about one of the 3,057 values occurs in both, n² / (2√π·σ/grid): 30 with a probability of e⁻⁷⁰.
            assert len(np.intersect1d(a, b)) < len(a) / 100
            assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(len(a))
    cohorts = {tuple(p.sample(0).tolist()) for p in (plan, resumed) for _ in range(3)}
    assert len(cohorts) == 6
    assert plan.cohort_nonce(0) != plan.cohort_nonce(0)
    assert "simulated" not in plan.guarantee


def test_a_secure_total_is_exact_in_any_order() -> None:
    plan = secure_plan(share=Share.DIM)
    generator = torch.Generator().manual_seed(1)
    updates = torch.randn(5, LAYOUT.flat_size, generator=generator) * 0.01
    forwards, backwards, stacked = plan.new_total(), plan.new_total(), plan.new_total()
    for update in updates:
        plan.accumulate(forwards, update)
    for update in updates.flip(0):
        plan.accumulate(backwards, update)
    plan.accumulate(stacked, updates)
    assert torch.equal(forwards, backwards)
    assert torch.equal(forwards, stacked)


def test_runs_without_a_guarantee_say_why() -> None:
    scope = NoiseScope(groups={"mlp": ["*.w1"]}, factors={"mlp": 0.5})
    for changes, reason in (
        ({"noise_multiplier": 0.0}, "no noise"),
        ({"noise_multiplier": 0.0, "clip_bound": math.inf}, "no noise"),
        ({"privacy_unit": None, "no_unit_reason": "the population is shuffled"}, "the population is shuffled"),
        ({"noise_scope": scope}, "for analysis"),
    ):
        plan = plan_of(**changes)
        assert isinstance(plan.event, NoGuarantee)
        assert reason in plan.event.reason
        assert plan.guarantee.startswith("no guarantee: ")


def test_noise_can_be_left_out_on_a_group_for_analysis() -> None:
    scope = NoiseScope(groups={"mlp": ["*.w1"]}, factors={"mlp": 0.0})
    plan = plan_of(noise_scope=scope)
    mlp, norm, _ = LAYOUT.parts(plan.add_noise(LAYOUT.zeros(), paid(plan, 0)))
    assert not mlp.any()
    assert norm.all()


def test_weights_by_data_are_capped() -> None:
    plan = plan_of(weighting=Weighting.SECONDS, weight_cap=120.0)
    assert (plan.weight(60.0), plan.weight(1e9)) == (0.5, 1.0)
    assert plan_of().weight(60.0) == 1.0
    assert float(plan.clip(large_update(), weight=plan.weight(60.0)).norm()) == pytest.approx(0.25, rel=1e-5)
    with pytest.raises(AssertionError, match="weighting=uniform"):  # weights that no setting asked for
        plan_of().accumulate(plan.new_total(), large_update(), weight=0.5)


def test_a_charge_pays_for_one_sum_and_one_count_of_this_very_plan() -> None:
    plan = plan_of(adaptive=AdaptiveClipping(target_quantile=0.5, count_noise_std=2.0))
    charge = paid(plan, 0)
    plan.add_noise(plan.new_total(), charge)
    following = plan.adapt(3.0, charge)
    for again in (lambda: plan.add_noise(plan.new_total(), charge), lambda: plan.adapt(3.0, charge)):
        with pytest.raises(AssertionError, match=r"a second .* for one charge"):
            again()
    assert following.clip_bound != plan.clip_bound
    for wrong in (following, plan_of(noise_multiplier=0.9), plan_of(cohort_size=21)):
        with pytest.raises(AssertionError, match="was charged as"):
            wrong.add_noise(wrong.new_total(), paid(plan, 1))


@pytest.mark.parametrize("make", [plan_of, secure_plan])
def test_a_run_with_a_ledger_and_a_budget(make: Any, tmp_path: Path) -> None:
    """The round of the architecture, as often as the budget allows."""
    plan = make(epsilon_budget=4.0)
    ledger = Ledger(tmp_path / "l", header=plan.ledger_header(run="r", inputs="a store"))
    spent = list[float]()

    def run() -> None:
        for step in range(1000):
            charge = plan.charge(ledger, step=step, parameters=f"model {step}", cohort="somebody")
            plan.add_noise(plan.new_total(), charge)
            spent.append(charge.epsilon or math.inf)

    with pytest.raises(BudgetSpent):
        run()
    assert spent == sorted(spent)
    assert spent[-1] <= 4.0
    ledger.close()
    report = verify(tmp_path / "l")
    assert report.attempts == len(spent) > 1
    assert report.epsilon.rdp == pytest.approx(spent[-1])
    # Anybody may read the ledger of a release: nothing in it is a function of what the users hold.
    assert (report.header["inputs"] == "") == (plan.settings.mode is Mode.SECURE)


@pytest.mark.parametrize("make", [plan_of, secure_plan])
def test_adaptive_clipping_pays_for_its_count(make: Any) -> None:
    plan = make(adaptive=AdaptiveClipping(target_quantile=0.5, count_noise_std=2.0))
    event = plan.event
    assert isinstance(event, GaussianRelease)
    # One vector of two sums, σ_b = 2 on a count of sensitivity ½: z⁻² = z_Δ⁻² + (2σ_b)⁻².
    assert 1 / math.hypot(1 / plan.update_noise_multiplier, 1 / 4) == pytest.approx(event.noise_multiplier)
    assert plan.noise_std_sum > plan_of().noise_std_sum
    total = plan.new_total()
    count = sum(float(centred_count(plan.accumulate(total, large_update()))) for _ in range(20))
    assert count == -10.0  # twenty updates, all above the bound
    moved = plan
    for step in range(30):
        moved = moved.adapt(count, paid(moved, step))
    assert moved.clip_bound > plan.clip_bound
    assert moved.event == event
    assert moved.noise_std_sum / moved.clip_bound == pytest.approx(plan.noise_std_sum / plan.clip_bound)
    assert plan.with_clip_bound(moved.clip_bound) == moved
    with pytest.raises(InputError, match="only adaptive clipping"):
        plan_of().with_clip_bound(1.0)


def test_a_careless_delta_is_warned_of() -> None:
    assert plan_of().warnings == ()
    assert "delta=0.001" in plan_of(delta=1e-3).warnings[0]


def test_the_description_is_json_and_tells_plans_apart() -> None:
    adaptive = AdaptiveClipping(target_quantile=0.5)
    scope = NoiseScope(groups={"mlp": ["*.w1"]}, factors={"mlp": 0.5})
    plans = [plan_of(), plan_of(clip_bound=0.4), plan_of(adaptive=adaptive), plan_of(noise_scope=scope)]
    plans += [plan_of(clip_bound=math.inf, noise_multiplier=0.0), Plan(settings_of(), Layout(("w",), ((3,),)))]
    assert len({json.dumps(plan.describe(), allow_nan=False) for plan in plans}) == len(plans)
    header = plan_of().ledger_header(run="r", inputs="abc")
    assert (header.event, header.delta, header.mode) == (plan_of().event, 1e-6, "seeded")


REFUSED: dict[str, dict[str, Any]] = {
    "sampling_rate of at most 1, got 1.001": {"cohort_size": 1001},
    "cohort_size=0: expected a whole number": {"cohort_size": 0},
    "cohort_size=20.5: expected a whole number": {"cohort_size": 20.5},
    "population_size=nan: expected a whole number": {"population_size": math.nan},
    "no noise keeps no budget": {"noise_multiplier": 0.0, "epsilon_budget": 8.0},
    "noise_multiplier=-1.0: expected": {"noise_multiplier": -1.0, "epsilon_budget": 8.0},
    "noise_multiplier=nan": {"noise_multiplier": math.nan},
    "expected exactly one": {"sigma_dp": 0.1},
    "sigma_dp=None: expected exactly one": {"noise_multiplier": None},
    "epsilon_budget=0": {"epsilon_budget": 0.0},
    "epsilon_budget=nan": {"epsilon_budget": math.nan},
    "epsilon_budget=inf": {"epsilon_budget": math.inf},
    "noise_multiplier=1e-12: expected a number from": {"noise_multiplier": 1e-12},
    "weight_cap=3 with weighting=uniform": {"weight_cap": 3},
    "clip_bound=inf with noise_multiplier=0.8": {"clip_bound": math.inf},
    "clip_bound=0": {"clip_bound": 0.0},
    "weighting=wer": {"weighting": Weighting.WER},
    "weighting=loss": {"weighting": Weighting.LOSS, "weight_cap": 1.0},
    "expected a public weight_cap": {"weighting": Weighting.SECONDS},
    "weight_cap=-1": {"weighting": Weighting.SECONDS, "weight_cap": -1},
    "denominator=0": {"denominator": 0.0},
    "users_also_in_seed=3": {"users_also_in_seed": 3},
    "delta=1": {"delta": 1.0},
    "a seeded run has one": {"root_seed": None},
    "a secure run none": {"mode": Mode.SECURE},
    "cannot be kept: shuffled": {"privacy_unit": None, "no_unit_reason": "shuffled", "epsilon_budget": 8.0},
    "mode=secure is for releases": {"mode": Mode.SECURE, "root_seed": None, "noise_multiplier": 0.0},
    "the count alone spends more": {"adaptive": AdaptiveClipping(target_quantile=0.5, count_noise_std=0.4)},
    "expected share=weighted": {"alpha": {"out": 2.0}},
    "matches no parameter": {"layer_groups": {"mlp": ["*.w9"]}},
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_refusals_in_one_line(message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_of(**REFUSED[message])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adaptive_without_a_target_is_refused() -> None:
    with pytest.raises(InputError, match="target_quantile=None"):
        plan_of(adaptive=AdaptiveClipping())


def test_a_plan_cannot_be_bent_after_it_was_made() -> None:
    plan = plan_of()
    for name in ("settings", "layout", "adapted_clip_bound"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, None)
    with pytest.raises(InputError, match="clip_bound=inf"):
        dataclasses.replace(plan.settings, clip_bound=math.inf)
