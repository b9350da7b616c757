"""One client's update is replaced by another under Poisson sampling: the bounds that both accountants take from it."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution

from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import GaussianRelease, poisson_release, repeated
from sottovoce.privacy.sampled_gaussian import replaced_deltas


def replaced(z: float, q: float) -> GaussianRelease:
    return GaussianRelease(z, "poisson", "replace_one", sampling_rate=q)


@pytest.mark.parametrize(("z", "q", "steps"), [(2.0, 0.1, 100), (4.0, 0.5, 20)])
def test_it_is_dp_accountings_own_and_between_one_removal_and_twice_the_sensitivity(
    z: float, q: float, steps: int
) -> None:
    found = epsilon(repeated(replaced(z, q), steps), 1e-6)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        value_discretization_interval=1e-3,
        sampling_prob=q,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    ).self_compose(steps)
    assert found.pld == pytest.approx(theirs.get_epsilon_for_delta(1e-6), rel=1e-3)
    assert found.pld is not None
    assert found.pld < found.rdp < 1.2 * found.pld, "both bound the same"
    removed, twice = (epsilon(repeated(poisson_release(one, sampling_rate=q), steps), 1e-6) for one in (z, z / 2))
    assert removed.headline < found.headline < twice.headline


def test_without_sampling_it_is_a_gaussian_with_half_the_noise() -> None:
    """δ = 1e-5: a silo has ε = 2.34, one speaker in it 5.17."""
    silo = epsilon(poisson_release(1.73302, sampling_rate=1.0), 1e-5)
    speaker = epsilon(replaced(1.73302, 1.0), 1e-5)
    half = epsilon(poisson_release(1.73302 / 2, sampling_rate=1.0), 1e-5)
    assert (round(silo.headline, 2), round(speaker.headline, 2)) == (2.34, 5.17)
    assert (speaker.pld, speaker.neighbouring) == (half.pld, "replace_one")
    assert speaker.rdp == pytest.approx(half.rdp)


def test_no_pair_of_updates_within_the_bound_is_worse() -> None:
    """Hockey-stick divergences of random pairs in the plane, on a grid: none above the pair that is accounted."""
    rng, cells = np.random.default_rng(1), np.linspace(-8, 8, 161)
    x, y = np.meshgrid(cells, cells)
    area, epsilons = (cells[1] - cells[0]) ** 2, np.array([0.0, 0.1, 0.5, 1.5])
    closest = 1.0
    for trial in range(60):
        q, z = float(rng.uniform(0.05, 0.95)), float(rng.uniform(0.7, 1.5))
        angles, lengths = rng.uniform(0, 2 * math.pi, 2), rng.uniform(0.5, 1, 2) if trial % 3 else np.ones(2)

        def density(at_x: float, at_y: float, z: float = z) -> np.ndarray:
            return np.exp(-((x - at_x) ** 2 + (y - at_y) ** 2) / (2 * z * z)) / (2 * math.pi * z * z)

        absent = (1 - q) * density(0, 0)
        one, other = (
            absent + q * density(length * math.cos(angle), length * math.sin(angle))
            for angle, length in zip(angles, lengths, strict=True)
        )
        allowed = replaced_deltas(epsilons, q, z)
        for bound, at in zip(allowed, epsilons, strict=True):
            told = float(np.maximum(one - math.exp(at) * other, 0).sum() * area)
            assert told <= bound + 1e-6, (q, z, angles, lengths, at)
            closest = min(closest, (bound - told) / bound)
    assert closest < 0.05, "some come near"
