"""Clients' word error rate as a noised sum: what one client can do to it, what it costs, and what it tells."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.flat.layout import Layout
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.client_wer import PAIR, ClientWer, contribution, estimate_client_wer
from sottovoce.privacy.events import Composition, Measured, poisson_release, repeated, run_event
from sottovoce.privacy.guarantee import count_measurements, guarantee_of, guarantee_to_json, is_measurement_due
from sottovoce.privacy.ledger import BudgetSpent, Charge, Ledger, verify
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.planner import plan_run, scale_plan
from sottovoce.privacy.pld import QUICK
from sottovoce.privacy.settings import Mode, PrivacySettings

ASKED = ClientWer(words=200, noise_multiplier=8.0, every=2)
LAYOUT = Layout(("w",), ((4,),))
STEPS = 5


def training(**changes: Any) -> Plan:
    chosen = {"cohort_size": 20, "clip_bound": 0.5, "noise_multiplier": 1.0, "delta": 1e-5, "root_seed": 7} | changes
    return Plan(PrivacySettings(population_size=100, privacy_unit="speaker", **chosen), LAYOUT)  # type: ignore[arg-type]


def numbers(pair_P: torch.Tensor) -> list[float]:
    return [float(part) for part in PAIR.parts(pair_P)]


# What one client can do.

COUNTS = st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**7))
BOUNDS = st.floats(1.0, 1e6)


@given(COUNTS, BOUNDS)
def test_nobody_counts_for_more_than_the_bound(counts: tuple[int, int], most: float) -> None:
    pair_P = contribution(*counts, most_words=most)
    wrong, right = numbers(pair_P)
    assert wrong >= 0
    assert right >= 0
    assert wrong + right <= most * (1 + 2**-50)
    plan = ClientWer(words=most, noise_multiplier=1.0).plan(training())
    total = plan.new_total()
    plan.accumulate(total, pair_P)
    assert torch.linalg.vector_norm(total) <= most


@given(st.lists(COUNTS, min_size=1, max_size=8), st.integers(0, 7), BOUNDS)
def test_one_client_more_or_less_moves_the_sum_by_the_bound_at_most(
    counts: list[tuple[int, int]], leaves: int, most: float
) -> None:
    plan = ClientWer(words=most, noise_multiplier=1.0).plan(training())

    def summed(some: list[tuple[int, int]]) -> torch.Tensor:
        total = plan.new_total()
        for each in some:
            plan.accumulate(total, contribution(*each, most_words=most))
        return total

    leaves %= len(counts)
    without = summed(counts[:leaves] + counts[leaves + 1 :])
    assert torch.linalg.vector_norm(summed(counts) - without) <= most  # exact: sums lie on the grid


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0), [0, 0]),  # no held-out speech
        ((3, 10), [3, 7]),
        ((30, 10), [10, 0]),  # above 100 % counts as 100 %
        ((100, 400), [50, 150]),  # long-winded: scaled, with the same rate
        ((-3, 10), [0, 10]),
    ],
)
def test_a_pair(counts: tuple[int, int], expected: list[float]) -> None:
    assert numbers(contribution(*counts, most_words=200)) == expected


def test_the_grid_keeps_pairs_all_but_exactly() -> None:
    """An update loses less than a cell of the grid to truncation, and half a millionth to the clip at its bound."""
    plan = ASKED.plan(training())
    total = plan.new_total()
    plan.accumulate(total, contribution(50, 400, most_words=200))
    assert plan.grid is not None
    assert np.allclose(numbers(total), [25, 175], atol=plan.grid + 200 * 2**-20, rtol=0)


# What it is a plan for.


def test_it_has_the_run_s_people_and_noise_and_streams_of_its_own() -> None:
    own = training()
    plan = ASKED.plan(own)
    assert plan.event == poisson_release(8.0, sampling_rate=0.2)
    assert plan.clip_bound == 200
    assert plan.noise_std_sum == 1600
    assert plan.sum_bits == 64
    assert plan.sample(3).tolist() != own.sample(3).tolist()
    noised = [each.add_noise(each.new_total(), charge_of(each)) for each in (plan, replace(own, layout=PAIR))]
    assert not torch.equal(noised[0] / 1600, noised[1] / 0.5)


def measurements(count: int) -> Composition:
    """What `count` of them with a multiplier of 8 release, of 20 in 100 people each."""
    return repeated(poisson_release(8.0, sampling_rate=0.2), count)


def charge_of(plan: Plan) -> Charge:
    return Charge(plan.event, step=3, clip_bound=plan.clip_bound)


def test_a_round_s_charge_does_not_pay_for_it() -> None:
    plan = ASKED.plan(training())
    with pytest.raises(InvariantError, match="was charged as"):
        plan.add_noise(plan.new_total(), charge_of(training()))


def test_with_noise_by_clients_theirs_is_wide_enough_here_too() -> None:
    shares = NoiseShares(most=100, least=30, colluding=10)
    own = replace(training(), sum_bits=64, noise_shares=shares)
    plan = ASKED.plan(own)
    assert plan.noise_shares == shares
    assert plan.released_std_sum == pytest.approx(1600 * shares.widening)
    assert plan.server_event is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"words": np.inf},
        {"words": np.nan},
        {"words": 0},
        {"noise_multiplier": 0},
        {"noise_multiplier": np.inf},
        {"noise_multiplier": np.nan},
        {"every": 0},
    ],
)
def test_what_bounds_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="client_wer"):
        ClientWer(**({"words": 200, "noise_multiplier": 8.0} | wrong))  # type: ignore[arg-type]


@given(st.integers(1, 60), st.none() | st.integers(1, 70))
def test_it_is_due_as_often_as_is_planned(steps: int, every: int | None) -> None:
    due = [step for step in range(steps + 1) if is_measurement_due(step, steps=steps, every=every)]
    assert len(due) == count_measurements(steps, every=every)
    assert due[-1] == steps
    assert 0 not in due


# What it tells.


def test_the_rate_is_that_of_the_sums() -> None:
    plan = ASKED.plan(training())
    found = estimate_client_wer(pair_of(20_000, 60_000), plan)
    assert found.rate == 0.25
    assert found.words == 80_000
    assert found.interval[0] < 0.25 < found.interval[1]
    assert estimate_client_wer(pair_of(-3.0, -4.0), plan).rate is None
    assert estimate_client_wer(pair_of(-3.0, -4.0), plan).interval == (0.0, 1.0)
    assert estimate_client_wer(pair_of(-500.0, 1e6), plan).rate == 0


def pair_of(errors: float, correct: float) -> torch.Tensor:
    pair_P = PAIR.zeros(dtype=torch.float64)
    for part, value in zip(PAIR.parts(pair_P), (errors, correct), strict=True):
        part.fill_(value)
    return pair_P


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("cohort_size", [20, 100])
def test_the_interval_holds_the_rate_as_often_as_it_says(rate: float, cohort_size: int) -> None:
    """Of 400 seeded draws of cohort and noise, 95 % and more; fewer than 370 would be one time in 10⁵."""
    generator = np.random.default_rng(11)
    plan = ClientWer(words=20, noise_multiplier=4.0).plan(training(cohort_size=cohort_size))
    words = generator.integers(1, 60, size=100)
    errors = generator.binomial(words, rate)
    pairs = np.array([numbers(contribution(int(e), int(n), most_words=20)) for e, n in zip(errors, words, strict=True)])
    true = pairs[:, 0].sum() / pairs.sum()
    held = 0
    for _ in range(400):
        drawn = pairs[generator.random(100) < plan.sampling_rate].sum(axis=0)
        low, high = estimate_client_wer(
            pair_of(*(drawn + generator.normal(0, plan.noise_std_sum, size=2))), plan
        ).interval
        held += low <= true <= high
    assert held >= 370


# What it costs.


@contextmanager
def opened(path: Path, plan: Plan, *, checkpoint: Mark | None = None) -> Iterator[Ledger]:
    header = plan.ledger_header(run="x", central_steps=STEPS, client_wer=ASKED.in_ledger(ASKED.plan(plan)))
    ledger = Ledger(path, header=header, checkpoint=checkpoint)
    try:
        yield ledger
    finally:
        ledger.close()


def intend(ledger: Ledger, plan: Plan, step: int) -> Charge:
    return plan.charge(ledger, step=step, parameters=f"p{step}", cohort=f"c{step}")


def measure(ledger: Ledger, plan: Plan, step: int, **changes: str) -> Charge:
    named = {"parameters": f"p{step}", "cohort": f"w{step}"} | changes
    wer = ASKED.plan(plan)
    return ledger.measure(wer.event, step=step, clip_bound=wer.clip_bound, **named)


def whole_run(path: Path, plan: Plan) -> None:
    with opened(path, plan) as ledger:
        for step in range(STEPS):
            intend(ledger, plan, step)
            if ASKED.is_due(step + 1, steps=STEPS):
                measure(ledger, plan, step + 1)
        ledger.commit(step=STEPS - 1, result="r")


def by_library(event: Composition, delta: float) -> tuple[float, float]:
    """ε of the parts by dp-accounting itself, composed one kind after another."""
    accountants = (
        pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-4),
        rdp_privacy_accountant.RdpAccountant(np.arange(2.0, 64.5, 0.5)),
    )
    for accountant in accountants:
        for part, count in event.parts:
            gaussian = dp_accounting.GaussianDpEvent(part.noise_multiplier)  # type: ignore[union-attr]
            accountant.compose(dp_accounting.PoissonSampledDpEvent(part.sampling_rate, gaussian), count)  # type: ignore[union-attr]
    by_pld, by_rdp = (accountant.get_epsilon(delta) for accountant in accountants)
    return float(by_pld), float(by_rdp)


def test_the_ledger_s_composition_is_the_library_s(tmp_path: Path) -> None:
    plan = training()
    whole_run(tmp_path / "l", plan)
    report = verify(tmp_path / "l")
    expected = run_event(plan.event, STEPS, measurements(3))
    assert report.spent == expected
    by_pld, by_rdp = by_library(expected, 1e-5)
    assert report.epsilon.pld == pytest.approx(by_pld, rel=1e-3)  # of an interval that may be finer
    assert report.epsilon.rdp == pytest.approx(by_rdp, rel=1e-3)  # of more orders
    assert report.epsilon.headline > epsilon(repeated(plan.event, STEPS), 1e-5).headline
    assert (report.steps, report.attempts, report.measured) == (STEPS, STEPS, 3)
    assert report.as_json()["client_wer"] == {
        "event": {"kind": "gaussian", "noise_multiplier": 8.0, "sampling": "poisson", "neighbouring": "add_remove"}
        | {"sampling_rate": 0.2},
        "words": 200.0,
        "every": 2,
        "measured": 3,
        "attempts": 3,
    }


def test_the_ledger_is_shown_with_it(tmp_path: Path) -> None:
    plan = training()
    whole_run(tmp_path / "l", plan)
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(verify(tmp_path / "l").table())
    shown = console.export_text()
    assert "measured 3 times, of at most 200 words a person: neighbouring=add_remove, noise_multiplier=8.0" in shown


def test_ε_so_far_counts_it(tmp_path: Path) -> None:
    plan = training()
    with opened(tmp_path / "l", plan) as ledger:
        intend(ledger, plan, 0)
        before = intend(ledger, plan, 1).epsilon
        after = measure(ledger, plan, 2).epsilon
        assert before is not None
        assert after is not None
        assert before < after == ledger.epsilon


def test_without_it_a_header_is_as_it_was() -> None:
    record = training().ledger_header(run="x", central_steps=STEPS).as_record()
    assert "client_wer" not in record


def test_the_promise_is_of_all_that_was_planned(tmp_path: Path) -> None:
    plan = training()
    with opened(tmp_path / "l", plan) as ledger:
        for step in range(2):
            intend(ledger, plan, step)
        measure(ledger, plan, 2)
    report = verify(tmp_path / "l")
    promised = guarantee_of(report)
    assert promised.event == run_event(plan.event, STEPS, measurements(3))
    assert (promised.steps, promised.made, promised.measured) == (STEPS, 2, 3)
    assert promised.words is not None
    assert "5 rounds and 3 WERs of clients; 2 made" in promised.words
    assert guarantee_to_json(promised, report)["promised_client_wers"] == 3


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_budget_takes_away_what_it_does_not_allow(tmp_path: Path, rounds: int) -> None:
    plan = training()
    by_rdp = epsilon(run_event(plan.event, rounds, measurements(rounds // 2)), 1e-5).rdp
    plan = training(epsilon_budget=by_rdp * 1.000001)
    made = []
    with opened(tmp_path / "l", plan) as ledger:
        for step in range(STEPS):
            try:
                intend(ledger, plan, step)
                made.append("round")
                if ASKED.is_due(step + 1, steps=STEPS):
                    measure(ledger, plan, step + 1)
                    made.append("wer")
            except BudgetSpent:
                break
        begun = made.copy()
    assert begun.count("round") == rounds
    assert guarantee_of(verify(tmp_path / "l")).epsilon.rdp <= by_rdp * 1.000001
    fresh = tmp_path / "fresh"
    with opened(fresh, plan):
        pass
    promised = guarantee_of(verify(fresh))
    assert (promised.steps, promised.measured) == (rounds, begun.count("wer"))


# Killed between the charge and the answer.


def test_a_seeded_run_is_charged_once_and_writes_the_same_bytes(tmp_path: Path) -> None:
    plan = training()
    whole_run(tmp_path / "whole", plan)
    with opened(tmp_path / "killed", plan) as ledger:
        for step in range(2):
            intend(ledger, plan, step)
        measure(ledger, plan, 2)
    whole_run(tmp_path / "killed", plan)  # from the start: no checkpoint was written
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "killed").read_bytes()


def test_a_seeded_run_that_would_measure_something_else_is_refused(tmp_path: Path) -> None:
    plan = training()
    with opened(tmp_path / "l", plan) as ledger:
        for step in range(2):
            intend(ledger, plan, step)
        measure(ledger, plan, 2)
    with opened(tmp_path / "l", plan) as ledger:
        for step in range(2):
            intend(ledger, plan, step)
        with pytest.raises(InputError, match="the same noise over changed inputs"):
            measure(ledger, plan, 2, parameters="other")


def test_a_release_pays_for_every_attempt(tmp_path: Path) -> None:
    plan = training(root_seed=None, mode=Mode.SECURE)
    with opened(tmp_path / "l", plan) as ledger:
        for step in range(2):
            intend(ledger, plan, step)
        assert measure(ledger, plan, 2).attempt == 1
    with opened(tmp_path / "l", plan) as ledger:
        for step in range(2):
            intend(ledger, plan, step)
        assert measure(ledger, plan, 2).attempt == 2
    report = verify(tmp_path / "l")
    assert (report.steps, report.attempts, report.measured, report.measured_attempts) == (2, 4, 1, 2)
    assert report.spent == run_event(plan.event, 4, measurements(2))
    assert guarantee_of(report).event == run_event(plan.event, 4 + 3, measurements(2 + 2))


def test_never_twice_and_never_of_nothing(tmp_path: Path) -> None:
    plan = training()
    with opened(tmp_path / "l", plan) as ledger:
        with pytest.raises(InvariantError):
            measure(ledger, plan, 0)
        intend(ledger, plan, 0)
        with pytest.raises(InvariantError, match="the step after the last is 1"):
            measure(ledger, plan, 2)
        charge = measure(ledger, plan, 1)
        with pytest.raises(InvariantError, match="a second one"):
            measure(ledger, plan, 1)
    wer = ASKED.plan(plan)
    wer.add_noise(wer.new_total(), charge)
    with pytest.raises(InvariantError, match="a second sum"):
        wer.add_noise(wer.new_total(), charge)


def test_a_run_that_never_said_so_measures_nothing(tmp_path: Path) -> None:
    plan = training()
    ledger = Ledger(tmp_path / "l", header=plan.ledger_header(run="x"))
    intend(ledger, plan, 0)
    with pytest.raises(InvariantError, match="the header accounts for None"):
        measure(ledger, plan, 1)
    ledger.close()
    with pytest.raises(InputError, match="belongs to another run: it says client_wer"), opened(tmp_path / "l", plan):
        pass


# Plans.


def test_a_plan_s_ε_covers_it() -> None:
    sizes = {"cohort_size": 20, "central_steps": 50, "delta": 1e-5, "cap": QUICK}
    measured = Measured(count=5, noise_multiplier=2.0)
    alone = plan_run(1000, noise_multiplier=1.0, **sizes)  # type: ignore[arg-type]
    both = plan_run(1000, noise_multiplier=1.0, measured=measured, **sizes)  # type: ignore[arg-type]
    assert both.epsilon.rdp > alone.epsilon.rdp
    assert both.to_json()["client_wer"] == {"measured": 5, "noise_multiplier": 2.0}
    assert "client_wer" not in alone.to_json()
    target = plan_run(1000, target_epsilon=both.epsilon.rdp, accountant="rdp", measured=measured, **sizes)  # type: ignore[arg-type]
    assert target.noise_multiplier == pytest.approx(1.0, rel=1e-4)
    (scaled,) = scale_plan(both, factors=[10.0], cap=QUICK)
    assert scaled.measured == Measured(count=5, noise_multiplier=20.0)
