"""Runs in somebody else's loop: the same chain as a run of ours, and no way round it."""

import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.dp.own_run import run_ours
from tests.tampering import GENESIS

from sottovoce import dp
from sottovoce.base.seeds import stream
from sottovoce.privacy.chain import read_chain, seal
from sottovoce.privacy.rdp import ORDERS

PLANNED = dp.plan_run(40, cohort_size=8, central_steps=6, delta=1e-3, noise_multiplier=1.0, clip_bound=0.5)
START = {"w": np.zeros((3, 2), dtype=np.float32), "b": np.zeros(2, dtype=np.float32)}

Models = dict[str, Any]


def train(user: int, model: Models) -> Models:
    """Half the way to a model of the user's own."""
    own = {name: stream(5, "own", user, name).normal(1.0, 1.0, one.shape) for name, one in model.items()}
    return {name: (one + 0.5 * (own[name] - one)).astype(one.dtype) for name, one in model.items()}


def go_on(run: dp.PrivateRun, model: Models, *, rounds: int = 1000) -> Models:
    """All rounds that are left, or so many."""
    for _ in range(rounds):
        turn = run.next_round(model)
        if turn is None:
            break
        for user in turn.cohort:
            turn.add_trained(user, train(user, model))
        mean = turn.release()
        model = {name: one - mean[name] for name, one in model.items()}
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"sampling": "fixed_size"}, {"mechanism": {"kind": "banded", "bands": 2}}],
    ids=["poisson", "fixed size", "correlated"],
)
def test_a_loop_of_ones_own_is_a_run_of_ours_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, ledger = run_ours(PLANNED, START, train, folder=tmp_path, root_seed=3, **options)
    with dp.start_run(PLANNED, START, folder=tmp_path, root_seed=3, **options) as run:
        theirs = go_on(run, START)
    for name, one in ours.items():
        np.testing.assert_array_equal(theirs[name], one)
    stated = dp.state_run(tmp_path)
    assert stated.epsilon == ledger.epsilon.headline
    assert stated.ledger.parameters == ledger.parameters
    assert stated.ledger.header == ledger.header


def test_epsilon_is_dp_accountings(tmp_path: Path) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path) as run:
        go_on(run, START)
    stated, release = dp.state_run(tmp_path), dp_accounting.GaussianDpEvent(1.0)
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(8 / 40, release), 6)
    rdp, pld = RdpAccountant(ORDERS), PLDAccountant(value_discretization_interval=1e-4)
    by_rdp, by_pld = (one.compose(event).get_epsilon(1e-3) for one in (rdp, pld))
    assert stated.guarantee.epsilon.rdp == pytest.approx(by_rdp, rel=1e-9)
    # Two grids, each of which rounds a loss up by at most its interval in each of six steps.
    assert stated.guarantee.epsilon.pld == pytest.approx(by_pld, abs=6 * (1e-4 + stated.guarantee.epsilon.pld_interval))
    assert stated.epsilon == PLANNED.epsilon.headline
    assert stated.kind == "release"
    assert stated.proof is not None
    assert stated.proof.is_proved


def test_a_budget_stops_a_run_before_it_is_exceeded(tmp_path: Path) -> None:
    spent = [dp_rdp(step) for step in range(1, 7)]
    budget = (spent[2] + spent[3]) / 2  # three rounds, and not four
    with dp.start_run(PLANNED, START, folder=tmp_path, epsilon_budget=budget) as run:
        assert run.guarantee.steps == 3
        go_on(run, START)
        assert run.step == 3
        assert run.stopped is not None
        assert run.stopped.startswith("step 3 would bring epsilon")
    stated = dp.state_run(tmp_path)
    assert stated.guarantee.made == 3
    assert stated.guarantee.epsilon.rdp == pytest.approx(spent[2], rel=1e-9)
    assert "budget" in dict(stated.facts)


def dp_rdp(steps: int) -> float:
    event = dp_accounting.PoissonSampledDpEvent(8 / 40, dp_accounting.GaussianDpEvent(1.0))
    return float(RdpAccountant(ORDERS).compose(event, steps).get_epsilon(1e-3))


def test_a_simulation_that_was_interrupted_is_done_again_and_charged_once(tmp_path: Path) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path / "whole" / "run", root_seed=3) as run:
        whole = go_on(run, START)
    place = tmp_path / "parts" / "run"
    with dp.start_run(PLANNED, START, folder=place, root_seed=3) as run:
        model = go_on(run, START, rounds=2)
        run.commit(model)
        assert run.next_round(model) is not None  # charged, and then killed
    with dp.start_run(PLANNED, model, folder=place, root_seed=3) as run:
        assert run.step == 2
        again = go_on(run, model)
    for name, one in whole.items():
        np.testing.assert_array_equal(again[name], one)
    assert (place / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "run" / "ledger.jsonl").read_bytes()


