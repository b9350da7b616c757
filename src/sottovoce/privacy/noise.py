"""Gaussian noise on the sum of clipped updates.

`add_gaussian` is for simulation: fast, in float32, and repeatable from its generator. `add_secure_gaussian` is for
real releases. The two never mix. On a CUDA device with Triton the first is one kernel (`noise_triton`): other bits than
torch's own draws, and the same on every model of GPU up to the rounding of a logarithm and a root.

What the secure mode claims against floating-point attacks (decisions/005 has the arithmetic)
    Textbook noise in floating point leaks: which numbers x + noise can round to depends on x (Mironov 2012). Here
    * every clipped update is rounded towards zero to multiples of a public power of two, the grid, and the sum of
      up to `most_users` of them in float64 is exact, in any order (`grid_spacing`); an update loses less than one cell
      of the grid in each coordinate, which is at most 2⁻²³ of the noise's standard deviation;
    * noise is drawn without looking at the sum, rounded to the same grid, and added, again exactly.
    For a sum x on the grid, x + round(noise) = round(x + noise). So the released number is a post-processing of the
    ideal Gaussian mechanism: it has the accountant's guarantee, and its support is the same whatever the data. What is
    left is how far the drawn noise is from an ideal Gaussian rounded to the grid: Box–Muller on 63-bit uniforms (126
    bits in the tail, which ends at 13.2σ) in float64, with relative errors near 2⁻⁵². One standard deviation has at
    most 2²⁴ cells, so fewer than one draw in 2²³ falls into another cell than the ideal one.
    Not claimed: exactness of those functions, a bound for all coordinates together, or protection against timing and
    other side channels, a compromised machine, or an operating system without entropy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Generator, Tensor

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.flat.kernels import triton_kernels
from sottovoce.flat.layout import Groups, Layout, match_groups
from sottovoce.privacy.discrete_gaussian import DiscreteGaussian
from sottovoce.privacy.randomness import SecureRandom

# Elements drawn at once: few enough to stay in the cache, enough to fill the device.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}
_TAIL_WORDS = 1 << 31  # below, a 63-bit uniform is too coarse
_REACH = 16.0  # no draw is farther than 13.3 standard deviations
_CELLS_PER_STD = 2.0**24  # float64 leaves 28 bits behind the point of such numbers, and rounding needs them


def add_gaussian(
    total: Tensor, *, std: float, generator: Generator, layout: Layout, factors: Sequence[float] | None = None
) -> Tensor:
    """total += N(0, std²) on every parameter, in place; `factors` (for analysis) scale std per parameter.

    Guarantee: with std = z·C on a sum of updates clipped to C, the Gaussian mechanism with noise multiplier z, up to
    float32 arithmetic and a repeatable generator: a simulation of a release, not a release. With `factors`: none.
    std = 0 adds nothing.
    """
    _check_std(std)
    layout.check(total)
    if std == 0:
        return total
    kernels = _kernels(total)
    if kernels is not None:
        scales = None if factors is None else tuple(factors)
        kernels.add_normal(total, std=std, key=_key(total.device, generator), layout=layout, factors=scales)
        return total
    if factors is None:
        for chunk in _chunks(total):
            chunk.add_(_standard_normal(chunk, generator), alpha=std)
    else:
        for part, factor in zip(layout.parts(total), factors, strict=True):
            part.add_(_standard_normal(part, generator), alpha=std * factor)
    layout.clear_padding(total)
    return total


def _key(device: torch.device, generator: Generator) -> Tensor:
    """The generator's next 64 bits, drawn where they are used: nothing waits, and a second call has other noise."""
    return torch.empty(1, dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)


def _kernels(total: Tensor) -> ModuleType | None:
    takes = total.is_cuda and total.dtype == torch.float32
    return triton_kernels("sottovoce.privacy.noise_triton") if takes else None


def _chunks(total: Tensor) -> Sequence[Tensor]:
    return torch.split(total, _CHUNK.get(total.device.type, 1 << 22))


