"""ε by both accountants: golden values, agreement with other libraries, and what must always hold."""

import math
from pathlib import Path

import dp_accounting
import mpmath
import numpy as np
import pytest
import yaml
from dp_accounting import rdp as dp_rdp
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.stats import binom

from sottovoce.base.errors import InputError
from sottovoce.privacy.accounting import RunningEpsilon, delta, epsilon, pld_epsilon, poisson_epsilon, rdp_epsilon
from sottovoce.privacy.events import (
    Composition,
    Event,
    GaussianRelease,
    NoGuarantee,
    composed,
    fixed_size_release,
    poisson_release,
    repeated,
)
from sottovoce.privacy.pld import CAREFUL, QUICK, PldCap, compose_pld, predicted_cost
from sottovoce.privacy.rdp import ORDERS, epsilon_of_curve, event_curve, release_curve
from sottovoce.privacy.sampled_gaussian import log_moments, sampled_step_pld

GOLDEN = yaml.safe_load((Path(__file__).parents[1] / "golden" / "epsilon.yaml").read_text())
DELTA = 1e-9


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"z={row['z']},q={row['q']}")
def test_golden_epsilon(row: dict[str, float]) -> None:
    spent = poisson_epsilon(row["z"], sampling_rate=row["q"], central_steps=int(row["T"]), delta=DELTA)
    assert spent.pld == pytest.approx(row["pld"], abs=0.02)
    assert spent.pld is not None
    assert spent.pld <= spent.rdp <= row["rdp"] + 0.01
    assert spent.rdp <= row["paper"] + 0.05  # the paper prints two digits
    assert spent.headline == spent.pld


@pytest.mark.parametrize(("z", "q"), [(0.6144, 0.00295), (2.048, 0.0295), (0.512, 0.0295)])
def test_rdp_agrees_with_opacus(z: float, q: float) -> None:
    orders = [1.1, 1.25, 1.5, 2.0, 3.0, 6.0, 16.0, 48.0]
    theirs = opacus_rdp.compute_rdp(q=q, noise_multiplier=z, steps=2000, orders=orders)
    ours = event_curve(repeated(poisson_release(z, sampling_rate=q), 2000)).values[np.searchsorted(ORDERS, orders)]
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("z", "q"), [(1e-9, 0.01), (0.3, 0.0295), (0.6, 0.5), (1.0, 0.999), (2.0, 0.03), (30.0, 1e-6), (1e9, 1e-12)]
)
def test_moments_are_those_of_dp_accounting(z: float, q: float) -> None:
    accountant = dp_rdp.RdpAccountant(ORDERS)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)))
    theirs, ours = np.asarray(accountant.rdp), log_moments(q, z, ORDERS) / (ORDERS - 1)
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs))
    # The same terms in the same order: where NumPy has another C library, each may differ by an ulp.
    finite = np.isfinite(ours)
    orders, ours, theirs = ORDERS[finite], ours[finite], theirs[finite]
    rounding = np.maximum(orders, 1000) * np.finfo(float).eps / (orders - 1)
    assert (np.abs(ours - theirs) <= rounding * (1 + np.abs(theirs) * (orders - 1))).all()


@pytest.mark.parametrize(
    ("z", "q", "interval"),
    [(0.01, 0.3, 0.5), (0.7, 0.1, 1e-3), (1.0, 0.999, 1e-3), (2.0, 0.03, 1e-4), (1e3, 1e-12, 1e-6)],
)
def test_a_step_is_distributed_as_in_dp_accounting(z: float, q: float, interval: float) -> None:
    theirs = from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=interval)
    ours = sampled_step_pld(q, z, interval=interval)
    for target in (0.0, interval, 0.5, 5.0):
        # Differences of probabilities, whose logarithms and exponentials may be an ulp apart.
        expected = theirs.get_delta_for_epsilon(target)
        assert ours.get_delta_for_epsilon(target) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_conversion_agrees_with_dp_accounting() -> None:
    for z in (0.3, 1.0, 30.0):
        values = 500 * release_curve(poisson_release(z, sampling_rate=0.02)).values
        expected = dp_rdp.compute_epsilon(ORDERS, values, DELTA)
        assert epsilon_of_curve(values, delta=DELTA) == pytest.approx(expected, rel=1e-12)