def test_a_release_that_was_interrupted_pays_for_what_was_lost(tmp_path: Path) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path) as run:
        model = go_on(run, START, rounds=2)
        lost = run.next_round(model)
        assert lost is not None
    with dp.start_run(PLANNED, model, folder=tmp_path) as run:
        assert run.step == 2
        go_on(run, model)
    stated = dp.state_run(tmp_path)
    assert (stated.ledger.steps, stated.ledger.attempts) == (6, 7)
    assert stated.guarantee.epsilon.rdp == pytest.approx(dp_rdp(7), rel=1e-9)
    assert dict(stated.facts)["repeated after a crash"] == "1 attempts; each is in ε"


def test_a_release_with_correlated_noise_goes_on_and_leaves_no_secrets(tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "mechanism": {"kind": "banded", "bands": 2}}
    with dp.start_run(PLANNED, START, **options) as run:
        model = go_on(run, START, rounds=2)
        assert run.next_round(model) is not None  # charged, and then killed
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    with dp.start_run(PLANNED, model, **options) as run:
        go_on(run, model)
    stated = dp.state_run(tmp_path)
    assert (stated.ledger.steps, stated.ledger.attempts) == (6, 7)
    assert "correlated over rounds" in dict(stated.facts)["noise"]
    assert not (tmp_path / "secrets").exists()


def test_a_run_goes_on_only_with_its_own_parameters_and_plan(tmp_path: Path) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path, root_seed=3) as run:
        model = go_on(run, START, rounds=2)
        run.commit(model)
    other = {name: one + 1 for name, one in model.items()}
    with pytest.raises(dp.InputError, match="is of a run with other parameters"):
        dp.start_run(PLANNED, other, folder=tmp_path, root_seed=3)
    with pytest.raises(dp.InputError, match="belongs to another run: it says plan"):
        dp.start_run(PLANNED, model, folder=tmp_path, root_seed=4)


def test_an_update_that_is_not_finite_and_users_who_are_missing_count_as_zero(tmp_path: Path) -> None:
    """As if they were drawn and had learned nothing: the divisor stays the expected number."""
    means = []
    for name, sends in (("trouble", np.nan), ("nothing", 0.0)):
        with dp.start_run(PLANNED, START, folder=tmp_path / name, root_seed=3) as run:
            turn = run.next_round(START)
            assert turn is not None
            first, missing, *others = turn.cohort
            turn.add(first, {"w": np.full((3, 2), sends), "b": np.zeros(2)})
            for user in others:
                turn.add(user, {"w": np.ones((3, 2)), "b": np.ones(2)})
            found = turn.counts()
            assert found == {"drawn": len(turn.cohort), "missing": 1, "non_finite": int(math.isnan(sends))}
            assert missing in turn.cohort
            means.append(turn.release())
    np.testing.assert_array_equal(means[0]["w"], means[1]["w"])


def test_a_round_cannot_be_got_round(tmp_path: Path) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path) as run:
        turn = run.next_round(START)
        assert turn is not None
        update = {"w": np.ones((3, 2)), "b": np.ones(2)}
        user = turn.cohort[0] if turn.cohort else None
        outside = next(one for one in range(40) if one not in turn.cohort)
        with pytest.raises(dp.InputError, match=f"user {outside} in step 0: not drawn"):
            turn.add(outside, update)
        if user is not None:  # nearly always: nobody is drawn once in 7,500 runs
            turn.add(user, update)
            with pytest.raises(dp.InputError, match="each counts once at most"):
                turn.add(user, update)
        with pytest.raises(dp.InputError, match="is charged and not released"):
            run.next_round(START)
        with pytest.raises(dp.InputError, match="no ε covers it"):
            turn.counts()
        turn.release()
        with pytest.raises(dp.InputError, match="is released already"):
            turn.release()
        with pytest.raises(dp.InputError, match="is released already"):
            turn.add(outside, update)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"w": np.ones((3, 2))}, "no array 'b': expected w, b"),
        ({"w": np.ones((3, 2)), "b": np.ones(2), "c": np.ones(2)}, "array 'c' is no parameter"),
        ({"w": np.ones((2, 3)), "b": np.ones(2)}, "array 'w' of shape"),
        ({"w": np.ones((3, 2), dtype=int), "b": np.ones(2)}, "array 'w' of int64: expected floating-point"),
        ({"w": np.full((3, 2), "text"), "b": np.ones(2)}, "array 'w' of <U4: expected floating-point"),
        ({"w": np.ones((3, 2), dtype=">f4"), "b": np.ones(2)}, "array 'w' of >f4: expected floating-point"),
    ],
)
def test_updates_of_another_form_are_refused(tmp_path: Path, update: Models, message: str) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path, root_seed=3) as run:
        turn = run.next_round(START)
        assert turn is not None
        with pytest.raises(dp.InputError, match=message):
            turn.add(turn.cohort[0], update)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_bound": 2.0}, "clip_bound=2.0: the plan has it"),
        ({"weighting": "utterances"}, "weighting=utterances: nothing in a loop of one's own does that"),
        ({"epsilon": 3}, "unexpected keyword argument 'epsilon'"),
        ({"root_seed": 1, "mode": "secure"}, "a secure run none"),
    ],
)
def test_options_that_a_run_cannot_have_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dp.InputError, match=message):
        dp.start_run(PLANNED, START, folder=tmp_path, **options)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_whole_numbers_among_the_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(dp.InputError, match="array 'batches' of int64"):
        dp.start_run(PLANNED, {**START, "batches": np.zeros(1, dtype=int)}, folder=tmp_path)


