"""Noise that clients add in shares is, all in all, the plan's: whoever stays, and never less than was promised."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.flat.layout import Layout
from sottovoce.privacy import round_noise
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.events import poisson_release
from sottovoce.privacy.ledger import Charge
from sottovoce.privacy.noise_shares import SLACK, SMALLEST_STD, NoiseShares, fewest_available, largest_cohort, log_gap
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.rdp import ORDERS, release_curve
from sottovoce.privacy.settings import PrivacySettings

SETTINGS = PrivacySettings(
    population_size=8,
    privacy_unit="speaker",
    cohort_size=8,
    clip_bound=1.0,
    noise_multiplier=1.0,
    delta=1e-5,
    mode="secure",  # type: ignore[arg-type]
)
LAYOUT = Layout(("w",), ((4096,),))
SHARES = NoiseShares(most=8, least=6, colluding=2)
PLAN = Plan(SETTINGS, LAYOUT, sum_bits=32, noise_shares=SHARES)


def noised(plan: Plan, *, shares: int) -> torch.Tensor:
    charge = Charge(plan.event, step=0, clip_bound=plan.clip_bound)
    return plan.add_noise(plan.new_total(), charge, shares=shares)


@pytest.mark.parametrize("shares", [6, 7, 8, 9])
def test_the_server_adds_what_is_missing(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    real = round_noise.add_discrete_gaussian

    def spy(total: torch.Tensor, *, variance_cells: float, **named: object) -> torch.Tensor:
        added.append(variance_cells)
        return real(total, variance_cells=variance_cells, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(round_noise, "add_discrete_gaussian", spy)
    total = noised(PLAN, shares=shares)
    assert PLAN.grid is not None
    whole = Fraction(PLAN.noise_std_sum / PLAN.grid) ** 2 * 8 / 6  # six of eight shares are the plan's noise
    present = Fraction(shares) * Fraction(PLAN.noise.share_variance)
    in_all = present + Fraction(added[0])
    assert in_all >= whole + Fraction(SLACK)  # never less than planned
    if shares <= 8:
        assert float(in_all / whole - 1) < 1e-14
    missing_std = math.sqrt(max(8 - shares, 0) / 6)
    assert float(total.std()) == pytest.approx(missing_std, rel=5 / math.sqrt(2 * 4096))


def test_the_event_is_that_of_noise_by_the_server_and_what_the_server_sees_is_another() -> None:
    plain = dataclasses.replace(PLAN, noise_shares=None)
    assert plain.event == PLAN.event
    assert plain.server_event is None
    seen = PLAN.server_event
    assert seen is not None
    assert seen.noise_multiplier == pytest.approx(math.sqrt(4 / 6))  # of six survivors two tell: four are left
    assert seen.sampling_rate == 1.0  # whoever draws the cohort knows it
    assert PLAN.guarantee.endswith("; to the server, z=0.816497 each time")
    assert PLAN.describe()["noise_shares"] == {"most": 8, "least": 6, "colluding": 2}
    assert "noise_shares" not in plain.describe()


def test_nothing_opened_is_nothing_summed_and_the_server_adds_all_of_the_noise() -> None:
    assert float(noised(PLAN, shares=0).std()) == pytest.approx(math.sqrt(8 / 6), rel=5 / math.sqrt(2 * 4096))


def test_too_few_shares_are_no_release() -> None:
    with pytest.raises(InvariantError, match="5 shares of noise"):
        noised(PLAN, shares=5)
    with pytest.raises(InvariantError, match="shares of noise"):
        noised(dataclasses.replace(PLAN, noise_shares=None), shares=8)


@pytest.mark.parametrize(("most", "least", "colluding"), [(8, 9, 0), (8, 3, 3), (8, 3, -1)])
def test_shares_of_nobody_are_refused(most: int, least: int, colluding: int) -> None:
    with pytest.raises(InputError, match="expected colluding < least <= most"):
        NoiseShares(most=most, least=least, colluding=colluding)


def test_plans_whose_noise_cannot_be_shared_are_refused() -> None:
    with pytest.raises(InputError, match="expected sum_bits"):
        dataclasses.replace(PLAN, sum_bits=None)
    adaptive = dataclasses.replace(
        SETTINGS, adaptive=AdaptiveClipping(target_quantile=0.5), noise_multiplier=0.1, mode="seeded", root_seed=1
    )
    with pytest.raises(InputError, match="a clip bound that stays"):
        dataclasses.replace(PLAN, settings=adaptive)
    many = dataclasses.replace(SETTINGS, population_size=34_753, cohort_size=1024)
    with pytest.raises(InputError, match="reach 1284; expected from 1284 to 34753"):
        dataclasses.replace(PLAN, settings=many, noise_shares=NoiseShares(most=1100, least=700, colluding=100))
    assert dataclasses.replace(
        PLAN, settings=many, sum_bits=64, noise_shares=NoiseShares(most=1284, least=700, colluding=100)
    )


def test_a_share_must_be_wide_on_the_grid() -> None:
    with pytest.raises(InputError, match="cells of the grid wide: expected at least 32"):
        NoiseShares(most=100, least=50, colluding=0).variance(noise_std_cells=300.0)


@pytest.mark.parametrize("rate", [0.001, 0.03, 0.5, 1.0])
def test_cohorts_are_hardly_ever_larger(rate: float) -> None:
    most = largest_cohort(10_000, sampling_rate=rate)
    assert stats.binom.sf(most, 10_000, rate) <= 1e-15


def discrete(variance: float, reach: int) -> np.ndarray:
    mass = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance))
    return mass / mass.sum()


@pytest.mark.parametrize("variance", [0.6, 0.8, 1.0])
def test_a_sum_of_discrete_gaussians_is_nearly_one_and_the_gap_is_what_is_said(variance: float) -> None:
    """At variances so small that float64 sees the gap: it is within the bound, and falls as fast as the bound says."""
    reach, shares = 60, 3
    one = discrete(variance, reach)
    summed = one
    for _ in range(shares - 1):
        summed = np.convolve(summed, one)
    x = np.arange(-reach * shares, reach * shares + 1)
    whole = np.exp(-(x**2) / (2 * shares * variance))
    whole /= whole.sum()
    inner = np.abs(x) <= 6  # beyond, rounding of the convolution would count
    gap = np.abs(np.log(summed[inner] / whole[inner])).max()
    bound = math.exp(log_gap(variance=variance, shares=shares))
    assert 1e-13 < gap <= bound


def test_the_gap_is_nothing_at_the_smallest_share_that_is_allowed() -> None:
    """Over a billion coordinates and a million shares."""
    assert log_gap(variance=SMALLEST_STD**2, shares=10**6) + math.log(1e9) < math.log(1e-300)


@pytest.mark.parametrize("std", [2.0, 3.0, 4.0])
def test_a_discrete_gaussian_is_nearly_a_rounded_one_of_a_twelfth_less(std: float) -> None:
    """Divergence falls with the eighth power of the width: 1.5e-6/s⁸ for a coordinate (docs/secure-sums.md)."""
    reach = int(12 * std)
    x = np.arange(-reach, reach + 1)
    exact = discrete(std**2, reach)
    narrower = math.sqrt(std**2 - SLACK)
    upper, lower = stats.norm.sf(np.abs(x) - 0.5, scale=narrower), stats.norm.sf(np.abs(x) + 0.5, scale=narrower)
    rounded = np.where(x == 0, 1 - 2 * lower, upper - lower)
    inner = np.abs(x) <= 6 * std
    chi_squared = np.sum((exact[inner] - rounded[inner]) ** 2 / rounded[inner])
    assert chi_squared / 2 <= 1.5e-6 / std**8
    wider = stats.norm.sf(np.abs(x) - 0.5, scale=std) - stats.norm.sf(np.abs(x) + 0.5, scale=std)
    wider[x == 0] = 1 - 2 * stats.norm.sf(0.5, scale=std)
    assert np.sum((exact[inner] - wider[inner]) ** 2 / wider[inner]) > 100 * chi_squared  # why a twelfth is added


@pytest.mark.parametrize("order", [1.5, 2.0, 2.5, 4.0, 9.5, 32.0])
@pytest.mark.parametrize(("std", "clip"), [(40, 40), (64, 32), (50, 80)])
def test_sampled_discrete_noise_has_the_moments_that_are_accounted(std: int, clip: int, order: float) -> None:
    """E(1 − q + q·P/Q)^α over the integers, at whole orders and between, against the curve of the accountant."""
    rate, reach = 0.03, 80 * std
    x = np.arange(-reach, reach + 1, dtype=np.float64)
    log_mass = -(x**2) / (2 * std**2)
    log_mass -= logsumexp(log_mass)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x * clip - clip**2) / (2 * std**2))
    divergence = logsumexp(order * log_ratio + log_mass) / (order - 1)
    curve = release_curve(poisson_release(std / clip, sampling_rate=rate)).values
    (accounted,) = curve[order == ORDERS]
    assert divergence <= accounted
    if order >= 2 and order == int(order):
        assert divergence == pytest.approx(accounted, rel=1e-6)


# Who takes part sees the models too, and knows their own share.


@pytest.mark.parametrize("shares", [6, 7, 8])
def test_to_those_who_know_their_own_shares_a_release_has_the_noise_that_is_charged(shares: int) -> None:
    """Colluders take theirs off again, or never added any: what is left must be the plan's."""
    assert PLAN.grid is not None
    unknown = (shares - SHARES.colluding + SHARES.missing(shares)) * Fraction(PLAN.noise.share_variance)
    assert unknown >= Fraction(PLAN.noise_std_sum / PLAN.grid) ** 2 + Fraction(SLACK)