def test_orders_that_do_not_converge_are_reported_and_integrated() -> None:
    release = poisson_release(0.3072, sampling_rate=0.0295)
    curve = release_curve(release)
    assert 1.1 in curve.unconverged
    assert np.isfinite(curve.values).all()
    # (α − 1)·RDP(α) is convex and vanishes at 1, so RDP grows with the order, mended orders or not.
    assert (np.diff(curve.values) >= -1e-12).all()
    # The paper has 370 here, from whichever low orders converged.
    assert epsilon(repeated(release, 2006), DELTA, cap=QUICK).rdp < 370


@pytest.mark.parametrize("z", [5.0, 0.05])
def test_gaussian_without_sampling_matches_its_closed_form(z: float) -> None:
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(20), DELTA)
    spent = epsilon(repeated(poisson_release(z, sampling_rate=1.0), 20), DELTA)
    assert spent.pld == pytest.approx(exact, rel=1e-3)
    assert exact <= (spent.pld or 0.0) <= spent.rdp
    replaced = epsilon(repeated(fixed_size_release(2 * z, cohort_size=9, population_size=9), 20), DELTA)
    assert replaced.rdp == spent.rdp  # sensitivity 2C under twice the noise


def test_pld_at_tiny_noise_counts_participations() -> None:
    # At z = 0.003 each participation reveals the user: losses are 1/2z² + log q each, give or take √n/z, so ε is that
    # of the number of participations that Bin(T, q) exceeds with probability δ.
    z, q, steps = 0.003, 0.0295, 2006
    spent = poisson_epsilon(z, sampling_rate=q, central_steps=steps, delta=DELTA, cap=QUICK)
    times = float(binom.isf(DELTA, steps, q))
    assert spent.pld == pytest.approx(times * (1 / (2 * z * z) + math.log(q)), rel=0.01)


@pytest.mark.parametrize(("z", "steps"), [(0.1, 100), (0.1, 2006), (0.003, 2006), (0.6144, 2034)])
def test_pld_is_as_large_as_predicted(z: float, steps: int) -> None:
    event = repeated(poisson_release(z, sampling_rate=0.0295), steps)
    cost = predicted_cost(event)
    careful = cost.interval(CAREFUL)
    assert cost.seconds_times_interval / careful <= CAREFUL.seconds * (1 + 1e-9)
    assert cost.bytes_times_interval / careful <= CAREFUL.bytes
    composed_pld = compose_pld(event, cap=QUICK)
    assert composed_pld.distribution is not None
    assert composed_pld.interval is not None
    sizes = composed_pld.distribution._pmf_remove.size + composed_pld.distribution._pmf_add.size
    assert sizes == pytest.approx(cost.composed_range / composed_pld.interval, rel=0.5)


def test_pld_says_why_it_is_missing() -> None:
    tiny = poisson_epsilon(1e-4, sampling_rate=0.03, central_steps=2000, delta=DELTA)
    assert tiny.pld is None
    assert tiny.headline == tiny.rdp
    assert "noise_multiplier=0.0001 is too small" in str(tiny.pld_reason)
    fixed = epsilon(repeated(fixed_size_release(4.0, cohort_size=10, population_size=1000), 10), DELTA)
    assert fixed.pld is None
    assert "fixed size" in str(fixed.pld_reason)
    assert fixed.neighbouring == "replace_one"
    endless = compose_pld(repeated(poisson_release(1.0, sampling_rate=0.01), 10**9))
    assert "1000000000 steps are too many" in str(endless.reason)  # and said at once: the library would go on for hours
    extreme = poisson_epsilon(1.0, sampling_rate=0.01, central_steps=10, delta=1e-15)
    assert extreme.pld is None
    assert extreme.rdp > 0


def test_a_coarser_grid_never_lowers_epsilon() -> None:
    event = repeated(poisson_release(0.6144, sampling_rate=0.00295), 500)
    values = [pld_epsilon(event, DELTA, cap=PldCap(finest_interval=h)) for h in (3e-4, 1e-3, 1e-2, 1e-1)]
    assert values == sorted(values, key=lambda value: value or 0.0)


def test_fixed_size_is_never_worse_than_no_sampling() -> None:
    sampled = release_curve(fixed_size_release(1.0, cohort_size=90, population_size=100)).values
    full = ORDERS / (2 * 0.5**2)  # a Gaussian of multiplier z/2
    np.testing.assert_allclose(release_curve(fixed_size_release(1.0, cohort_size=9, population_size=9)).values, full)
    assert (sampled <= full + 1e-12).all()