def test_tensors_come_back_as_tensors_of_their_type(tmp_path: Path) -> None:
    model = {"w": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.float64)}
    with dp.start_run(PLANNED, model, folder=tmp_path) as run:
        turn = run.next_round(model)
        assert turn is not None
        mean = turn.release()
    assert {name: (type(one), one.dtype) for name, one in mean.items()} == {
        "w": (torch.Tensor, torch.bfloat16),
        "b": (torch.Tensor, torch.float64),
    }


@given(
    update=arrays.arrays(np.float64, 7, elements=st.floats(allow_nan=True, allow_infinity=True)),
    clip_bound=st.floats(1e-6, 1e6),
)
def test_a_clipped_update_is_never_longer_than_the_bound(update: np.ndarray, clip_bound: float) -> None:
    clipped = dp.clip_update({"w": update[:4], "b": update[4:]}, clip_bound=clip_bound)
    whole = np.concatenate([*clipped.values()])
    assert np.linalg.norm(whole) <= clip_bound
    if not np.isfinite(update).all():
        assert not whole.any()


def test_a_statement_is_of_a_sound_ledger_and_names_its_signer(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with dp.start_run(PLANNED, START, folder=tmp_path, key=key, privacy_unit="patient") as run:
        go_on(run, START)
    stated = dp.state_run(tmp_path)
    text, facts = str(stated), dict(stated.facts)
    assert text.startswith("# A release with a ")
    assert facts["unit of privacy"] == "one patient, added or removed, with everything that it holds"
    assert facts["signature"].startswith("signed by ")
    assert "proved" in facts["proof"]
    assert stated.as_json()["kind"] == "release"
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0', 1))
    with pytest.raises(dp.InputError, match="was changed"):
        dp.state_run(tmp_path)


def rewrite_header(path: Path, change: dict[str, Any]) -> None:
    """Of a ledger, whose chain is made to fit it: anybody can do that."""
    lines, head = list[bytes](), GENESIS
    for record in read_chain(path).records:
        line, head = seal(record | (change if record["kind"] == "header" else {}), after=head)
        lines.append(line)
    path.write_bytes(b"".join(lines))


def budget_for(rounds: int) -> float:
    spent = dp.plan_run(40, cohort_size=8, central_steps=rounds, delta=1e-3, noise_multiplier=1.0).epsilon
    return spent.rdp * 1.001


@pytest.mark.parametrize("budgets", [(None, 2, 4), (2, 4, 5)], ids=["lowered", "raised"])
def test_a_budget_that_is_changed_after_a_release_promises_nothing(
    tmp_path: Path, budgets: tuple[int | None, ...]
) -> None:
    """Or else somebody who stops because of what was released would state the ε of the rounds made so far."""
    model = START
    for budget in budgets:
        limit = None if budget is None else budget_for(budget)
        with dp.start_run(PLANNED, model, folder=tmp_path, epsilon_budget=limit) as run:
            model = go_on(run, model, rounds=2)
            run.commit(model)
            if budget == budgets[0]:
                assert run.guarantee.steps == (budget or PLANNED.central_steps)
    with dp.start_run(PLANNED, model, folder=tmp_path, epsilon_budget=limit) as run:
        assert run.step == budgets[-1]
        assert run.next_round(model) is None
        assert "above epsilon_budget" in str(run.stopped)
    stated = dp.state_run(tmp_path)
    assert stated.guarantee.epsilon == PLANNED.epsilon
    assert (stated.guarantee.made, stated.guarantee.steps) == (budgets[-1], 6)


@pytest.mark.parametrize("lowered", [0.5, 0.7])
def test_a_budget_that_is_lowered_before_any_release_counts(tmp_path: Path, lowered: float) -> None:
    for budget in (None, lowered):
        dp.start_run(PLANNED, START, folder=tmp_path, epsilon_budget=budget).close()
    assert dp.state_run(tmp_path).guarantee.epsilon.rdp <= lowered


@pytest.mark.parametrize(
    ("change", "message"),
    [({"mode": "secure", "inputs": ""}, "its plan is of mode=seeded"), ({"plan": {}}, "no header that a run")],
)
def test_a_simulation_is_not_stated_as_a_release(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with dp.start_run(PLANNED, START, folder=tmp_path, root_seed=7) as run:
        go_on(run, START)
    assert dp.state_run(tmp_path).kind == "simulation"
    rewrite_header(tmp_path / "ledger.jsonl", change)
    with pytest.raises(dp.InputError, match=message):
        dp.state_run(tmp_path)
