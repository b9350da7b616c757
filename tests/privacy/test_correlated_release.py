"""What rows of correlated noise spend: expanded, by both accountants, beside dp-accounting and jax_privacy."""

import itertools
import json
import math
from pathlib import Path

import dp_accounting
import numpy as np
import pytest

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import RunningEpsilon, delta, epsilon, pld_epsilon, rdp_epsilon
from sottovoce.privacy.calibration import calibrate_noise_multiplier, calibrate_steps
from sottovoce.privacy.events import (
    Composition,
    CorrelatedRelease,
    Event,
    Measured,
    NoGuarantee,
    accounted,
    composed,
    event_from_json,
    event_to_json,
    expand_rows,
    fixed_size_release,
    poisson_release,
    repeated,
    run_event,
    to_dp_event,
)
from sottovoce.privacy.guarantee import Guarantee, joint_epsilon
from sottovoce.privacy.pld import QUICK
from sottovoce.privacy.strategies import Banded, Blt, sensitivity, strategy_from_json

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "strategies.json").read_text())
STRATEGY = Banded(column=(1.0, 0.6, 0.3))
BANDED = CorrelatedRelease(3.0, 0.4, 4, STRATEGY)
BLT = CorrelatedRelease(5.0, 1.0, 4, Blt(decays=(0.9,), scales=(0.4,)))
NORM = math.sqrt(1 + 0.36 + 0.09)


@pytest.mark.parametrize(
    ("rows", "moved", "count"),
    [(1, 1.0, 1), (2, math.sqrt(1.36), 1), (3, NORM, 1), (4, NORM, 1), (5, NORM, 2), (8, NORM, 2), (9, NORM, 3)],
)
def test_a_sampled_chain_is_a_release_for_each_cycle_that_was_begun(rows: int, moved: float, count: int) -> None:
    ((release, times),) = expand_rows(BANDED, rows)
    assert times == count
    assert release.sampling_rate == 0.4
    assert release.neighbouring == "add_remove"
    assert release.noise_multiplier == pytest.approx(3.0 / moved, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
def test_a_chain_with_everybody_of_the_group_is_one_release(rows: int) -> None:
    for event in (BLT, CorrelatedRelease(3.0, 1.0, 4, STRATEGY)):
        ((release, times),) = expand_rows(event, rows)
        assert (times, release.sampling_rate) == (1, 1.0)
        moved = sensitivity(event.strategy, rows=rows, cycle=4)
        assert release.noise_multiplier == pytest.approx(event.noise_multiplier / moved, rel=1e-12)


def test_no_rows_spend_nothing() -> None:
    assert expand_rows(BANDED, 0) == ()
    assert rdp_epsilon(repeated(BANDED, 0), 1e-6) == 0
    assert pld_epsilon(repeated(BLT, 0), 1e-6) == 0


def test_one_band_and_no_cycle_are_independent_noise() -> None:
    chain = repeated(CorrelatedRelease(1.5, 0.1, 1, Banded(column=(1.0,))), 50)
    alone = repeated(poisson_release(1.5, sampling_rate=0.1), 50)
    assert accounted(chain) == accounted(alone)
    assert epsilon(chain, 1e-6) == epsilon(alone, 1e-6)


@pytest.mark.parametrize("event", [BANDED, BLT])
def test_epsilon_never_falls_with_rows_and_grows_with_every_cycle(event: CorrelatedRelease) -> None:
    rdp = [rdp_epsilon(repeated(event, rows), 1e-6) for rows in range(14)]
    pld = [pld_epsilon(repeated(event, rows), 1e-6, cap=QUICK) for rows in range(14)]
    for found in (rdp, pld):
        assert all(later >= sooner - 1e-9 for sooner, later in itertools.pairwise(found))
        assert all(found[rows + 4] > found[rows] for rows in range(1, 10))
    assert epsilon(repeated(event, 9), 1e-6).headline == pytest.approx(pld[9], rel=0.01)
    assert 0 < delta(repeated(event, 9), 2.0).headline < 1


def test_a_chain_that_is_cut_off_spends_no_more_than_whole_cycles() -> None:
    # Three rows, a cycle of two: rounds 0 and 2 of one group touch rows (0, 1) and (2); those of the other (1, 2).
    column = (1.0, 0.8)
    chain = repeated(CorrelatedRelease(1.2, 0.3, 2, Banded(column=column)), 3)
    first = poisson_release(1.2 / math.hypot(*column), sampling_rate=0.3)
    cut_off = poisson_release(1.2, sampling_rate=0.3)
    for really in (composed(first, cut_off), first):
        assert pld_epsilon(really, 1e-6) < pld_epsilon(chain, 1e-6)


@pytest.mark.parametrize("event", [BANDED, BLT])
@pytest.mark.parametrize("rows", [3, 10])
def test_epsilon_is_that_of_dp_accountings_own_events(event: CorrelatedRelease, rows: int) -> None:
    if event is BLT:
        column = np.array([1.0, *(0.4 * 0.9**t for t in range(rows - 1))])
        together = sum(np.concatenate([np.zeros(start), column[: rows - start]]) for start in range(0, rows, 4))
        theirs = dp_accounting.GaussianDpEvent(5.0 / np.linalg.norm(together))
    else:
        sampled = dp_accounting.PoissonSampledDpEvent(0.4, dp_accounting.GaussianDpEvent(3.0 / NORM))
        theirs = dp_accounting.SelfComposedDpEvent(sampled, math.ceil(rows / 4))
    for own in (theirs, to_dp_event(repeated(event, rows))):
        pld = dp_accounting.pld.PLDAccountant().compose(own).get_epsilon(1e-6)
        rdp = dp_accounting.rdp.RdpAccountant(np.arange(1.5, 64, 0.5)).compose(own).get_epsilon(1e-6)
        assert pld_epsilon(repeated(event, rows), 1e-6) == pytest.approx(pld, rel=0.01)
        assert rdp_epsilon(repeated(event, rows), 1e-6) == pytest.approx(rdp, rel=0.01)


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: f"{case['strategy']['kind']}-{case['steps']}-{case['cycle']}"
)
def test_epsilon_is_that_of_jax_privacy(case: dict) -> None:
    strategy = strategy_from_json(case["strategy"])
    event = CorrelatedRelease(case["noise_multiplier"], case["sampling_rate"], case["cycle"], strategy)
    found = epsilon(repeated(event, case["steps"]), GOLDEN["delta"])
    assert found.pld == pytest.approx(case["epsilon"], rel=0.01)
    assert found.pld < found.rdp < 1.15 * found.pld


