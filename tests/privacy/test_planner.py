"""The planner: the paper's arithmetic, its extrapolation, and its tables beside ours."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sottovoce.base.errors import InputError
from sottovoce.papers.paper_tables import (
    AccountedTable,
    paper_rows,
    paper_steps,
    paper_table,
    paper_table_view,
    table_names,
)
from sottovoce.privacy.plan_tables import plan_table, plans_table
from sottovoce.privacy.planner import PlannedRun, plan_run, scale_plan, smallest_population
from sottovoce.privacy.pld import QUICK
from sottovoce.report.populations import draw_population_curves, population_curves

RUN: dict[str, Any] = {"cohort_size": 100, "central_steps": 50, "delta": 1e-6, "cap": QUICK}


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def plan() -> PlannedRun:
    return plan_run(10_000, noise_multiplier=0.8, parameters=1_000_000, clip_bound=0.5, **RUN)


def test_the_three_units_of_noise_agree(plan: PlannedRun) -> None:
    assert plan.sampling_rate == 0.01
    assert plan.sigma_dp == pytest.approx(0.008)
    assert plan.noise_std_sum == pytest.approx(0.4)
    assert plan.noise_std_mean == pytest.approx(0.004)
    # Noise of std z·C/S in each of D coordinates has norm z·C·√D/S; over C that is 0.8·1000/100.
    assert plan.noise_to_update == pytest.approx(8.0)
    same = plan_run(10_000, sigma_dp=0.008, **RUN)
    assert same.epsilon.rdp == pytest.approx(plan.epsilon.rdp, rel=1e-9)


def test_a_target_is_met(plan: PlannedRun) -> None:
    assert plan.epsilon.pld is not None
    aimed = plan_run(10_000, target_epsilon=plan.epsilon.pld, **RUN)
    assert aimed.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=1e-3)
    assert aimed.epsilon.headline <= plan.epsilon.pld


def test_scaling_keeps_sigma_and_rate_and_multiplies_noise(plan: PlannedRun) -> None:
    ten, hundred = scale_plan(plan, factors=(10, 100), cap=QUICK)
    assert (ten.population_size, ten.cohort_size, ten.central_steps) == (100_000, 1000, 50)
    assert ten.sampling_rate == plan.sampling_rate
    assert hundred.sigma_dp == pytest.approx(plan.sigma_dp)
    assert hundred.noise_multiplier == pytest.approx(100 * plan.noise_multiplier)
    assert hundred.epsilon.headline < ten.epsilon.headline < plan.epsilon.headline


def test_smallest_population_meets_the_target_within_the_largest_cohort(plan: PlannedRun) -> None:
    needed = smallest_population(plan, target_epsilon=0.5, max_cohort=120, cap=QUICK)
    assert needed.epsilon.headline <= 0.5
    assert needed.cohort_size == 120
    assert needed.sampling_rate < plan.sampling_rate
    assert needed.sigma_dp == pytest.approx(plan.sigma_dp)


def test_json_has_the_promised_keys_and_survives(plan: PlannedRun) -> None:
    promised = {"epsilon_rdp", "epsilon_pld", "noise_multiplier", "sigma_dp", "sampling_rate", "rdp_order"}
    data = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert promised <= data.keys()
    assert data["epsilon_pld"] == plan.epsilon.pld


def test_warnings_name_what_is_weak(plan: PlannedRun) -> None:
    weak = plan_run(
        100, cohort_size=10, noise_multiplier=0.05, central_steps=5, delta=0.01, parameters=10**6, cap=QUICK
    )
    text = " ".join(weak.warnings)
    assert "delta=0.01 is not below 1/population_size=0.01" in text
    assert "is above 8: next to nothing as a guarantee" in text
    assert "times as long as one user's clipped update" in text
    assert not any("delta" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cohort_size": 20_000, "noise_multiplier": 1.0}, "cohort_size=20000 exceeds population_size=10000"),
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0: expected a positive number"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"sigma_dp": math.inf}, "sigma_dp=inf"),
        ({"target_epsilon": 0.0}, "target_epsilon=0"),
        ({"noise_multiplier": 1.0, "delta": 0.0}, "delta=0.0"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta=1.0"),
        ({"noise_multiplier": 1.0, "central_steps": 0}, "central_steps=0"),
        ({"noise_multiplier": 1.0, "cohort_size": 1.5}, "cohort_size=1.5"),
        (
            {"noise_multiplier": 1.0, "central_steps": 10**9},
            "central_steps=1000000000: expected a whole number from 1 to",
        ),
        ({"noise_multiplier": 1e-200}, "noise_multiplier=1e-200"),
        ({"noise_multiplier": 1.0, "clip_bound": 0.0}, "clip_bound=0.0"),
        ({"noise_multiplier": 1.0, "parameters": 0}, "parameters=0"),
        ({}, "exactly one of noise_multiplier, sigma_dp, target_epsilon; got none"),
        ({"noise_multiplier": 1.0, "sigma_dp": 1.0}, "got noise_multiplier, sigma_dp"),
    ],
)
def test_bad_plans_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        plan_run(10_000, **{**RUN, **change})
    assert "\n" not in str(error.value)


def test_bad_scales_and_cohorts_are_refused(plan: PlannedRun) -> None:
    with pytest.raises(InputError, match="scale=-1"):
        scale_plan(plan, factors=(-1,))
    with pytest.raises(InputError, match="max_cohort=0"):
        smallest_population(plan, target_epsilon=1.0, max_cohort=0)


@pytest.mark.parametrize("name", table_names())
def test_printed_rows_are_consistent_or_marked(name: str) -> None:
    for row in paper_rows(name):
        if row.cohort_size is None or not row.sigma_dp:
            continue
        rate = row.cohort_size / row.population_size
        rate_fits = row.printed_rate is None or row.printed_rate == pytest.approx(rate, rel=4e-3)
        steps_fit = row.printed_steps in (None, paper_steps(rate))
        assert (rate_fits and steps_fit) or row.erratum


@pytest.fixture(scope="module")
def table1() -> AccountedTable:
    return paper_table("table1")


def test_table_1_is_reproduced(table1: AccountedTable) -> None:
    private = [(row, plan) for row, plan in table1.rows if plan is not None]
    assert len(private) == 19
    for row, plan in private:
        assert row.epsilon is not None
        # Two printed digits; finer orders may only lower ε.
        assert plan.epsilon.rdp <= row.epsilon * 1.02
        assert plan.epsilon.pld is not None
        assert plan.epsilon.pld <= plan.epsilon.rdp
        if row.printed_order is not None and row.printed_order >= 1.5:
            assert plan.epsilon.rdp == pytest.approx(row.epsilon, rel=0.05)


@pytest.mark.parametrize(
    ("name", "population_size", "cohort_size", "sigma_dp", "paper"),
    [
        ("table17", 1_737_650, 51_200, 100e-6, 1.6),
        ("table18", 46_282_500, 256_000, 3e-6, 5.5),
        ("table18", 16_037_500, 256_000, 10e-6, 1.8),
        ("table20", 69_506_000, 204_800, 10e-6, 0.75),
    ],
)
def test_rows_of_the_other_tables(
    name: str, population_size: int, cohort_size: int, sigma_dp: float, paper: float
) -> None:
    def is_it(row: Any) -> bool:
        same = (row.population_size, row.cohort_size) == (population_size, cohort_size)
        return same and row.sigma_dp == pytest.approx(sigma_dp)

    (row,) = [row for row in paper_rows(name) if is_it(row)]
    assert row.epsilon == paper
    ours = plan_run(
        population_size,
        cohort_size=cohort_size,
        sigma_dp=sigma_dp,
        central_steps=paper_steps(cohort_size / population_size),
        delta=1e-9,
        cap=QUICK,
    )
    assert ours.epsilon.headline <= ours.epsilon.rdp <= paper * 1.02


def test_errata_are_marked(table1: AccountedTable) -> None:
    (wrong,) = [(row, plan) for row, plan in table1.rows if row.erratum]
    assert (wrong[0].printed_epsilon, wrong[0].epsilon) == (1.3, 13.0)
    assert wrong[1] is not None
    assert wrong[1].epsilon.rdp == pytest.approx(12.6, abs=0.1)
    text = shown(paper_table_view(table1))
    assert "1.3 [1]" in text
    assert "[1] ε prints as 1.3" in text
    sigma = [row for row in paper_rows("table17") if row.erratum and "0.6e-6" in row.erratum]
    assert [round((row.sigma_dp or 0) * (row.cohort_size or 0), 7) for row in sigma] == [0.0006144, 0.06144, 0.12288]
    json.dumps(table1.to_json(), allow_nan=False)


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(InputError, match="table19"):
        paper_table("table19")


def test_plans_are_shown(plan: PlannedRun) -> None:
    assert "noise_multiplier z" in shown(plan_table(plan))
    assert "10,000" in shown(plans_table([plan], title="one"))


def test_figure_is_written_whole(plan: PlannedRun, tmp_path: Path) -> None:
    curves = population_curves(plan, sigma_dps=(0.01, 0.02), largest_population=10**6, points=3)
    assert all(list(curve.epsilons) == sorted(curve.epsilons, reverse=True) for curve in curves)
    assert curves[1].epsilons[-1] < curves[0].epsilons[-1]
    target = tmp_path / "plan.png"
    draw_population_curves(curves, target, plan=plan)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in target.parent.iterdir()] == ["plan.png"]
    for wrong, message in (
        ("plan.txt", r"expected a file name that ends in \.png"),
        ("new/plan.png", "does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            draw_population_curves(curves, tmp_path / wrong, plan=plan)
