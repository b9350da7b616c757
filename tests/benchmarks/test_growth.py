"""docs/growth.md has the tables of benchmarks/growth.json; fits and the cluster's estimate are right where known."""

import math

import numpy as np
import pytest
import torch
from growth_of import clients, page, population
from growth_of.cluster import TRAINED, MeasuredRound, Row, clients_on_fullest, cluster_time
from growth_of.fits import fit_line
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InvariantError
from sottovoce.base.files import read_json
from sottovoce.base.seeds import stream

X = (64, 512, 4_096, 50_000)


@pytest.mark.parametrize("name", page.TABLES)
def test_the_page_has_the_table_of_what_is_kept(name: str) -> None:
    written = page.PAGE.read_text(encoding="utf-8")
    assert page.with_table(written, name, page.TABLES[name](read_json(page.KEPT))) == written


@given(start=st.floats(0.0, 10.0), slope=st.floats(1e-4, 10.0))
def test_a_planted_line_is_found(start: float, slope: float) -> None:
    line = fit_line(X, [start + slope * x for x in X])
    assert math.isclose(line.slope, slope, rel_tol=1e-9)
    assert math.isclose(line.start, start, rel_tol=1e-9, abs_tol=1e-6 * slope)
    assert line.residual < 1e-9


def test_points_that_are_off_by_at_most_a_tenth_move_the_line_by_as_much_and_show_as_residual() -> None:
    """Of relative errors within ±e a least-squares line is never farther from every point than twice that."""
    rng = stream(1, "growth test")
    planted = np.array([3 + 0.01 * x for x in X])
    measured = planted * (1 + rng.uniform(-0.1, 0.1, len(X)))
    line = fit_line(X, measured.tolist())
    assert 0 < line.residual < 0.2
    assert abs(line.slope / 0.01 - 1) < 0.2


def test_growth_that_is_no_line_shows_as_residual() -> None:
    assert fit_line(X, [1e-3 * x**2 for x in X]).residual > 0.5


def test_one_point_is_no_line() -> None:
    with pytest.raises(InvariantError):
        fit_line([1.0], [1.0])


def test_without_chance_the_fullest_gpu_has_the_mean_rounded_up() -> None:
    everybody = Row(people=1_024, cohort=1_024, rounds=1)
    assert [clients_on_fullest(gpus, everybody) for gpus in (1, 8, 512, 1_000)] == [1_024, 128, 2, 2]


def test_with_poisson_sampling_the_fullest_gpu_is_as_counted_over_draws() -> None:
    """The mean of 20,000 draws is within five of its standard errors, each below half a client's spread."""
    drawn = stream(2, "growth test").binomial(TRAINED.people, TRAINED.cohort / TRAINED.people, 20_000)
    fullest = -(-drawn // 512)
    assert abs(clients_on_fullest(512, TRAINED) - fullest.mean()) < 5 * fullest.std() / math.sqrt(len(drawn))


def test_one_gpu_takes_the_measured_seconds_for_the_measured_cohort() -> None:
    """A round of the measured cohort on one GPU is what was measured; all rounds are as many of them."""
    measured = MeasuredRound(audio_seconds_per_second=100.0, clients=10, audio_seconds_per_client=50.0, waited=0.2)
    row = Row(people=10, cohort=10, rounds=720)
    found = cluster_time(1, row, measured)
    assert math.isclose(found.round_seconds, 5.0)
    assert math.isclose(found.hours, 1.0)
    five = cluster_time(5, row, measured)  # 1 s of waiting, and 0.4 s for each of two clients
    assert math.isclose(five.round_seconds, 1.8)
    assert math.isclose(five.gpu_hours, 5 * 0.36)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_rounds_of_a_few_clients_are_measured(engine: str) -> None:
    found = clients.measure((2, 12), engine=engine, device=torch.device("cpu"), seconds=0.2, steps=2, caches=False)
    assert [row["clients"] for row in found["rounds"]] == [2, 12]
    assert found["points"][-1]["clients"] == 12
    assert all(point["own_mib"] > 0 for point in found["points"])


def test_a_population_is_measured() -> None:
    row = population.measure_population(50)
    assert row["users"] == 50
    # Two numbers of 8 bytes for each, and offsets with one more.
    assert row["held_bytes"] == round((50 * 8 + 51 * 8 + 50 * 8) / 50, 2)