def test_heterogeneous_steps_compose_to_the_sum_of_their_parts() -> None:
    early, late = poisson_release(0.8, sampling_rate=0.01), poisson_release(1.2, sampling_rate=0.02)
    both = composed(repeated(early, 30), repeated(late, 70))
    expected = 30 * release_curve(early).values + 70 * release_curve(late).values
    assert event_curve(both).values == pytest.approx(expected, rel=1e-12)
    by_parts = pld_epsilon(Composition(((early, 40), (early, 60))), DELTA, cap=QUICK)
    assert by_parts == pytest.approx(pld_epsilon(repeated(early, 100), DELTA, cap=QUICK), rel=1e-4)
    mixed = pld_epsilon(both, DELTA, cap=QUICK)
    alone = pld_epsilon(repeated(late, 70), DELTA, cap=QUICK)
    assert mixed is not None
    assert alone is not None
    assert alone < mixed <= rdp_epsilon(both, DELTA)


def test_no_guarantee_is_infinite_and_nothing_is_free() -> None:
    lost = epsilon(composed(poisson_release(1.0, sampling_rate=0.1), NoGuarantee("IID-shuffled users")), DELTA)
    assert lost.rdp == math.inf
    assert lost.pld is None
    assert "IID-shuffled users" in str(lost.pld_reason)
    nothing = epsilon(Composition(()), DELTA)
    assert (nothing.rdp, nothing.pld) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            composed(
                poisson_release(1.0, sampling_rate=0.1),
                GaussianRelease(1.0, "poisson", "replace_one", sampling_rate=0.1),
            ),
            r"cannot compose sampling=poisson \(neighbouring=add_remove\) with .* \(neighbouring=replace_one\)",
        ),
        (
            GaussianRelease(1.0, "fixed_size", "add_remove", cohort_size=1, population_size=10),
            "sampling=fixed_size with neighbouring=add_remove",
        ),
        (
            composed(
                poisson_release(1.0, sampling_rate=0.1), fixed_size_release(1.0, cohort_size=1, population_size=9)
            ),
            "cannot compose sampling=poisson .* with sampling=fixed_size",
        ),
    ],
)
def test_pairs_without_a_bound_are_refused(event: Event, message: str) -> None:
    with pytest.raises(InputError, match=message):
        epsilon(event, DELTA)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-9, math.nan])
def test_delta_must_be_a_probability(bad: float) -> None:
    with pytest.raises(InputError, match="delta="):
        epsilon(poisson_release(1.0, sampling_rate=1.0), bad)


