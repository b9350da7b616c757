"""Clipping: one user's update never weighs more than C, whatever the user's data.

`Clipper` measures the layers of an update, decides one factor per layer, and applies it. The factors are pure
arithmetic on norms (`layer_scales`); `segments` applies them on each device.

Adaptive clipping (Andrew et al. 2021): the bound follows a private quantile of the users' norms. Each round also counts
how many updates were within the bound, with its own noise, and moves the bound towards the one that a share
`target_quantile` of the users would keep. Both sums are over one cohort, so the two together are one Gaussian release:
what the count spends, the update's noise must make up for.

Shapes: P flat length, N clients, H layers. "..." is either nothing (one user) or N (stacked users).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.flat import segments
from sottovoce.flat.layout import Layers

# Rounding to float32 moves a product by at most u = 2^-24 of itself, and its factor by as much. We aim 8u below the
# bound, so that no rounding carries a norm above it, and leave alone what lies more than 2u below: what was
# clipped once is not clipped again.
_UNIT = 2.0**-24
_AIM = 1 - 8 * _UNIT
_LEAVE = 1 - 2 * _UNIT
_AIM_TOLERANCE = 4 * _UNIT

# Squares of float64 values below 1e-154 underflow, and the norms of such layers with them. float32 is far above.
_NEGLIGIBLE = 1e-140

# Below, an update's float32 elements are subnormal and rounding is no longer small beside them; above, they overflow.
SMALLEST_BOUND, LARGEST_BOUND = 1e-30, 1e30


class Share(StrEnum):
    """How the bound C is shared out among layers."""

    GLOBAL = "global"  # no shares: one bound on the whole update
    UNIFORM = "uniform"  # C_h = C/√H
    DIM = "dim"  # C_h = C·√(d_h/Σd)
    WEIGHTED = "weighted"  # C_h = C·√(α_h·d_h/Σα·d), Appendix H.5


class Normalise(StrEnum):
    """Whether layers below their share are enlarged to it."""

    NEVER = "never"  # clip: only ever shrinks (Definition 3)
    ABOVE = "above"  # once the whole update reaches C, every layer is rescaled to exactly its share
    ALWAYS = "always"  # every layer is rescaled to exactly its share


def layer_bounds(
    layers: Layers, *, clip_bound: float, share: Share, alpha: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """C_h of every layer; their squares sum to C² (Definition 3; under `global` they only describe the `dim` shares).

    Those of layers that are held as a whole do not count: their update is zero.

    `alpha` (weighted only) maps patterns of layer names to α; layers that no pattern names have α = 1.
    """
    count = len(layers.names)
    if math.isinf(clip_bound):
        return (math.inf,) * count
    if share is Share.UNIFORM:
        return (clip_bound / math.sqrt(layers.count),) * count
    alphas = _alphas(layers.names, alpha or {}) if share is Share.WEIGHTED else [1.0] * count
    parts = [a * d for a, d in zip(alphas, layers.dimensions, strict=True)]
    whole = math.fsum(parts)
    if whole == 0:
        raise InputError(f"alpha={dict(alpha or {})}: every layer gets a share of zero; expected one above zero")
    return tuple(clip_bound * math.sqrt(part / whole) for part in parts)


def _alphas(names: Sequence[str], alpha: Mapping[str, float]) -> list[float]:
    found: list[float | None] = [None] * len(names)
    for pattern, value in alpha.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"alpha[{pattern!r}]={value}: expected a finite number, at least 0")
        matched = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matched:
            raise InputError(f"alpha[{pattern!r}] matches no layer (such as {names[0]!r})")
        for i in matched:
            if found[i] is not None:
                raise InputError(f"layer {names[i]!r} is matched by two patterns of alpha: {list(alpha)}")
            found[i] = value
    return [1.0 if value is None else value for value in found]


@dataclass(frozen=True)
class ClipStats:
    """By-products of clipping, on the device and never waited for. Private: for diagnostics only.

    Norms of a non-finite update are NaN or infinite before, zero after.
    """

    norm: Tensor  # [...]
    layer_norms: Tensor  # [..., H], before
    layer_norms_after: Tensor  # [..., H]
    clipped: Tensor  # [...] bool: the update was changed (shrunk or rescaled)
    within: Tensor  # [...] bool: it was finite and its norm did not exceed C
    non_finite: Tensor  # [...] bool: it counted as zero


@dataclass(frozen=True, kw_only=True)
class Clipper:
    """Bounds the update of one user, or of many stacked users each on their own.

    What its `layers` hold is set to zero first, and has no part in any norm.

    Guarantee: the float64 norm of what `clip` returns (and `accumulate` adds) is at most `clip_bound`, for every
    input; also after rounding to float32, or with a `grid` to its multiples. A zero update stays zero. A non-finite
    one (NaN, infinity, a float64 norm beyond 1e150) counts as zero and is marked in the statistics. An infinite
    `clip_bound` changes nothing but that, and bounds nothing.

    >>> from sottovoce.flat.layout import Layout, tensor_layers
    >>> layout = Layout.of({"w": torch.zeros(2), "b": torch.zeros(1)})
    >>> clipper = Clipper(layers=tensor_layers(layout), clip_bound=1.0)
    >>> update = layout.flatten({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    >>> clipped, stats = clipper.clip(update)
    >>> [round(float(view.sum()), 5) for view in layout.views(clipped).values()], stats.norm.item()
    ([0.6, 0.8], 5.0)
    """

    layers: Layers
    clip_bound: float
    share: Share = Share.GLOBAL
    normalise: Normalise = Normalise.NEVER
    alpha: tuple[tuple[str, float], ...] = ()
    grid: float | None = None

    def __post_init__(self) -> None:
        if not (SMALLEST_BOUND <= self.clip_bound <= LARGEST_BOUND or self.clip_bound == math.inf):
            raise InputError(
                f"clip_bound={self.clip_bound}: expected a number from {SMALLEST_BOUND} to {LARGEST_BOUND}, "
                "or inf for no clipping"
            )
        if self.alpha and self.share is not Share.WEIGHTED:
            raise InputError(f"alpha is set but share={self.share}: expected share=weighted")
        if math.isinf(self.clip_bound) and self.normalise is not Normalise.NEVER:
            raise InputError(f"clip_bound=inf with normalise={self.normalise}: there is no share to rescale to")
        _ = self.layer_bounds  # checks alpha now rather than at the first update

    @cached_property
    def layer_bounds(self) -> tuple[float, ...]:
        """C_h of every layer."""
        return layer_bounds(self.layers, clip_bound=self.clip_bound, share=self.share, alpha=dict(self.alpha))

    def clip(self, update: Tensor, *, weight: Tensor | float = 1.0) -> tuple[Tensor, ClipStats]:
        """The clipped update as a new tensor [..., P]; float32, or float64 for float64 updates and on a grid."""
        update = self._without_held(update)
        scales, stats = self._measure(update, weight)
        wide = self.grid is not None or update.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return segments.scaled(update, scales, self.layers, dtype=dtype, grid=self.grid), stats

    def accumulate(self, total: Tensor, update: Tensor, *, weight: Tensor | float = 1.0) -> ClipStats:
        """total += clip(update), summed over stacked users, in two walks over memory and without waiting for the host.

        `total` is [P]: float32, or float64 (which a grid needs for its sums to be exact).
        """
        exact = self.grid is None or total.dtype == torch.float64
        check_invariant(exact, f"total.dtype={total.dtype}: a grid needs float64")
        update = self._without_held(update)
        scales, stats = self._measure(update, weight)
        segments.add_scaled(total, update, scales, self.layers, grid=self.grid)
        return stats

    def _without_held(self, update: Tensor) -> Tensor:
        if not self.layers.held:
            return update
        update = update.clone()
        self.layers.layout.clear(update, self.layers.held)
        return update

    def _measure(self, update: Tensor, weight: Tensor | float) -> tuple[Tensor, ClipStats]:
        norms = segments.layer_norms(update, self.layers)
        norm = torch.linalg.vector_norm(norms, dim=-1)
        finite = norm.isfinite()
        scales = layer_scales(
            norms,
            norm,
            bounds=_on_device(self.layer_bounds, update.device),
            clip_bound=self.clip_bound,
            share=self.share,
            normalise=self.normalise,
        )
        stats = ClipStats(
            norm=norm,
            layer_norms=norms,
            layer_norms_after=torch.where(scales == 0, 0.0, norms * scales),
            clipped=(scales != 1).any(-1),
            within=finite & (norm <= self.clip_bound),
            non_finite=~finite,
        )
        return _weighted(scales, weight), stats


def layer_scales(
    norms: Tensor, norm: Tensor, *, bounds: Tensor, clip_bound: float, share: Share, normalise: Normalise
) -> Tensor:
    """The factor of each layer [..., H], from the layers' norms [..., H] and the whole norm [...], all float64.

    Zero for every layer of a non-finite update, one where nothing is to be done.
    """
    whole = norm.unsqueeze(-1)
    if share is Share.GLOBAL:
        measured, target = whole.expand_as(norms), torch.full_like(bounds, clip_bound)
    else:
        measured, target = norms, bounds
    rescaled = target * _AIM / measured
    if normalise is Normalise.NEVER:
        scales = torch.where(measured > target * _LEAVE, rescaled, 1.0)
    else:
        # A layer of zeros stays zero; one that is at its share already is left alone.
        there = (measured < _NEGLIGIBLE) | ((measured / target - _AIM).abs() <= _AIM_TOLERANCE)
        scales = torch.where(there, 1.0, rescaled)
        if normalise is Normalise.ABOVE:
            scales = torch.where(whole > clip_bound * _LEAVE, scales, 1.0)
    return torch.where(whole.isfinite(), scales, 0.0)


def _weighted(scales: Tensor, weight: Tensor | float) -> Tensor:
    """Scales times the user's weight, kept within [0, 1] so that no weight can lift an update above the bound."""
    if isinstance(weight, float | int):
        check_invariant(0 <= weight <= 1, f"weight={weight}: a weight above 1 would break the clip bound")
        return scales if weight == 1 else scales * weight
    bounded = torch.nan_to_num(weight.to(scales), nan=0.0).clamp(0.0, 1.0)
    return scales * bounded.unsqueeze(-1)


@lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept there, because copying 330 numbers to a GPU for every user would make the host wait."""
    return torch.tensor(values, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class ClipSums:
    """The by-products of many users' clipping as sums: as large for a million users as for one. Private, as they are.

    Norms, and their squares, are summed over the users whose update was finite: for means and deviations over users.
    """

    updates: int
    non_finite: Tensor  # [] how many
    clipped: Tensor  # [] how many of the finite ones
    norm: Tensor  # [2]: Σ and Σ of squares
    norm_after: Tensor  # [2]
    layer_norms: Tensor  # [2, H], before
    layer_norms_after: Tensor  # [2, H]

    def __add__(self, other: "ClipSums") -> "ClipSums":
        return ClipSums(*(getattr(self, own.name) + getattr(other, own.name) for own in fields(self)))

    def on_host(self) -> "ClipSums":
        """The same off the device. Waits for it."""
        tensors = {own.name: getattr(self, own.name).cpu() for own in fields(self) if own.name != "updates"}
        return replace(self, **tensors)


def clip_sums(stats: Sequence[ClipStats]) -> ClipSums:
    """All users of `stats`, which holds one record or more, summed on the device without waiting for it."""
    bad_N = torch.cat([one.non_finite.reshape(-1) for one in stats])
    clipped_N = torch.cat([one.clipped.reshape(-1) for one in stats])

    def moments(columns: Sequence[Tensor], *shape: int) -> Tensor:
        rows = torch.cat([column.reshape(-1, *shape) for column in columns])
        finite = torch.where(bad_N.view(-1, *[1] * len(shape)), 0.0, rows)
        return torch.stack([finite.sum(0), finite.square().sum(0)])

    layers = stats[0].layer_norms.shape[-1]
    return ClipSums(
        updates=len(bad_N),
        non_finite=bad_N.sum(),
        clipped=(clipped_N & ~bad_N).sum(),
        norm=moments([one.norm for one in stats]),
        norm_after=moments([torch.linalg.vector_norm(one.layer_norms_after, dim=-1) for one in stats]),
        layer_norms=moments([one.layer_norms for one in stats], layers),
        layer_norms_after=moments([one.layer_norms_after for one in stats], layers),
    )


def summarise(sums: ClipSums | None, layers: Layers) -> dict[str, object]:
    """A round's clipping in numbers that JSON takes. Private: for diagnostics only. Waits for the device.

    Norms are means over the users whose update was finite, with their standard deviations over these users.
    """
    if sums is None or not sums.updates:
        return {"updates": 0, "clip_fraction": 0.0, "non_finite": 0, "norm": 0.0, "layers": {}}
    bad = int(sums.non_finite)
    finite = max(1, sums.updates - bad)
    (norm, norm_std), (norm_after, norm_after_std) = (
        mean_and_deviation(moments, finite) for moments in (sums.norm, sums.norm_after)
    )
    before, before_std = mean_and_deviation(sums.layer_norms, finite)
    after, after_std = mean_and_deviation(sums.layer_norms_after, finite)
    columns = {"norm_before": before, "norm_after": after, "std_before": before_std, "std_after": after_std}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return {
        "updates": sums.updates,
        "clip_fraction": int(sums.clipped) / sums.updates,
        "non_finite": bad,
        "norm": float(norm),
        "norm_std": float(norm_std),
        "norm_after": float(norm_after),
        "norm_after_std": float(norm_after_std),
        "layers": {name: dict(zip(columns, row, strict=True)) for name, row in zip(layers.names, rows, strict=True)},
    }


def mean_and_deviation(moments: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of `count` values, whose sum and sum of squares are the first two of `moments` [2, ...]."""
    mean = moments[0] / count
    # Of values that are all alike, rounding may leave the difference below zero.
    return mean, (moments[1] / count - mean.square()).clamp(min=0.0).sqrt()


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """`count_noise_std` is σ_b, the noise on the count; None means the paper's advice, a twentieth of the cohort."""

    target_quantile: float | None = None
    learning_rate: float = 0.2
    count_noise_std: float | None = None

    def __post_init__(self) -> None:
        if self.target_quantile is None or not 0 <= self.target_quantile <= 1:
            raise InputError(
                f"adaptive clipping with target_quantile={self.target_quantile}: expected the share of updates "
                "to leave unclipped, from 0 to 1 (0.5 clips to the median)"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"learning_rate={self.learning_rate} of adaptive clipping: expected a positive number")
        if self.count_noise_std is not None and not self.count_noise_std > 0:
            raise InputError(f"count_noise_std={self.count_noise_std} of adaptive clipping: expected a positive number")

    def count_noise(self, cohort_size: int) -> float:
        """σ_b: the standard deviation of the noise on the count."""
        return cohort_size / 20 if self.count_noise_std is None else self.count_noise_std


def centred_count(stats: ClipStats) -> Tensor:
    """Σ (b_k − ½) over the users of `stats`, b_k = 1 for an update within the bound.

    Guarantee: adding or removing a user moves it by exactly ½, replacing one by at most 1.
    """
    return (stats.within.double() - 0.5).sum()


def update_noise_multiplier(noise_multiplier: float, *, count_noise_std: float) -> float:
    """z_Δ = (z⁻² − (2σ_b)⁻²)^(−½), Theorem 1: the noise on the updates so that both releases together cost z.

    >>> round(update_noise_multiplier(1.0, count_noise_std=5.0), 6)
    1.005038
    """
    if not 2 * count_noise_std > noise_multiplier:
        raise InputError(
            f"count_noise_std={count_noise_std} with noise_multiplier={noise_multiplier}: the count alone spends more "
            f"than the step may; expected more than {noise_multiplier / 2:g}"
        )
    return float((noise_multiplier**-2 - (2 * count_noise_std) ** -2) ** -0.5)


def next_clip_bound(
    clip_bound: float, noised_centred_count: float, *, cohort_size: int, settings: AdaptiveClipping
) -> float:
    """C·exp(−η·(b̃ − γ)), Algorithm 1 there, kept within what clipping can represent.

    The share b̃ is over the public cohort size. Post-processing of a noised count: costs nothing more.
    """
    assert settings.target_quantile is not None
    share = noised_centred_count / cohort_size + 0.5
    exponent = -settings.learning_rate * (share - settings.target_quantile)
    # Noise may carry the share far outside [0, 1]: one step still changes the bound by a factor of e² at most.
    bound = clip_bound * math.exp(min(max(exponent, -2.0), 2.0))
    return min(max(bound, SMALLEST_BOUND), LARGEST_BOUND)
