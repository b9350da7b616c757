"""dp-accounting's own accountants against ours: never above it by more than rounding, for every kind of event."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.export.recompute import TOLERANCE, recompute_epsilons
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import (
    CorrelatedRelease,
    Event,
    NoGuarantee,
    composed,
    fixed_size_release,
    poisson_release,
    repeated,
    replaced,
)
from sottovoce.privacy.profile import PROFILE_DELTAS, gaussian_mu, privacy_profile
from sottovoce.privacy.strategies import Banded

EVENTS: dict[str, Event] = {
    "the paper's row": repeated(poisson_release(2.048, sampling_rate=0.0295), 2006),
    "little noise": repeated(poisson_release(0.5, sampling_rate=0.1), 20),
    "everybody": repeated(poisson_release(3.0, sampling_rate=1.0), 20),
    "measured besides": composed(
        repeated(poisson_release(1.0, sampling_rate=0.01), 100), repeated(poisson_release(8.0, sampling_rate=0.01), 3)
    ),
    "banded": repeated(CorrelatedRelease(4.0, 0.2, 4, Banded(column=(1.0, 0.5, 0.25))), 40),
    "fixed size": repeated(fixed_size_release(3.0, cohort_size=10, population_size=100), 50),
    "one replaced": replaced(repeated(poisson_release(3.0, sampling_rate=0.1), 50)),
    "one replaced, everybody drawn": replaced(repeated(poisson_release(3.0, sampling_rate=1.0), 5)),
}


@pytest.mark.parametrize("what", EVENTS)
def test_what_is_stated_is_proved_and_no_more_than_rounding_above_it(what: str) -> None:
    event = EVENTS[what]
    stated = epsilon(event, 1e-6)
    (found,) = recompute_epsilons(event, [1e-6])
    assert found.proves(stated.headline)
    assert not found.proves(stated.headline * (1 - 1e-3))
    for ours, theirs in ((stated.pld, found.pld), (stated.rdp, found.rdp)):
        if ours is not None and theirs is not None:
            assert theirs * (1 - TOLERANCE) <= ours <= theirs * (1 + 1e-4)  # rounding of δ is added to ours


@pytest.mark.parametrize("what", EVENTS)
def test_every_point_of_a_profile_is_proved(what: str) -> None:
    profile = privacy_profile(EVENTS[what])
    for (delta, stated), found in zip(profile, recompute_epsilons(EVENTS[what], PROFILE_DELTAS), strict=True):
        assert found.delta == delta
        assert found.proves(stated)
    assert [one for _, one in profile] == sorted(one for _, one in profile)


def test_each_accountant_that_has_no_bound_is_left_out() -> None:
    (sized,) = recompute_epsilons(EVENTS["fixed size"], [1e-6])
    assert sized.pld is None
    assert sized.rdp is not None
    (one,) = recompute_epsilons(EVENTS["one replaced"], [1e-6])
    assert one.rdp is None
    assert one.pld is not None


def test_without_noise_nothing_is_proved() -> None:
    (found,) = recompute_epsilons(repeated(NoGuarantee("no noise"), 3), [1e-6])
    assert found.bound == math.inf
    assert not found.proves(1e9)


@pytest.mark.long
@settings(max_examples=25)
@given(
    z=st.floats(0.8, 8.0),
    rate=st.floats(0.001, 1.0),
    count=st.integers(1, 300),
    delta=st.sampled_from([1e-3, 1e-6, 1e-9]),
)
def test_a_stated_epsilon_is_never_below_what_dp_accounting_computes(
    z: float, rate: float, count: int, delta: float
) -> None:
    event = repeated(poisson_release(z, sampling_rate=rate), count)
    (found,) = recompute_epsilons(event, [delta])
    assert found.proves(epsilon(event, delta).headline)


def test_mu_is_exact_where_everybody_is_drawn_and_covers_the_points_where_not() -> None:
    exact = gaussian_mu(EVENTS["everybody"], ())
    assert exact is not None
    assert exact.how == "exact"
    assert exact.mu == pytest.approx(math.sqrt(20) / 3)
    # The same event by its points alone: above the truth, by what the profile is rounded up.
    profile = privacy_profile(EVENTS["everybody"])
    sampled = repeated(poisson_release(3.0, sampling_rate=0.999999), 20)
    fitted = gaussian_mu(sampled, profile)
    assert fitted is not None
    assert fitted.how == "fitted"
    assert exact.mu <= fitted.mu <= exact.mu * 1.001