@pytest.mark.parametrize("event", [BANDED, BLT])
def test_row_by_row_is_the_whole_chain(event: CorrelatedRelease) -> None:
    spent = RunningEpsilon(delta=1e-6)
    measure = poisson_release(8.0, sampling_rate=0.1)
    for rows in range(1, 11):
        foreseen = spent.peek(event)
        assert spent.add(event) == foreseen == spent.epsilon
        if rows == 5:
            spent.add(measure)
        others: tuple[Event, ...] = (measure,) if rows >= 5 else ()
        assert spent.epsilon == pytest.approx(rdp_epsilon(composed(repeated(event, rows), *others), 1e-6), rel=1e-12)
    before = spent.epsilon
    spent.add(event, 0)
    assert spent.epsilon == before
    at_once = RunningEpsilon(delta=1e-6)
    at_once.add(composed(repeated(event, 10), measure))
    assert at_once.epsilon == pytest.approx(before, rel=1e-12)


def test_clients_word_error_rates_are_measured_with_noise_of_their_own() -> None:
    # On anybody: a member of a group joins with 0.4 in one round of four.
    measured = Measured(count=2, noise_multiplier=8.0).event(population_size=100, cohort_size=10)
    whole = run_event(BANDED, 10, measured)
    assert whole.parts == ((BANDED, 10), (poisson_release(8.0, sampling_rate=0.1), 2))
    assert epsilon(whole, 1e-6).headline > epsilon(repeated(BANDED, 10), 1e-6).headline
    assert event_from_json(json.loads(json.dumps(event_to_json(whole)))) == whole


@pytest.mark.parametrize("event", [BANDED, BLT, composed(repeated(BANDED, 3), NoGuarantee("none"))])
def test_json_gives_back_the_same_event(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_json_of_another_neighbouring_is_refused() -> None:
    with pytest.raises(InputError, match="kind='correlated'"):
        event_from_json({**event_to_json(BANDED), "neighbouring": "replace_one"})
    with pytest.raises(InputError, match="unexpected"):
        event_from_json({**event_to_json(BANDED), "more": 1})


def test_two_runs_are_two_chains() -> None:
    """Equal events of two runs must not be taken for one longer chain, whose last cycle would be shared."""
    alone = repeated(BANDED, 5)
    runs = {
        name: Guarantee(event=alone, delta=1e-6, privacy_unit="user", simulated=True, steps=5, made=5) for name in "ab"
    }
    together = joint_epsilon(runs).epsilon
    assert together is not None
    two = Composition(tuple((release, 2 * count) for release, count in accounted(alone)))
    assert together == epsilon(two, 1e-6)
    assert together.headline > epsilon(repeated(BANDED, 10), 1e-6).headline  # three cycles, not four


def test_what_has_no_bound_is_refused() -> None:
    for rate, cycle, strategy in ((0.5, 4, BLT.strategy), (0.5, 2, STRATEGY)):
        with pytest.raises(InputError, match=r"sampling_rate=0\.5 within groups"):
            CorrelatedRelease(1.0, rate, cycle, strategy)
    with pytest.raises(InputError, match="its column grows"):
        CorrelatedRelease(1.0, 1.0, 2, Banded(column=(1.0, 0.2, 0.5)))
    with pytest.raises(InputError, match="noise_multiplier=0"):
        CorrelatedRelease(0.0, 1.0, 2, STRATEGY)
    with pytest.raises(InputError, match=r"sampling_rate=1\.5"):
        CorrelatedRelease(1.0, 1.5, 4, STRATEGY)
    with pytest.raises(InputError, match="one neighbouring relation"):
        epsilon(composed(BANDED, fixed_size_release(1.0, cohort_size=5, population_size=50)), 1e-6)
    spent = RunningEpsilon(delta=1e-6)
    spent.add(BANDED)
    with pytest.raises(InputError, match="one neighbouring relation"):
        spent.add(fixed_size_release(1.0, cohort_size=5, population_size=50))


def test_searches_take_chains_too() -> None:
    def run(z: float) -> Event:
        return repeated(CorrelatedRelease(z, 0.4, 4, STRATEGY), 10)

    z = calibrate_noise_multiplier(2.0, run_event=run, delta=1e-6, accountant="rdp")
    assert rdp_epsilon(run(z), 1e-6) <= 2.0 < rdp_epsilon(run(z - 1e-4), 1e-6)
    row = CorrelatedRelease(z, 0.4, 4, STRATEGY)
    assert calibrate_steps(2.0, step_event=row, delta=1e-6, accountant="rdp") == 12  # as many as three cycles have
