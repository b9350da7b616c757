"""Strategies of correlated noise: their columns, what one user can move (against brute force), and the least errors."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from sottovoce.base.errors import InputError
from sottovoce.privacy.mechanism import optimal_banded, optimal_blt, relative_error
from sottovoce.privacy.strategies import (
    Banded,
    Blt,
    Strategy,
    first_column,
    sensitivity,
    strategy_from_json,
    strategy_to_json,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "strategies.json").read_text())["cases"]
BLT = Blt(decays=(0.9, 0.5), scales=(0.3, 0.25))


def matrix(strategy: Strategy, rows: int) -> np.ndarray:
    return np.tril(toeplitz(first_column(strategy, rows)))


def patterns(rows: int, cycle: int) -> list[tuple[int, ...]]:
    """Every set of rounds that are at least `cycle` apart; those of one group are among them."""
    return [
        chosen
        for count in range(1, -(-rows // cycle) + 1)
        for chosen in itertools.combinations(range(rows), count)
        if all(later - sooner >= cycle for sooner, later in itertools.pairwise(chosen))
    ]


def largest_moves(strategy: Strategy, *, rows: int, cycle: int) -> dict[str, float]:
    """By brute force over all patterns: the same update each time, every choice of signs, and all at right angles."""
    columns = matrix(strategy, rows)
    found = dict.fromkeys(("same", "signs", "orthogonal"), 0.0)
    for chosen in patterns(rows, cycle):
        moved = columns[:, chosen]
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(chosen)))).T
        found["same"] = max(found["same"], float(np.linalg.norm(moved.sum(axis=1))))
        found["signs"] = max(found["signs"], float(np.linalg.norm(moved @ signs, axis=0).max()))
        found["orthogonal"] = max(found["orthogonal"], float(np.linalg.norm(moved)))
    return found


BRUTE = [
    (BLT, 7, 1),
    (BLT, 12, 2),
    (BLT, 12, 3),
    (BLT, 11, 5),
    (BLT, 10, 10),
    (Blt(decays=(0.0,), scales=(1.0,)), 9, 2),
    (Blt(decays=(0.999,), scales=(0.9,)), 12, 4),
    (optimal_blt(steps=12, buffers=2, cycle=3), 12, 3),
    (Banded(column=(1.0,)), 6, 1),
    (Banded(column=(1.0, 0.6, 0.3)), 12, 3),
    (Banded(column=(1.0, 0.6, 0.3)), 11, 5),
    (Banded(column=(1.0, -0.7, 2.5)), 12, 3),  # any column will do where no two rounds of a user meet
    (Banded(column=(1.0, -0.7, 0.0, -3.0)), 10, 4),
    (Banded(column=(1.0, 0.6, 0.6, 0.2)), 12, 2),  # they meet, and the column never grows
    (optimal_banded(steps=12, bands=4, cycle=4), 12, 4),
    (optimal_banded(steps=12, bands=3, cycle=5), 12, 5),
    (Banded(column=(1.0, 0.5, 0.4)), 2, 6),
]


@pytest.mark.parametrize(("strategy", "rows", "cycle"), BRUTE)
def test_nobody_moves_more_than_the_sensitivity_and_somebody_moves_as_much(
    strategy: Strategy, rows: int, cycle: int
) -> None:
    found = largest_moves(strategy, rows=rows, cycle=cycle)
    said = sensitivity(strategy, rows=rows, cycle=cycle)
    assert found["same"] == pytest.approx(said, rel=1e-12)
    assert found["signs"] <= said * (1 + 1e-12)
    assert found["orthogonal"] <= said * (1 + 1e-12)
    regular = matrix(strategy, rows)[:, ::cycle].sum(axis=1)  # rounds 0, cycle, 2·cycle, …
    assert float(np.linalg.norm(regular)) == pytest.approx(said, rel=1e-12)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_updates_of_any_directions_move_no_more(data: st.DataObject) -> None:
    draw = data.draw
    buffers = draw(st.integers(1, 3))
    weights = [draw(st.floats(0.01, 1.0)) for _ in range(buffers + 1)]
    strategy = Blt(
        decays=tuple(draw(st.floats(0.0, 0.999)) for _ in range(buffers)),
        scales=tuple(weight / sum(weights) for weight in weights[:-1]),
    )
    rows, cycle = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    updates = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(rows, 3))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    start = draw(st.integers(0, rows - 1))
    taking_part = np.zeros((rows, 3))
    taking_part[start::cycle] = updates[start::cycle]  # one group; who stays silent sends zeros
    silent = np.array([draw(st.booleans()) for _ in range(rows)])
    taking_part[silent] = 0
    moved = np.linalg.norm(matrix(strategy, rows) @ taking_part)
    assert moved <= sensitivity(strategy, rows=rows, cycle=cycle) * (1 + 1e-12)


@pytest.mark.parametrize("strategy", [BLT, Banded(column=(1.0, 0.6, 0.3)), Banded(column=(1.0,))])
@pytest.mark.parametrize("cycle", [3, 7])
def test_more_rows_never_move_less(strategy: Strategy, cycle: int) -> None:
    moved = [sensitivity(strategy, rows=rows, cycle=cycle) for rows in range(40)]
    assert moved == sorted(moved)
    assert moved[0] == 0
    assert moved[1] == 1


def test_what_the_formula_does_not_bound_is_refused() -> None:
    for column, reason in (((1.0, -0.5, 0.2), "has -0.5"), ((1.0, 0.2, 0.5), "grows")):
        strategy = Banded(column=column)
        with pytest.raises(InputError, match=reason):
            sensitivity(strategy, rows=6, cycle=2)
        assert largest_moves(strategy, rows=6, cycle=3)["signs"] == pytest.approx(
            sensitivity(strategy, rows=6, cycle=3), rel=1e-12
        )
    # And for a reason: with these signs opposite updates move more than equal ones.
    found = largest_moves(Banded(column=(1.0, -0.5, 0.2)), rows=6, cycle=1)
    assert found["signs"] > found["same"] * 1.1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Banded(column=()), "a column of 0"),
        (lambda: Banded(column=(2.0, 1.0)), "expected 1"),
        (lambda: Banded(column=(1.0, math.nan)), "finite"),
        (lambda: Blt(decays=(1.0,), scales=(0.5,)), "below 1"),
        (lambda: Blt(decays=(-0.1,), scales=(0.5,)), "from 0"),
        (lambda: Blt(decays=(0.5, 0.4), scales=(0.5,)), "as many"),
        (lambda: Blt(decays=(0.5,), scales=(-0.5,)), "positive"),
        (lambda: Blt(decays=(0.5, 0.4), scales=(0.6, 0.5)), "add up to 1"),
        (lambda: Blt(decays=(math.nan,), scales=(0.5,)), "below 1"),
        (lambda: sensitivity(BLT, rows=-1, cycle=1), "rows=-1"),
        (lambda: sensitivity(BLT, rows=1, cycle=0), "cycle=0"),
        (lambda: optimal_banded(steps=10, bands=5, cycle=4), "bands=5"),
        (lambda: optimal_blt(steps=10, buffers=0, cycle=4), "buffers=0"),
        (lambda: strategy_from_json({"kind": "banded"}), "expected banded"),
        (lambda: strategy_from_json({"kind": "blt", "decays": [0.5], "scales": [0.5], "more": 1}), "expected banded"),
    ],
)
def test_nonsense_is_refused_in_one_line(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(InputError, match=reason):
        make()


@pytest.mark.parametrize("strategy", [BLT, Banded(column=(1.0, 0.1, -0.25))])
def test_json_gives_back_the_same_strategy(strategy: Strategy) -> None:
    assert strategy_from_json(json.loads(json.dumps(strategy_to_json(strategy)))) == strategy


@pytest.mark.parametrize("strategy", [BLT, Banded(column=(1.0, 0.6, 0.3)), Banded(column=(1.0,))])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_the_relative_error_is_that_of_the_matrices(strategy: Strategy, steps: int) -> None:
    sums = np.tril(np.ones((steps, steps)))
    correlated = np.linalg.norm(sums @ np.linalg.inv(matrix(strategy, steps)))
    assert relative_error(strategy, steps=steps) == pytest.approx(correlated / np.linalg.norm(sums), rel=1e-10)


def noise(strategy: Strategy, *, steps: int, cycle: int) -> float:
    return relative_error(strategy, steps=steps) * sensitivity(strategy, rows=steps, cycle=cycle)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['strategy']['kind']}-{case['steps']}-{case['cycle']}")
def test_errors_sensitivities_and_optima_are_those_of_jax_privacy(case: dict) -> None:
    theirs, steps, cycle = strategy_from_json(case["strategy"]), case["steps"], case["cycle"]
    assert relative_error(theirs, steps=steps) ** 2 * (steps + 1) / 2 == pytest.approx(case["squared_errors"], rel=1e-9)
    assert sensitivity(theirs, rows=steps, cycle=cycle) == pytest.approx(case["sensitivity"], rel=1e-9)
    if isinstance(theirs, Banded):
        ours: Strategy = optimal_banded(steps=steps, bands=theirs.bands, cycle=cycle)
    else:
        ours = optimal_blt(steps=steps, buffers=theirs.buffers, cycle=cycle)
    # Rounding to four digits costs (½·10⁻⁴)² of the noise, times how curved it is: up to a few hundred.
    assert noise(ours, steps=steps, cycle=cycle) <= noise(theirs, steps=steps, cycle=cycle) * (1 + 1e-6)


@pytest.mark.parametrize(("steps", "cycle"), [(12, 3), (100, 10), (100, 200)])
def test_no_step_away_from_an_optimum_has_less_noise(steps: int, cycle: int) -> None:
    banded, blt = optimal_banded(steps=steps, bands=3, cycle=cycle), optimal_blt(steps=steps, buffers=2, cycle=cycle)
    for index, change in itertools.product((1, 2), (0.99, 1.01)):
        column = list(banded.column)
        column[index] *= change
        away = Banded(column=tuple(column))
        assert noise(away, steps=steps, cycle=cycle) > noise(banded, steps=steps, cycle=cycle)
    for index, change in itertools.product(range(blt.buffers), (0.98, 1.02)):
        scales = tuple(s * (change if i == index else 1.0) for i, s in enumerate(blt.scales))
        decays = tuple(1 - (1 - d) * (change if i == index else 1.0) for i, d in enumerate(blt.decays))
        for away_blt in (Blt(decays=blt.decays, scales=scales), Blt(decays=decays, scales=blt.scales)):
            assert noise(away_blt, steps=steps, cycle=cycle) > noise(blt, steps=steps, cycle=cycle)


def test_more_bands_and_buffers_have_less_noise() -> None:
    banded = [noise(optimal_banded(steps=200, bands=b, cycle=40), steps=200, cycle=40) for b in (1, 2, 4, 8, 16, 32)]
    assert banded == sorted(banded, reverse=True)
    blt = [noise(optimal_blt(steps=200, buffers=b, cycle=200), steps=200, cycle=200) for b in (1, 2, 3)]
    assert blt == sorted(blt, reverse=True)
    assert banded[0] == pytest.approx(math.sqrt(5))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_runs_of_few_steps_have_strategies_too(steps: int) -> None:
    assert optimal_banded(steps=steps, bands=5, cycle=5).bands == min(steps, 5)
    assert noise(optimal_blt(steps=steps, buffers=3, cycle=2), steps=steps, cycle=2) <= math.sqrt(-(-steps // 2)) + 1e-9
