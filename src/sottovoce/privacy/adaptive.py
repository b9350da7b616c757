"""Adaptive clipping: the clip bound follows a private quantile of the users' norms (Andrew et al. 2021).

Each round also counts how many updates were within the bound, with its own noise, and moves the bound towards the
one that a share `target_quantile` of the users would keep. Both sums are over one cohort, so the two together are
one Gaussian release: what the count spends, the update's noise must make up for.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.privacy.clipping import LARGEST_BOUND, SMALLEST_BOUND, ClipStats


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
