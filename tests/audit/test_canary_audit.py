"""Audits of honest rounds: canaries are users like all others, and nothing speaks against what is promised."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.audit.linear import EVERYBODY, LAYOUT, PEOPLE, SOME, LinearPeople, audit_of, plan_of, server_of
from tests.audit.planted import less_noise

from sottovoce.audit.canaries import UPDATE_SCALE, Canaries, CanaryEngine, MatchedFilter, canary_scores, others_in
from sottovoce.audit.canary_audit import (
    DRAWN_BY_CHANCE,
    HOLDS_TRUTH,
    Audit,
    AuditVerdict,
    Observer,
    audit_rounds,
    describe_interval,
)
from sottovoce.audit.rounds import AuditedRounds, JoinedEngine, audited_plan
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Trained
from sottovoce.federated.round import RoundState, run_round
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.events import CorrelatedRelease
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.mechanism import Correlated
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.strategies import Banded, Blt, first_column, sensitivity

# Canaries.


@pytest.mark.parametrize("share", ["global", "uniform", "dim"])
def test_a_canary_is_clipped_to_its_own_direction_of_length_c(share: str) -> None:
    plan = plan_of(share=share)
    canaries = Canaries(plan, 40, seed=3)
    directions_NP = canaries.directions(range(40))
    assert torch.allclose(directions_NP.norm(dim=1), torch.ones(40))
    clipped_NP = plan.clip(directions_NP * UPDATE_SCALE * plan.clip_bound)
    assert torch.allclose(clipped_NP, directions_NP * plan.clip_bound, atol=1e-6)
    assert 5 < canaries.is_in.sum() < 35
    assert torch.equal(directions_NP[7], canaries.directions([7])[0])
    padding = LAYOUT.zeros(40)
    for part in LAYOUT.parts(padding):
        part.fill_(1.0)
    assert not directions_NP[padding == 0].any()


def test_a_canary_that_is_left_out_sends_nothing_and_the_others_turn_round() -> None:
    canaries = Canaries(plan_of(), 40, seed=3)
    engine = CanaryEngine(canaries, signs=True)
    first, second = (
        {one: row for trained in engine.train(LAYOUT.zeros(), range(40), step=step) for one, row in _rows(trained)}
        for step in (0, 1)
    )
    assert sorted(first) == np.flatnonzero(canaries.is_in).tolist() == engine.drawn
    assert all(torch.equal(first[one], -second[one]) for one in first)


def _rows(trained: Trained) -> list[tuple[int, torch.Tensor]]:
    return list(zip(trained.clients, trained.update, strict=True))


def test_engines_in_a_row_have_each_their_own_clients() -> None:
    canaries = Canaries(plan_of(), 40, seed=3)
    joined = JoinedEngine([(LinearPeople(), PEOPLE), (CanaryEngine(canaries, signs=True), 40)])
    here = int(np.flatnonzero(canaries.is_in)[0])
    trained = [
        one
        for one in joined.train(LAYOUT.zeros(), [3, PEOPLE + here], step=0, positions=[1, 2])
        if isinstance(one, Trained)
    ]
    assert [one.clients for one in trained] == [(3,), (here,)]


def test_too_few_canaries_are_refused() -> None:
    with pytest.raises(InputError, match="canaries=3"):
        Canaries(plan_of(), 3, seed=1)


@pytest.mark.parametrize("base", [EVERYBODY, SOME])
def test_the_audited_plan_draws_as_often_and_adds_as_much_noise_to_the_sum(base: dict[str, Any]) -> None:
    plan = plan_of(**base)
    audited = audited_plan(plan, others=540)
    assert audited.settings.population_size == PEOPLE + 540
    assert audited.sampling_rate == pytest.approx(plan.sampling_rate)
    assert audited.noise_std_sum == plan.noise_std_sum
    assert audited.event == plan.event


BANDED = Correlated(cycle=3, strategy=Banded(column=(1.0, 0.6, 0.4)))
BLT = Correlated(cycle=3, strategy=Blt(decays=(0.7,), scales=(0.5,)))
MECHANISMS = {"independent": None, "banded": BANDED, "BLT": BLT}
CORRELATED: dict[str, dict[str, Any]] = {  # ε = 2.5 for nine rounds, and each user is in every third
    "banded": {"cohort_size": PEOPLE // 3, "noise_multiplier": 4.0, "mechanism": BANDED},
    "BLT": {"cohort_size": PEOPLE // 3, "noise_multiplier": 4.8, "mechanism": BLT},
}


def filter_of(mechanism: Correlated | None, *, rounds: int, canaries: int = 40) -> tuple[Canaries, MatchedFilter]:
    people = 3 * canaries
    cohort_size = canaries if mechanism is None else people // mechanism.cycle
    plan = plan_of(population_size=people, cohort_size=cohort_size, mechanism=mechanism)
    birds = Canaries(plan, canaries, seed=3)
    engine = CanaryEngine(birds, signs=True)
    return birds, MatchedFilter(plan, first=2 * canaries, signs_T=np.array([engine.sign(t) for t in range(rounds)]))


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_the_other_canaries_bring_is_known(name: str) -> None:
    """By adding up, as the observer of each group would, what rounds with every canary that is drawn leave."""
    canaries, best = filter_of(MECHANISMS[name], rounds=8)
    sampler, groups_N, is_in = canaries.plan.sampler, best.groups_N, canaries.is_in
    cycle = sampler.cycle if isinstance(sampler, CyclicSampler) else 1
    rate = 1.0 if cycle > 1 else canaries.plan.sampling_rate
    directions_NP = canaries.directions(range(40)).double()
    product_NN = (directions_NP @ directions_NP.T).numpy()
    expected_N = [
        sum(
            rate * best.weights_GT[groups_N[i], t] * product_NN[i, j]
            for t in range(8)
            for j in np.flatnonzero(is_in)
            if j != i and groups_N[j] == t % cycle
        )
        for i in range(40)
    ]
    assert np.allclose(others_in(canaries, best).sum(1), expected_N, atol=1e-4)
    scores_NH = canary_scores(canaries, directions_NP[5].float()[None], np.zeros(40, dtype=np.int64))
    assert np.allclose(scores_NH.sum(1), product_NN[5], atol=1e-5)


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_other_weights_tell_more_of_a_canary(name: str) -> None:
    """What a canary moves, over the noise in it, is what a user can move M·releases by: the thing that is accounted."""
    _, best = filter_of(MECHANISMS[name], rounds=8)
    strategy = Banded(column=(1.0,)) if (mechanism := MECHANISMS[name]) is None else mechanism.strategy
    cycle = 1 if mechanism is None else mechanism.cycle
    matrix_TT = scipy.linalg.toeplitz(first_column(strategy, 8), np.zeros(8))
    noise_TT = np.linalg.inv(matrix_TT)  # y = M⁻¹w
    turned_GT = best.weights_GT * best.signs_T
    noise_G = np.linalg.norm(turned_GT @ noise_TT, axis=1)
    signal_G = [best.weights_GT[group, group::cycle].sum() for group in range(cycle)]
    assert np.allclose(noise_G, noise_G[0])
    assert max(signal_G / noise_G) == pytest.approx(sensitivity(strategy, rows=8, cycle=cycle))
    assert best.takes_part_N.all()


def test_without_a_mechanism_releases_are_added_up_as_they_are() -> None:
    _, best = filter_of(None, rounds=5)
    assert best.weights_GT.tolist() == [[1.0] * 5]
    _, alike = filter_of(Correlated(cycle=1, strategy=Banded(column=(1.0,))), rounds=5)
    assert alike.weights_GT.tolist() == [[1.0] * 5]


def test_canaries_whose_group_has_no_turn_have_nothing_to_tell() -> None:
    canaries, best = filter_of(BANDED, rounds=2)
    assert best.weights_GT.shape == (2, 2)
    assert 0 < best.takes_part_N.sum() < 40
    assert not canary_scores(canaries, LAYOUT.zeros(2) + 1, best.groups_N)[~best.takes_part_N].any()
    rare = Correlated(cycle=30, strategy=BANDED.strategy)
    with pytest.raises(InputError, match=r"canaries=20: [0-3] of them have a turn in so few rounds"):
        audit_of(canaries=20, rounds=1, cohort_size=2, noise_multiplier=1.2, mechanism=rare)


def test_a_round_shows_what_it_releases_before_the_server_uses_it(tmp_path: Path) -> None:
    plan, server, seen = plan_of(), server_of(), []
    before_P = server.parameters_P.clone()
    ledger = Ledger(tmp_path / "ledger.jsonl", header=plan.ledger_header(run="shown"))
    run_round(
        RoundState(server, plan, ledger),
        LocalClients(LinearPeople()),
        step=0,
        on_release=lambda released_P, step: seen.append((released_P.clone(), step)),
    )
    ledger.close()
    ((released_P, step),) = seen
    assert step == 0
    assert torch.allclose(server.parameters_P, before_P - 0.1 * released_P)


# On a GPU.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_canaries_on_a_gpu_are_the_same() -> None:
    here, there = (Canaries(plan_of(), 40, seed=3, device=device) for device in ("cpu", "cuda"))
    assert torch.equal(here.directions(range(40)), there.directions(range(40)).cpu())
    seen_P = LAYOUT.zeros().normal_(generator=torch_stream(1))
    groups_N = np.zeros(40, dtype=np.int64)
    scores = canary_scores(here, seen_P[None], groups_N), canary_scores(there, seen_P[None].cuda(), groups_N)
    assert np.allclose(*scores, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", MECHANISMS)
def test_an_audit_is_made_where_the_model_is(name: str, device: str) -> None:
    """Of canaries alone: ε = 2 or so, and the estimate within five standard errors of it."""
    alike = CORRELATED.get(name, EVERYBODY)
    server = server_of(device=device)
    rounds = 9 if name in CORRELATED else 4
    found = audit_rounds(plan_of(**alike), AuditedRounds(server, rounds), canaries=900, seed=3)
    assert server.parameters_P.device.type == device
    assert not is_far_above(found), found.why
    assert found.fit.epsilon + 2.15 * (found.fit.high - found.fit.epsilon) > found.promised
    assert found.noise is not None
    assert not found.noise.is_missing
    assert found.drawn is not None
    assert not found.drawn.too_often


# Whole audits.

HONEST: dict[str, dict[str, Any]] = {
    "everybody": EVERYBODY,
    "some": SOME,
    "some, a bound on each layer": {**SOME, "share": "dim"},
    "some, weighted": {**SOME, "weighting": "seconds", "weight_cap": 4.0},
    "some, adaptive clipping": {**SOME, "adaptive": AdaptiveClipping(target_quantile=0.5, count_noise_std=5.0)},
    "of fixed size": {**SOME, "sampling": "fixed_size"},
    "the final model alone": {**EVERYBODY, "observer": Observer.FINAL},
    "some, banded noise": {**SOME, "mechanism": Correlated(cycle=5, strategy=Banded(column=(1.0, 0.5, 0.3)))},
    "groups, BLT noise": {**SOME, "mechanism": Correlated(cycle=10, strategy=Blt(decays=(0.7,), scales=(0.5,)))},
}


def is_far_above(found: Audit) -> bool:
    """Whether the estimate is five standard errors above the promise: its interval has 2.3."""
    return found.fit.epsilon - 2.15 * (found.fit.epsilon - found.fit.low) > found.promised


@pytest.mark.parametrize("name", HONEST)
def test_honest_rounds_are_consistent(name: str) -> None:
    found = audit_of(canaries=600, seed=2, **HONEST[name])
    assert not is_far_above(found), found.why
    assert found.bound.epsilon < found.promised
    assert found.noise is not None
    assert not found.noise.is_missing
    assert found.people == PEOPLE
    if HONEST[name]["cohort_size"] < PEOPLE:  # where it is far below: what is promised is no close call
        assert found.verdict is AuditVerdict.CONSISTENT, found.why
        assert found.as_json()["verdict"] == "consistent"


def test_with_everybody_in_every_round_the_estimate_meets_what_is_promised() -> None:
    found = audit_of(seed=4)
    assert found.promised == pytest.approx(2.0, abs=0.1)
    assert not is_far_above(found)
    assert found.fit.epsilon + 2.15 * (found.fit.high - found.fit.epsilon) > found.promised


@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_noise_hides_from_the_best_observer_what_is_promised_and_no_more(name: str) -> None:
    found = audit_of(seed=4, rounds=9, **CORRELATED[name])
    assert 2 < found.promised < 3
    assert not is_far_above(found)
    assert found.fit.epsilon + 2.15 * (found.fit.high - found.fit.epsilon) > found.promised
    assert found.bound.epsilon < found.promised


@pytest.mark.parametrize("name", CORRELATED)
def test_half_of_correlated_noise_alarms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    less_noise(2)(monkeypatch)
    found = audit_of(seed=4, rounds=9, **CORRELATED[name])
    assert found.fit.low > found.promised
    assert found.verdict is not AuditVerdict.CONSISTENT


@pytest.mark.parametrize("name", ["everybody", "groups, BLT noise"])
def test_a_release_can_be_audited(name: str) -> None:
    """Noise from the operating system, on a grid: other draws each time, so only what cannot be chance is asserted."""
    pytest.importorskip("cryptography", reason="the secure mode draws from cryptography's AES")
    found = audit_of(canaries=300, mode="secure", root_seed=None, **HONEST[name])
    assert found.noise is not None
    assert not found.noise.is_missing
    assert found.fit.low < 3 * found.promised


def test_without_noise_nothing_is_promised_and_the_canaries_stand_out() -> None:
    found = audit_of(canaries=300, noise_multiplier=0.0)
    assert found.promised == math.inf
    assert found.verdict is AuditVerdict.CONSISTENT
    assert found.why == "nothing is promised, so that nothing can be broken"
    assert found.fit.epsilon > 20
    assert found.as_json()["promised"] == {"epsilon_pld": None, "epsilon_rdp": None}
    assert found.noise is None


def test_the_same_seeds_find_the_same() -> None:
    assert audit_of(canaries=100).as_json() == audit_of(canaries=100).as_json()
    assert audit_of(canaries=100).as_json() != audit_of(canaries=100, seed=2).as_json()


def test_what_an_interval_is_worth_is_said_by_who_is_drawn_and_what_is_seen() -> None:
    """With a tenth of the people in each round, no share of the intervals holds the truth (docs/audit.md: 0 of 30)."""
    everybody, some, last = (
        audit_of(canaries=200, **settings) for settings in (EVERYBODY, SOME, {**EVERYBODY, "observer": Observer.FINAL})
    )
    assert everybody.interval == "the interval holds the true ε in 98% of audits"
    assert some.interval.startswith("people are drawn by chance, so estimate and interval are what an attack achieved")
    assert last.interval.startswith("the attacker sees the last model alone, so estimate and interval are what")
    told = [one.as_json()["interval_holds_truth"] for one in (everybody, some, last)]
    assert told == [True, False, False]
    assert some.as_json()["interval_words"] == some.interval
    chain = CorrelatedRelease(2.0, 1.0, 3, Banded(column=(1.0, 0.75)))
    assert describe_interval(chain, Observer.RELEASES) == HOLDS_TRUTH, "everybody of a group, in every round of it"
    assert (
        describe_interval(CorrelatedRelease(2.0, 0.5, 3, Banded(column=(1.0,))), Observer.RELEASES) == DRAWN_BY_CHANCE
    )
