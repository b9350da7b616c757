"""The noise on the sum of one round, however a plan has it: seeded or secret, by the server or in clients' shares,
independent or correlated over rounds.

Shapes: P flat length.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sottovoce.base.errors import InvariantError, ensure
from sottovoce.flat.layout import Layout
from sottovoce.privacy.correlated_noise import CorrelatedNoise
from sottovoce.privacy.noise import (
    NoiseScope,
    add_discrete_gaussian,
    add_gaussian,
    add_on_grid,
    add_secure_gaussian,
    grid_gaussian,
    grid_spacing,
    secure_normal,
)
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.random_source import RandomSource
from sottovoce.privacy.secure_random import SecureRandom
from sottovoce.privacy.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class RoundNoise:
    """N(0, std_sum²) on a sum, on a `grid` where there is one; sums of words are modulo 2^`word_bits`."""

    layout: Layout
    random: RandomSource
    std_sum: float
    grid: float | None
    word_bits: int | None
    scope: NoiseScope | None
    shares: NoiseShares | None
    strategy: Strategy | None

    def add(
        self,
        total: Tensor,
        *,
        step: int,
        attempt: int = 1,
        row: int = 0,
        shares: int = 0,
        correlated: CorrelatedNoise | None = None,
    ) -> Tensor:
        """The noised sum in float32, in place or not; see `Plan.add_noise`."""
        ensure((self.strategy is None) == (correlated is None), "noise of another kind than the plan's")
        if correlated is not None:
            return self._add_row(total, correlated.row(row)).float()
        if shares or self.shares is not None:
            return self._wrapped(self._top_up(total, shares)).float()
        if not self.random.seeded:
            assert self.grid is not None
            add_secure_gaussian(total, std=self.std_sum, grid=self.grid, random=SecureRandom(), layout=self.layout)
            return self._wrapped(total).float()
        total = total.float()  # on a grid too: a simulation's noise is the same wherever its clients are
        factors = self.scope.parameter_factors(self.layout) if self.scope else None
        generator = torch.Generator(device=total.device).manual_seed(self.random.noise_seed(step, attempt))
        add_gaussian(total, std=self.std_sum, generator=generator, layout=self.layout, factors=factors)
        return total.float()

    def correlated(self, *, device: torch.device | str, vault: Path | None) -> CorrelatedNoise | None:
        """The noise of a whole run, from its first row on; None where rounds have noise of their own.

        A release keeps what it needs of earlier rows in `vault`, a folder for its owner's eyes alone.
        """
        if self.strategy is None:
            return None
        secure = not self.random.seeded
        ensure(secure == (vault is not None), "a release's noise without a vault, or a simulation's with one")
        return CorrelatedNoise(
            self.strategy,
            layout=self.layout,
            draw=lambda row: self._independent(row, device),
            device=device,
            dtype=torch.float64 if secure else torch.float32,
            vault=vault,
        )

    def count(self, *, std: float, most_users: int, step: int, attempt: int) -> float:
        """The noise on adaptive clipping's count."""
        if self.random.seeded:
            return float(self.random.count_noise(step, attempt).normal(0.0, std))
        # Half counts lie on the grid and sums are exact, so the argument of `noise` holds here too.
        grid = min(grid_spacing(clip_bound=1.0, most_users=most_users, std=std), 0.5)
        return float(grid_gaussian(1, std=std, grid=grid, random=SecureRandom()))

    @property
    def share_variance(self) -> float:
        """Of the noise that one client adds, in cells² of the grid: a discrete Gaussian's (`noise_shares`)."""
        ensure(self.shares is not None and self.grid is not None, "a share of noise in a plan without shares")
        assert self.shares is not None
        assert self.grid is not None
        return self.shares.variance(noise_std_cells=self.std_sum / self.grid)

    def _independent(self, row: int, device: torch.device | str) -> Tensor:
        """N(0, 1) [P] for one row; a simulation's are those that independent noise of as many steps would have."""
        if not self.random.seeded:
            return secure_normal(self.layout, random=SecureRandom(), device=device)
        generator = torch.Generator(device=device).manual_seed(self.random.noise_seed(row, 1))
        return add_gaussian(self.layout.zeros(device=device), std=1.0, generator=generator, layout=self.layout)

    def _add_row(self, total: Tensor, noise_P: Tensor) -> Tensor:
        if self.grid is None:
            return total.add_(noise_P, alpha=self.std_sum)
        return add_on_grid(total, noise_P, std=self.std_sum, grid=self.grid, layout=self.layout)

    def _top_up(self, total: Tensor, shares: int) -> Tensor:
        """From the system's entropy in a simulation too: so are the clients' own shares."""
        agreed = self.shares
        if agreed is None or 0 < shares < agreed.least:
            raise InvariantError(f"a sum with {shares} shares of noise: {agreed} was promised")
        assert self.grid is not None
        return add_discrete_gaussian(
            total,
            variance_cells=agreed.missing(shares) * self.share_variance,
            grid=self.grid,
            random=SecureRandom(),
            layout=self.layout,
        )

    def _wrapped(self, noised: Tensor) -> Tensor:
        """Sums of words are modulo 2^`word_bits`, and so is the noise on them: as if it had been there before.

        Over a network nobody sees what a client adds. A vector that brings the sum to where words wrap around would
        else show, whatever the noise, on which side of it somebody's update has left it. Sums of clipped updates, and
        16 standard deviations of noise, stay as they are.
        """
        if self.word_bits is None:
            return noised
        assert self.grid is not None
        half = math.ldexp(self.grid, self.word_bits - 1)
        noised[noised >= half] -= 2 * half
        noised[noised < -half] += 2 * half
        return noised