@settings(max_examples=3, deadline=None)
@given(
    z=st.floats(0.3, 4.0),
    q=st.floats(1e-4, 0.5),
    steps=st.integers(1, 1000),
    more=st.floats(1.05, 3.0),
    target=st.sampled_from([1e-9, 1e-6, 1e-4]),
)
def test_epsilon_is_monotone(z: float, q: float, steps: int, more: float, target: float) -> None:
    def both(z: float, q: float, steps: int, delta: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        event = repeated(poisson_release(z, sampling_rate=q), steps)
        by_rdp, by_pld = rdp_epsilon(event, delta), pld_epsilon(event, delta, cap=QUICK)
        assert by_pld is not None or by_rdp > 600  # exp(-700) is not far from where float64 ends
        return np.array([by_rdp, np.inf if by_pld is None else by_pld])

    slack = 1e-3  # grids differ between the compared runs
    base = both(z, q, steps, target)
    assert base[1] <= base[0] + slack or np.isinf(base[1])
    assert (both(z * more, q, steps, target) <= base + slack).all()
    assert (both(z, min(1.0, q * more), steps, target) >= base - slack).all()
    assert (both(z, q, math.ceil(steps * more), target) >= base - slack).all()
    assert (both(z, q, steps, target * more) <= base + slack).all()


# By RDP alone, which is what the ledger and budgets go by: some twenty times cheaper than PLD, so more cases.
@settings(max_examples=12, deadline=None)
@given(z=st.floats(0.3, 4.0), q=st.floats(1e-4, 0.5), steps=st.integers(1, 5000), more=st.floats(1.05, 3.0))
def test_rdp_epsilon_is_monotone(z: float, q: float, steps: int, more: float) -> None:
    def spent(z: float, q: float, steps: int, delta: float = DELTA) -> float:
        return rdp_epsilon(repeated(poisson_release(z, sampling_rate=q), steps), delta)

    base = spent(z, q, steps)
    assert spent(z * more, q, steps) <= base * (1 + 1e-9)
    assert spent(z, min(1.0, q * more), steps) >= base * (1 - 1e-9)
    assert spent(z, q, math.ceil(steps * more)) >= base * (1 - 1e-9)
    assert spent(z, q, steps, DELTA * more) <= base


def test_delta_for_epsilon_is_the_way_back() -> None:
    event = repeated(poisson_release(1.0, sampling_rate=0.01), 1000)
    spent = epsilon(event, 1e-6)
    assert spent.pld is not None
    assert delta(event, spent.pld).pld == pytest.approx(1e-6, rel=1e-3)
    assert delta(event, spent.rdp).rdp == pytest.approx(1e-6, rel=1e-6)
    assert delta(NoGuarantee("no noise"), 1.0).rdp == 1.0
    with pytest.raises(InputError, match="epsilon=-1"):
        delta(event, -1)


def test_running_epsilon_is_the_epsilon_of_everything_so_far() -> None:
    step, other = poisson_release(1.0, sampling_rate=0.01), poisson_release(0.7, sampling_rate=0.01)
    running = RunningEpsilon(delta=1e-6)
    assert running.epsilon == 0.0
    history = [running.add(step) for _ in range(20)]
    assert history == sorted(history)
    assert history[-1] == pytest.approx(rdp_epsilon(repeated(step, 20), 1e-6))
    before = running.epsilon
    foreseen = running.peek(other, 3)
    assert running.epsilon == before
    assert running.add(other, 3) == foreseen
    assert foreseen == pytest.approx(rdp_epsilon(composed(repeated(step, 20), repeated(other, 3)), 1e-6))
    with pytest.raises(InputError, match="cannot compose"):
        running.add(fixed_size_release(1.0, cohort_size=1, population_size=10))
    assert running.add(NoGuarantee("noise on one group only")) == math.inf


# Upper bounds in float64, too. T Gaussian releases are one whose mean is √(Σ T/z²) standard deviations away, of which
# δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) is known (Balle, Wang 2018). With a sampling rate that is 1 but for the last
# bit, steps are transformed and composed as under any other.
NEARLY_ALL = 1 - 2.0**-53
EXACT = {
    "one": [(1.0, 1.0, 1)],
    "one, little noise": [(0.5, 1.0, 1)],
    "many": [(20.0, 1.0, 2000)],
    "two kinds": [(2.0, 1.0, 3), (5.0, 1.0, 10)],
    "a few steps": [(1.0, NEARLY_ALL, 10)],
    "many steps": [(20.0, NEARLY_ALL, 2000)],
    "more steps": [(100.0, NEARLY_ALL, 10_000)],
    "three kinds of steps": [(1.0, NEARLY_ALL, 1), (8.0, NEARLY_ALL, 20), (30.0, NEARLY_ALL, 100)],
}


def exact_delta(mean: float, epsilon: float) -> mpmath.mpf:
    mean_, epsilon_ = mpmath.mpf(mean), mpmath.mpf(epsilon)
    below = mpmath.exp(epsilon_) * mpmath.ncdf(-mean_ / 2 - epsilon_ / mean_)
    return mpmath.ncdf(mean_ / 2 - epsilon_ / mean_) - below


@pytest.mark.parametrize("parts", EXACT.values(), ids=EXACT.keys())
def test_a_pld_is_an_upper_bound_down_to_the_smallest_delta(parts: list[tuple[float, float, int]]) -> None:
    event = composed(*(repeated(poisson_release(z, sampling_rate=q), count) for z, q, count in parts))
    mean = math.sqrt(sum(count / z**2 for z, _, count in parts))
    found = compose_pld(event, cap=QUICK)
    assert found.distribution is not None
    assert found.interval is not None
    with mpmath.workdps(40):
        for power in range(3, 13):
            bound = found.epsilon(10.0**-power)
            if bound is None:
                assert found.rounding > 10.0**-power
                continue
            assert exact_delta(mean, bound) <= mpmath.mpf(10) ** -power
            # On the grid itself nothing is rounded but by float64.
            on_grid = np.round(bound / found.interval + np.arange(-3, 4)) * found.interval
            for epsilon_, delta_ in zip(on_grid.tolist(), found.deltas(on_grid).tolist(), strict=True):
                assert mpmath.mpf(delta_) >= exact_delta(mean, epsilon_)
            if found.rounding < 1e-3 * 10.0**-power:  # and it is no looser for it
                assert exact_delta(mean, bound) >= 0.98 * mpmath.mpf(10) ** -power


def test_rounding_that_is_more_than_delta_is_told() -> None:
    many = repeated(poisson_release(100.0, sampling_rate=NEARLY_ALL), 10_000)
    found = epsilon(many, 1e-12, cap=QUICK)
    assert found.pld is None
    assert found.pld_reason is not None
    assert "of rounding in δ" in found.pld_reason
    assert found.headline == found.rdp
