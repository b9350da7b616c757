"""Noise: its distribution, its independence, its exactness on the grid, and that nothing repeats in a secure run."""

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.privacy.noise import (
    NoiseScope,
    add_gaussian,
    add_secure_gaussian,
    grid_gaussian,
    grid_spacing,
    noise_multiplier_of,
    sigma_dp_of,
)
from sottovoce.privacy.randomness import SecureRandom

pytest.importorskip("cryptography", reason="the secure mode draws from cryptography's AES")

COUNT = 200_000
LAYOUT = Layout(("w",), ((COUNT,),))


def seeded_noise(step: int, std: float = 0.25) -> torch.Tensor:
    generator = torch_stream(3, "noise", step)
    return add_gaussian(LAYOUT.zeros(), std=std, generator=generator, layout=LAYOUT)[:COUNT]


def secure_noise(std: float = 0.25) -> torch.Tensor:
    total = LAYOUT.zeros(dtype=torch.float64)
    return add_secure_gaussian(total, std=std, grid=2.0**-40, random=SecureRandom(), layout=LAYOUT)[:COUNT]


def assert_standard_normal(values: np.ndarray) -> None:
    """Moments within five standard errors (mean 1/√n, variance √(2/n), kurtosis √(24/n)), and a Kolmogorov test."""
    n = len(values)
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(stats.kurtosis(values)) < 5 * math.sqrt(24 / n)
    assert stats.kstest(values, "norm").pvalue > 1e-6


def assert_uncorrelated(a: torch.Tensor, b: torch.Tensor) -> None:
    """Correlation within five standard errors, of the values and of their squares."""
    limit = 5 / math.sqrt(len(a))
    assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < limit
    assert abs(np.corrcoef(a.numpy() ** 2, b.numpy() ** 2)[0, 1]) < limit


def test_seeded_noise_is_gaussian_and_independent() -> None:
    first, second = seeded_noise(0), seeded_noise(1)
    assert_standard_normal(first.numpy() / 0.25)
    assert_uncorrelated(first, second)  # between steps
    assert_uncorrelated(first[1:], first[:-1])  # between coordinates
    assert torch.equal(first, seeded_noise(0))


def test_secure_noise_is_gaussian_and_independent() -> None:
    first, second = secure_noise(), secure_noise()
    assert_standard_normal(first.numpy() / 0.25)
    assert_uncorrelated(first, second)
    assert_uncorrelated(first[1:], first[:-1])
    half = COUNT // 2
    assert_uncorrelated(first[:half], first[half:])  # the sine and cosine of one angle
    # Continuous draws: not even one value is shared between two steps.
    assert len(np.intersect1d(first.numpy(), second.numpy())) <= 2


def test_secure_noise_lies_on_the_grid_and_sums_are_exact() -> None:
    grid = grid_spacing(clip_bound=0.01, most_users=70_000_000, std=0.02)
    noise = grid_gaussian(10_001, std=0.02, grid=grid, random=SecureRandom())
    assert len(noise) == 10_001
    cells = noise / grid
    assert torch.equal(cells, cells.round())
    # Added to the largest sum a cohort can reach, not one cell of the noise is lost.
    largest = torch.tensor(70_000_000 * 0.01 // grid * grid, dtype=torch.float64)
    assert torch.equal((largest + noise) - largest, noise)
    # A coarse grid is plain rounding: the probability of 0 is that of |N| < g/2.
    coarse = grid_gaussian(200_000, std=1.0, grid=2.0, random=SecureRandom())
    assert (coarse == 0).double().mean().item() == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.006)


