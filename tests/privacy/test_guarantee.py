"""What is promised is ε of the whole plan, and of several runs together that of all their releases."""

import math
from pathlib import Path

import pytest

from sottovoce.base.units import SILO
from sottovoce.privacy.accounting import epsilon, rdp_epsilon
from sottovoce.privacy.events import (
    GaussianRelease,
    NoGuarantee,
    composed,
    fixed_size_release,
    poisson_release,
    repeated,
    replaced,
)
from sottovoce.privacy.guarantee import Guarantee, guarantee_of, joint_epsilon
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.ledger_records import Header
from sottovoce.privacy.ledger_report import LedgerReport

STEP = poisson_release(4.0, sampling_rate=0.05)
DELTA = 1e-6


def ledger(
    path: Path,
    *steps: int,
    central_steps: int | None,
    event: GaussianRelease | NoGuarantee = STEP,
    epsilon_budget: float | None = None,
) -> LedgerReport:
    """The ledger of a release that charged `steps`, one after another, from its start again wherever they go back."""
    header = Header(
        run="r",
        mode="secure",
        plan={"privacy_unit": "speaker"},
        event=event,
        delta=DELTA,
        epsilon_budget=epsilon_budget,
        central_steps=central_steps,
    )
    open_ledger, last = Ledger(path, header=header), -1
    for step in steps:
        if step <= last:
            open_ledger.close()
            open_ledger = Ledger(path, header=header)
        open_ledger.intend(event, step=step, clip_bound=1.0, parameters="p", cohort="c")
        last = step
    open_ledger.close()
    return verify(path)


def promised(count: int, *, event: GaussianRelease | NoGuarantee = STEP, delta: float = DELTA) -> Guarantee:
    return Guarantee(repeated(event, count), delta, "speaker", simulated=False, steps=count, made=count)


def test_steps_that_are_left_are_promised_with_those_that_are_made(tmp_path: Path) -> None:
    one = guarantee_of(ledger(tmp_path / "l", 0, 1, 2, central_steps=10))
    assert (one.steps, one.made) == (10, 3)
    assert one.epsilon == epsilon(repeated(STEP, 10), DELTA)


def test_attempts_after_a_crash_add_to_the_promise(tmp_path: Path) -> None:
    one = guarantee_of(ledger(tmp_path / "l", 0, 1, 0, 1, 2, central_steps=10))
    assert (one.steps, one.made) == (10, 3)
    # Five attempts at three steps, and seven steps to come.
    assert one.event == repeated(STEP, 12)


def test_a_budget_bounds_the_promise(tmp_path: Path) -> None:
    budget = (rdp_epsilon(repeated(STEP, 6), DELTA) + rdp_epsilon(repeated(STEP, 7), DELTA)) / 2
    one = guarantee_of(ledger(tmp_path / "l", 0, 1, 2, central_steps=10, epsilon_budget=budget))
    assert (one.steps, one.event) == (6, repeated(STEP, 6))
    spent = guarantee_of(ledger(tmp_path / "all", *range(6), central_steps=10, epsilon_budget=budget))
    assert (spent.steps, spent.made) == (6, 6)


def test_a_ledger_that_does_not_say_how_many_takes_the_recipes_number(tmp_path: Path) -> None:
    report = ledger(tmp_path / "l", 0, 1, central_steps=None)
    assert "central_steps" not in report.header
    assert guarantee_of(report).steps == 2
    assert guarantee_of(report, central_steps=5).steps == 5


def test_a_run_goes_on_in_a_ledger_that_promised_as_many_steps(tmp_path: Path) -> None:
    ledger(tmp_path / "l", 0, central_steps=None)
    ledger(tmp_path / "l", 0, central_steps=5)
    ledger(tmp_path / "m", 0, central_steps=5)
    with pytest.raises(ValueError, match=r"belongs to another run: it says central_steps=5, this run has 6"):
        ledger(tmp_path / "m", 0, central_steps=6)


def test_several_runs_promise_what_all_of_their_releases_are_worth() -> None:
    other = poisson_release(2.0, sampling_rate=0.1)
    joint = joint_epsilon({"a": promised(10), "b": promised(20), "c": promised(5, event=other, delta=1e-7)})
    assert joint.epsilon == epsilon(composed(repeated(STEP, 30), repeated(other, 5)), 1e-7)
    assert joint.epsilon is not None
    assert joint.epsilon.pld is not None
    single = [one.epsilon.headline for one in (promised(10), promised(20), promised(5, event=other, delta=1e-7))]
    assert max(single) < joint.epsilon.headline < sum(single)


def test_a_run_that_promises_nothing_takes_the_promise_from_all() -> None:
    joint = joint_epsilon({"a": promised(10), "b": promised(3, event=NoGuarantee("no noise")), "c": promised(10)})
    assert joint.unbounded == {"b": "no noise"}
    assert joint.epsilon == epsilon(repeated(STEP, 20), DELTA), "of the others"
    assert math.isinf(epsilon(repeated(NoGuarantee("no noise"), 3), DELTA).rdp)
    assert joint_epsilon({"a": promised(10), "b": promised(3, event=NoGuarantee("none"))}).epsilon is None


def test_what_protects_against_other_changes_is_composed_against_replacing() -> None:
    fixed = promised(3, event=fixed_size_release(4.0, cohort_size=5, population_size=100))
    joint = joint_epsilon({"a": promised(10), "b": fixed})
    assert joint.epsilon == epsilon(composed(replaced(repeated(STEP, 10)), fixed.event), DELTA)
    assert joint.whom == "one speaker, against replacing them in all"
    assert joint.epsilon is not None
    assert joint.epsilon.headline > max(promised(10).epsilon.headline, fixed.epsilon.headline)


def silos(count: int, *, z: float = 4.0) -> Guarantee:
    event = repeated(poisson_release(z, sampling_rate=1.0), count)
    return Guarantee(event, DELTA, SILO.name, simulated=False, steps=count, made=count)


def test_silos_are_composed_as_such_only_where_they_are_the_same() -> None:
    """Two times four rounds with z = 4 and everybody in them: one Gaussian with z = 4/√8, and with half of it for one
    speaker."""
    runs = {"ten": silos(4), "twenty": silos(4)}
    same, other = joint_epsilon(runs, same_division=True), joint_epsilon(runs)
    assert same.epsilon is not None
    assert same.epsilon.pld == pytest.approx(epsilon(poisson_release(math.sqrt(2), sampling_rate=1.0), DELTA).pld)
    assert same.whom == "one silo"
    assert other.epsilon == same.inside
    assert other.epsilon is not None
    assert other.epsilon.pld == pytest.approx(epsilon(poisson_release(math.sqrt(0.5), sampling_rate=1.0), DELTA).pld)
    assert other.whom == "one speaker, who is in one silo of each run, against replacing them in all"
    mixed = joint_epsilon({"silos": silos(4), "people": promised(10)}, same_division=True)
    assert mixed.epsilon == epsilon(composed(replaced(silos(4).event), replaced(repeated(STEP, 10))), DELTA)


def test_units_that_nobody_knows_are_not_composed_with_others() -> None:
    device = Guarantee(repeated(STEP, 3), DELTA, "device of two speakers", simulated=True, steps=3, made=3)
    joint = joint_epsilon({"a": promised(10), "b": device})
    assert joint.epsilon is None
    assert "b protects each device of two speakers against adding or removing one" in joint.reason