def _standard_normal(like: Tensor, generator: Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def add_secure_gaussian(total: Tensor, *, std: float, grid: float, random: SecureRandom, layout: Layout) -> Tensor:
    """total += N(0, std²) rounded to `grid`, in place; `total` is float64 and on the grid (checked: else no defence).

    Guarantee: see the top of this file.
    """
    _check_std(std)
    for chunk in _grid_chunks(total, grid=grid, layout=layout):
        chunk.add_(grid_gaussian(chunk.numel(), std=std, grid=grid, random=random, device=chunk.device))
    return total


def add_discrete_gaussian(
    total: Tensor, *, variance_cells: float, grid: float, random: SecureRandom, layout: Layout
) -> Tensor:
    """total += a discrete Gaussian on `grid`, in place; the variance is in cells², and zero adds nothing.

    Guarantee: as `add_secure_gaussian`'s, and what is drawn is exact (`discrete_gaussian`).
    """
    source = DiscreteGaussian(variance=variance_cells) if variance_cells > 0 else None
    for chunk in _grid_chunks(total, grid=grid, layout=layout):
        if source is not None:
            chunk.add_(torch.from_numpy(source.draw(chunk.numel(), random=random)).to(chunk), alpha=grid)
    return total


def add_on_grid(total: Tensor, noise_P: Tensor, *, std: float, grid: float, layout: Layout) -> Tensor:
    """total += std·noise rounded to `grid`, in place; both are float64, and `total` is on the grid (checked).

    Guarantee: x + round(noise) = round(x + noise), so that what is released is a rounding of x + std·noise, whatever
    that noise has in common with other rounds'.
    """
    _check_std(std)
    check_invariant(noise_P.dtype == torch.float64, f"{noise_P.dtype} noise: sums on a grid are float64")
    for chunk, noise in zip(_grid_chunks(total, grid=grid, layout=layout), _chunks(noise_P), strict=True):
        chunk.add_((noise * (std / grid)).round_().mul_(grid))
    return total


def _grid_chunks(total: Tensor, *, grid: float, layout: Layout) -> Iterator[Tensor]:
    """The chunks of an exact sum on a grid, each checked before noise is added; padding is cleared afterwards."""
    layout.check(total)
    check_invariant(total.dtype == torch.float64, f"total.dtype={total.dtype}: sums on a grid are float64")
    for chunk in _chunks(total):
        cells = chunk / grid
        is_exact = bool(((cells == cells.trunc()) & (cells.abs() <= 2.0**52)).all())
        check_invariant(is_exact, "total is not an exact sum on the grid")
        yield chunk
    layout.clear_padding(total)


def grid_gaussian(
    count: int, *, std: float, grid: float, random: SecureRandom, device: torch.device | str = "cpu"
) -> Tensor:
    """`count` independent N(0, std²) in float64, each rounded to the nearest multiple of `grid` (a power of two)."""
    return _box_muller(count, std=std / grid, random=random, device=device).round_().mul_(grid)


def secure_normal(layout: Layout, *, random: SecureRandom, device: torch.device | str = "cpu") -> Tensor:
    """N(0, 1) on every parameter, in float64 and on no grid: for noise that is yet to be correlated."""
    drawn_P = layout.zeros(device=device, dtype=torch.float64)
    for chunk in _chunks(drawn_P):
        chunk.copy_(_box_muller(chunk.numel(), std=1.0, random=random, device=chunk.device))
    layout.clear_padding(drawn_P)
    return drawn_P


def _box_muller(count: int, *, std: float, random: SecureRandom, device: torch.device | str) -> Tensor:
    pairs = -(-count // 2)
    words = torch.from_numpy(random.words(2 * pairs).view("int64")).to(device)
    coarse = (words[:pairs] >> 1) & (2**63 - 1)
    uniform = (coarse.double() + 1) * 2.0**-63  # in (0, 1]
    tail = (coarse < _TAIL_WORDS).nonzero().squeeze(-1)
    if len(tail):  # once in four thousand million draws: refine, so that the far tail is not cut off
        finer = torch.from_numpy((random.words(len(tail)) >> 1).view("int64")).to(device)
        uniform[tail] = (coarse[tail].double() + (finer.double() + 1) * 2.0**-63) * 2.0**-63
    radius = uniform.log_().mul_(-2).sqrt_().mul_(std)
    angle = words[pairs:].double().mul_(math.pi * 2.0**-63)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def grid_spacing(*, clip_bound: float, most_users: int, std: float, bits: int = 53) -> float:
    """The grid, a power of two: sums of `most_users` updates clipped to C, and noise, are exact on it in float64.

    With fewer `bits`, they also fit into signed integers of so many. The grid is no finer than 2⁻²⁴ of the noise's
    standard deviation, where rounding would show in the noise itself.

    >>> grid_spacing(clip_bound=1.0, most_users=1024, std=1.0) == 2.0**-24
    True
    >>> grid_spacing(clip_bound=1.0, most_users=1024, std=0.0) == 2.0 ** (10 - 52)
    True
    """
    exact = _power_of_two(most_users * clip_bound + _REACH * std) * 2.0 ** (1 - bits)
    return max(exact, _power_of_two(std) / _CELLS_PER_STD) if std > 0 else exact


def _power_of_two(least: float) -> float:
    """The smallest one that is not below `least`."""
    fraction, exponent = math.frexp(least)  # a logarithm would be rounded
    return math.ldexp(1.0, exponent - (fraction == 0.5))


def _check_std(std: float) -> None:
    if not (math.isfinite(std) and std >= 0):
        raise InputError(f"noise std={std}: expected a finite number, at least 0")


@dataclass(frozen=True, kw_only=True)
class NoiseScope:
    """Where noise goes, for analysis (Figures 15 and 16): not a release, no guarantee.

    `factors` maps groups to what σ is multiplied by there; `others` is the factor everywhere else.
    One group only: `factors={"mlp": 1}, others=0`. All but one: `factors={"mlp": 0}`. Half on one: `{"mlp": 0.5}`.
    """

    groups: Groups
    factors: Mapping[str, float]
    others: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in (*self.factors.items(), ("of others", self.others)):
            if not (math.isfinite(factor) and factor >= 0):
                raise InputError(f"noise factor {name}={factor}: expected a finite number, at least 0")
        for name in self.factors:
            if name not in self.groups:
                raise InputError(f"noise factor for group {name!r}: expected one of {', '.join(self.groups)}")

    def parameter_factors(self, layout: Layout) -> tuple[float, ...]:
        """The factor of every parameter."""
        group_of = match_groups(layout.names, self.groups)
        return tuple(self.others if group is None else self.factors.get(group, self.others) for group in group_of)


# Two placements of Appendix H.1, in units of C: z = σ_sum (on the sum) and σ_DP = σ_avg (on the mean). The third, noise
# on each client's update, equals them in expectation only: it hangs on how many took part, which is private, and is
# smaller than planned in every small cohort. No accountant bounds it.


def sigma_dp_of(noise_multiplier: float, *, cohort_size: int) -> float:
    """σ_DP = z/S: noise on the mean for noise on the sum."""
    return noise_multiplier / cohort_size


def noise_multiplier_of(sigma_dp: float, *, cohort_size: int) -> float:
    """z = σ_DP·S: noise on the sum for noise on the mean (Theorem 1)."""
    return sigma_dp * cohort_size