class Seeded:
    """Words as those of `SecureRandom`, but the same ones every time."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.Philox(key=seed)

    def words(self, count: int) -> np.ndarray:
        return self._source.random_raw(count)


# The finest grid on which sums are exact has 2⁴⁵, 2⁴⁷, 2⁴⁷ and 2²⁴ cells in a standard deviation: float64 has seven,
# five, five and twenty-eight bits left for what is behind the point, and ties go to even cells.
@pytest.mark.parametrize(
    ("most_users", "noise_multiplier", "millions"), [(100, 1.0, 6), (100, 8.0, 2), (1, 64.0, 2), (70_000_000, 0.6, 2)]
)
def test_the_low_bits_of_the_noise_are_fair(most_users: int, noise_multiplier: float, millions: int) -> None:
    std, draws = noise_multiplier, millions * 1_000_000
    grid = grid_spacing(clip_bound=1.0, most_users=most_users, std=std)
    source = Seeded(9)
    counts = np.zeros(16, dtype=np.int64)
    for _ in range(millions):
        cells = grid_gaussian(1_000_000, std=std, grid=grid, random=source) / grid  # type: ignore[arg-type]
        counts += torch.bincount(cells.remainder(16).long(), minlength=16).numpy()
    # Even less odd is a sum of so many fair signs: five standard deviations.
    assert abs(counts[0::2].sum() - counts[1::2].sum()) < 5 * math.sqrt(draws)
    # As unlikely as those five are for all four bits together.
    assert stats.chisquare(counts).pvalue > 2 * stats.norm.sf(5)


@given(
    clip_bound=st.floats(1e-30, 1e30),
    most_users=st.integers(1, 10**10),
    noise_multiplier=st.just(0.0) | st.floats(1e-6, 1e6),
)
def test_a_grid_is_as_fine_as_sums_and_noise_allow(clip_bound: float, most_users: int, noise_multiplier: float) -> None:
    std = noise_multiplier * clip_bound
    grid = grid_spacing(clip_bound=clip_bound, most_users=most_users, std=std)
    assert math.frexp(grid)[0] == 0.5  # a power of two
    largest = (most_users * clip_bound + 16 * std) / grid
    assert largest <= 2.0**52
    assert std / grid <= 2.0**24
    assert largest > 2.0**51 or std / grid > 2.0**23  # and no coarser than it must be


@pytest.mark.parametrize("value", [2.0**-41, math.nan, math.inf, 2.0**60])
def test_a_sum_that_is_not_exact_on_the_grid_is_never_released(value: float) -> None:
    layout = Layout(("w",), ((3,),))
    total = layout.zeros(dtype=torch.float64)
    total[1] = value
    with pytest.raises(AssertionError, match="exact sum on the grid"):
        add_secure_gaussian(total, std=1.0, grid=2.0**-40, random=SecureRandom(), layout=layout)


def test_the_tail_is_refined_where_uniforms_are_coarse() -> None:
    class Small:
        """Words whose first half is so small that more bits are needed."""

        def __init__(self) -> None:
            self.calls = 0

        def words(self, count: int) -> np.ndarray:
            self.calls += 1
            return np.zeros(count, dtype=np.uint64)

    source = Small()
    value = grid_gaussian(1, std=1.0, grid=2.0**-30, random=source)  # type: ignore[arg-type]
    assert source.calls == 2
    # u = 2^-126, angle 0: √(2·126·ln 2), the farthest draw there is.
    assert value.item() == pytest.approx(math.sqrt(2 * 126 * math.log(2)), rel=1e-8)


def test_padding_stays_zero_and_no_noise_is_none() -> None:
    layout = Layout(("a", "b"), ((3,), (5,)))
    for total in (
        add_gaussian(layout.zeros(), std=1.0, generator=torch_stream(1, "n"), layout=layout),
        add_secure_gaussian(
            layout.zeros(dtype=torch.float64), std=1.0, grid=2.0**-40, random=SecureRandom(), layout=layout
        ),
    ):
        assert int((total != 0).sum()) == layout.dimension
    untouched = add_gaussian(layout.zeros(), std=0.0, generator=torch_stream(1, "n"), layout=layout)
    assert not untouched.any()
    with pytest.raises(InputError, match="noise std=nan"):
        add_gaussian(layout.zeros(), std=math.nan, generator=torch_stream(1, "n"), layout=layout)


def test_noise_on_groups() -> None:
    layout = Layout(("block.w1", "block.norm"), ((4000,), (4000,)))
    groups = {"mlp": ["*.w1"]}

    def stds(scope: NoiseScope) -> list[float]:
        factors = scope.parameter_factors(layout)
        total = add_gaussian(layout.zeros(), std=2.0, generator=torch_stream(1, "n"), layout=layout, factors=factors)
        return [float(part.std()) for part in layout.parts(total)]

    assert stds(NoiseScope(groups=groups, factors={"mlp": 1.0}, others=0.0)) == pytest.approx([2, 0], rel=0.1)
    assert stds(NoiseScope(groups=groups, factors={"mlp": 0.0})) == pytest.approx([0, 2], rel=0.1)
    assert stds(NoiseScope(groups=groups, factors={"mlp": 0.5})) == pytest.approx([1, 2], rel=0.1)
    with pytest.raises(InputError, match="group 'attention'"):
        NoiseScope(groups=groups, factors={"attention": 1.0})
    with pytest.raises(InputError, match="group 'others'"):  # it is a field of its own
        NoiseScope(groups=groups, factors={"others": 0.0})
    with pytest.raises(InputError, match="at least 0"):
        NoiseScope(groups=groups, factors={"mlp": -1.0})


def test_placements_of_appendix_h1() -> None:
    # The paper's example: σ_DP = 3e-6 with S = 204,800 is z = 0.6144.
    z = noise_multiplier_of(3e-6, cohort_size=204_800)
    assert z == pytest.approx(0.6144)
    assert sigma_dp_of(z, cohort_size=204_800) == pytest.approx(3e-6)


def test_secure_words_are_uniform_and_never_repeat() -> None:
    first, second = SecureRandom(), SecureRandom()
    words = np.concatenate([first.words(100_001), first.words(3), second.words(100_000)])
    assert len(np.unique(words)) == len(words)
    bits = np.unpackbits(words.view(np.uint8)).reshape(len(words), 64)
    assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / math.sqrt(len(words))


FORK = """
import os
from sottovoce.privacy.randomness import SecureRandom
random = SecureRandom()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, random.words(4).tobytes())
    os._exit(0)
os.wait()
print(os.read(reader, 32).hex(), random.words(4).tobytes().hex())
"""


def test_secure_words_differ_after_a_fork() -> None:
    # In a process of its own: this one has threads, which do not survive a fork.
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    theirs, ours = (np.frombuffer(bytes.fromhex(text), dtype=np.uint64) for text in done.stdout.split())
    assert len(theirs) == len(ours) == 4
    assert len(np.intersect1d(theirs, ours)) == 0


def test_secure_random_cannot_be_copied() -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="same words"):
            attempt(SecureRandom())