def test_a_round_whose_sum_was_not_opened_has_the_noise_of_all_others() -> None:
    """Or its variance would tell that it was not."""
    opened = noised(PLAN, shares=6).square().mean() / (1 - 6 / 8)
    assert float(noised(PLAN, shares=0).square().mean() / opened) == pytest.approx(1.0, rel=10 * math.sqrt(2 / 4096))


def test_sums_with_more_noise_than_planned_still_fit_their_words() -> None:
    """Seven of eight may collude: then one share is all of the noise, and eight of them are in a sum."""
    plan = dataclasses.replace(PLAN, noise_shares=NoiseShares(most=8, least=8, colluding=7))
    assert plan.grid is not None
    reach = 8 * plan.clip_bound / plan.grid + 13 * math.sqrt(8 * plan.noise.share_variance)
    assert reach < 2**31


# Sums of too few are not opened: that must not tell who was drawn.


def delta_of_one_round(*, others: int, rate: float, least: int, z: float, epsilon: float) -> float:
    """δ of somebody's speech at ε, where sums of fewer than `least` are released as noise alone.

    All others send the bound along one axis, and somebody theirs, or nothing, along another. No bound: an attack.
    """
    step = z / 20
    first, second = np.arange(-8 * z, others + 8 * z, step), np.arange(-8 * z, 1 + 8 * z, step)
    said, silent = np.zeros((len(first), len(second))), np.zeros((len(first), len(second)))
    for drawn in range(others + 1):
        for is_in, chance in ((True, rate), (False, 1 - rate)):
            opened = drawn + is_in >= least
            weight = stats.binom.pmf(drawn, others, rate) * chance
            theirs = weight * stats.norm.pdf(first, drawn if opened else 0, z)[:, None]
            said += theirs * stats.norm.pdf(second, is_in and opened, z)
            silent += theirs * stats.norm.pdf(second, 0, z)
    return float(np.maximum(said - math.exp(epsilon) * silent, 0).sum() * step**2)


def test_sums_that_hang_on_who_was_drawn_are_no_sampled_release() -> None:
    others, rate, z, delta = 30, 0.1, 0.7, 1e-4
    charged = epsilon(poisson_release(z, sampling_rate=rate), delta).pld
    assert charged is not None
    round_of = {"others": others, "rate": rate, "z": z, "epsilon": charged}
    assert delta_of_one_round(least=0, **round_of) == pytest.approx(delta, rel=0.01)  # type: ignore[arg-type]
    assert delta_of_one_round(least=6, **round_of) > 2 * delta  # type: ignore[arg-type]
    assert fewest_available(6, sampling_rate=rate) > others + 1  # so that it is refused


@pytest.mark.parametrize(("least", "rate"), [(3, 0.5), (6, 0.1), (512, 1024 / 34_753), (9, 1.0)])
def test_with_enough_people_here_hardly_any_cohort_is_too_small(least: int, rate: float) -> None:
    here = fewest_available(least, sampling_rate=rate)
    assert stats.binom.cdf(least - 1, here, rate) <= 1e-15
    assert here == least or stats.binom.cdf(least - 1, here - 1, rate) > 1e-15
