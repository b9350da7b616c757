"""The noise on the sum of one round: seeded or secure, by the server or in clients' shares, independent or correlated.

Correlated noise is y = C⁻¹w for independent w (C: the strategy's matrix), row after row:

    row 0, 1, 2, …     y_t = w_t − Σ_j column_j·y_{t−j}             what a sum gets is z·(clip bound)·y_t

In sums over rounds it partly cancels; one row alone has no less noise than w_t. Later rows need the *memory* of earlier
ones: the last rows themselves (banded), or a few running sums of all of them (BLT). It would reveal part of the noise
in released sums, so it is as secret as the noise itself:

    simulation   w follows from the seed and the row; the memory lies in checkpoints
    release      w is the system's; the memory is written to a folder of secrets before a row is used

Guarantee: no row is used for two sums. A row that was charged and whose sum was lost is discarded: the run goes on with
the next one, and pays for both.

Shapes: P flat length, M memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.errors import InputError, InvariantError, check_invariant
from sottovoce.flat.layout import Layout
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
from sottovoce.privacy.randomness import RandomSource, SecureRandom
from sottovoce.privacy.secret_files import write_secret
from sottovoce.privacy.strategies import Banded, Blt, Strategy, first_column, strategy_to_json

MEMORY = "noise-memory.npy"
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements at once: few enough to stay in the cache
_ROWS_OF_INVERSE = 4096  # behind which nothing of it is left


def memory_rows(strategy: Strategy) -> int:
    """M: how many vectors of the model's size later rows need."""
    return len(strategy.column) - 1 if isinstance(strategy, Banded) else len(strategy.decays)


@lru_cache(maxsize=16)
def widening(strategy: Strategy) -> float:
    """The standard deviation of y, a row far from the first, where w has 1: the length of C⁻¹'s first column."""
    column = first_column(strategy, _ROWS_OF_INVERSE)
    inverse = np.zeros_like(column)
    inverse[0] = 1.0
    with np.errstate(all="ignore"):
        for row in range(1, len(column)):
            inverse[row] = -np.dot(column[1 : row + 1], inverse[row - 1 :: -1])
        found = float(np.linalg.norm(inverse))
    if not math.isfinite(found):
        raise InputError(f"strategy {strategy_to_json(strategy)}: its noise grows without end; expected one that fades")
    return found


@final
class CorrelatedNoise:
    """The noise of one run. `draw` gives w of a row, independent of all others, and `rows` counts those made.

    With a `secret_folder` the memory is written there before a row is given out, and only its owner can read it.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        layout: Layout,
        draw: Callable[[int], Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        secret_folder: Path | None = None,
    ) -> None:
        self._strategy, self._layout, self._draw, self._vault = strategy, layout, draw, secret_folder
        self._memory_MP = layout.zeros(memory_rows(strategy), device=device, dtype=dtype)
        self.rows = 0
        if secret_folder is not None:
            self._open(secret_folder)

    def advance_to(self, rows: int) -> None:
        """Be ready for row `rows`, of which all before are charged. Rows that were never made are made and discarded.

        A release can discard one, which it was killed over before it was written; if more are missing, the noise of
        earlier sums is lost, and no later noise can be correlated with it.
        """
        missing = rows - self.rows
        if self._vault is not None and not 0 <= missing <= 1:
            raise InputError(
                f"{self._vault / MEMORY} knows {self.rows} rows of noise, the ledger has charged {rows}: they do not "
                "belong together, or one of them was lost or rolled back; begin another run"
            )
        check_invariant(missing >= 0, f"row {rows} of noise after row {self.rows - 1}: it would be for two sums")
        for row in range(self.rows, rows):
            self.row(row)

    def row(self, row: int) -> Tensor:
        """y of `row` [P], which must be the next one."""
        check_invariant(row == self.rows, f"row {row} of noise: the next one is {self.rows}, and none is for two sums")
        noise_P = self._draw(row)
        check_invariant(
            noise_P.dtype == self._memory_MP.dtype, f"{noise_P.dtype} draws for {self._memory_MP.dtype} noise"
        )
        size = _CHUNK.get(noise_P.device.type, 1 << 22)
        for start in range(0, noise_P.numel(), size):
            self._advance(self._memory_MP[:, start : start + size], noise_P[start : start + size])
        self.rows += 1
        if self._vault is not None:
            self._write(self._vault)
        return noise_P

    def _advance(self, memory_MP: Tensor, noise_P: Tensor) -> None:
        """w becomes y in place, and the memory that of the next row; what it covers of P stays in the cache."""
        match self._strategy:
            case Banded(column=column):
                # Row t lies at t mod M: the oldest makes room for the newest.
                count = len(memory_MP)
                for back in range(1, min(count, self.rows) + 1):
                    noise_P.sub_(memory_MP[(self.rows - back) % count], alpha=column[back])
                if count:
                    memory_MP[self.rows % count] = noise_P
            case Blt(decays=decays, scales=scales):
                for sum_P, scale in zip(memory_MP, scales, strict=True):
                    noise_P.sub_(sum_P, alpha=scale)
                for sum_P, decay in zip(memory_MP, decays, strict=True):
                    sum_P.mul_(decay).add_(noise_P)

    # A simulation's memory lies in its checkpoints.

    @property
    def memory_MP(self) -> Tensor:
        """All that later rows need, with how many there were (`rows`)."""
        return self._memory_MP

    def restore(self, memory_MP: Tensor, *, rows: int) -> None:
        check_invariant(self._vault is None, "the memory of a release lies in no checkpoint")
        if memory_MP.shape != self._memory_MP.shape:
            raise InputError("the checkpoint's noise is another mechanism's: expected that of the same recipe")
        self._memory_MP.copy_(memory_MP)
        self.rows = rows

    # A release's lies in its folder of secrets.

    def _open(self, secret_folder: Path) -> None:
        path = secret_folder / MEMORY
        if not path.exists():
            return
        try:
            with path.open("rb") as file:
                rows = int(np.load(file, allow_pickle=False))
                memory = torch.from_numpy(np.load(file, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}): without it no later noise is known") from None
        if memory.shape != self._memory_MP.shape or memory.dtype != self._memory_MP.dtype:
            raise InputError(f"{path} is another run's: expected the noise of the same recipe")
        self._memory_MP.copy_(memory)
        self.rows = rows

    def _write(self, secret_folder: Path) -> None:
        with write_secret(secret_folder / MEMORY) as file:
            np.save(file, np.int64(self.rows), allow_pickle=False)
            np.save(file, self._memory_MP.cpu().numpy(), allow_pickle=False)


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
        check_invariant((self.strategy is None) == (correlated is None), "noise of another kind than the plan's")
        if correlated is not None:
            return self._add_row(total, correlated.row(row)).float()
        if shares or self.shares is not None:
            return self._wrapped(self._top_up(total, shares)).float()
        if not self.random.is_seeded:
            assert self.grid is not None
            add_secure_gaussian(total, std=self.std_sum, grid=self.grid, random=SecureRandom(), layout=self.layout)
            return self._wrapped(total).float()
        total = total.float()  # on a grid too: a simulation's noise is the same wherever its clients are
        factors = self.scope.parameter_factors(self.layout) if self.scope else None
        generator = torch.Generator(device=total.device).manual_seed(self.random.noise_seed(step, attempt))
        add_gaussian(total, std=self.std_sum, generator=generator, layout=self.layout, factors=factors)
        return total.float()

    def correlated(self, *, device: torch.device | str, secret_folder: Path | None) -> CorrelatedNoise | None:
        """The noise of a whole run, from its first row on; None where rounds have noise of their own.

        A release keeps what it needs of earlier rows in `secret_folder`, which only its owner can read.
        """
        if self.strategy is None:
            return None
        secure = not self.random.is_seeded
        check_invariant(
            secure == (secret_folder is not None), "a release without a secret_folder, or a simulation with one"
        )
        return CorrelatedNoise(
            self.strategy,
            layout=self.layout,
            draw=lambda row: self._independent(row, device),
            device=device,
            dtype=torch.float64 if secure else torch.float32,
            secret_folder=secret_folder,
        )

    def count(self, *, std: float, most_users: int, step: int, attempt: int) -> float:
        """The noise on adaptive clipping's count."""
        if self.random.is_seeded:
            return float(self.random.count_noise(step, attempt).normal(0.0, std))
        # Half counts lie on the grid and sums are exact, so the argument of `noise` holds here too.
        grid = min(grid_spacing(clip_bound=1.0, most_users=most_users, std=std), 0.5)
        return float(grid_gaussian(1, std=std, grid=grid, random=SecureRandom()))

    @property
    def share_variance(self) -> float:
        """Of the noise that one client adds, in cells² of the grid: a discrete Gaussian's (`noise_shares`)."""
        check_invariant(self.shares is not None and self.grid is not None, "a share of noise in a plan without shares")
        assert self.shares is not None
        assert self.grid is not None
        return self.shares.variance(noise_std_cells=self.std_sum / self.grid)

    def _independent(self, row: int, device: torch.device | str) -> Tensor:
        """N(0, 1) [P] for one row; a simulation's are those that independent noise of as many steps would have."""
        if not self.random.is_seeded:
            return secure_normal(self.layout, random=SecureRandom(), device=device)
        generator = torch.Generator(device=device).manual_seed(self.random.noise_seed(row, 1))
        return add_gaussian(self.layout.zeros(device=device), std=1.0, generator=generator, layout=self.layout)

    def _add_row(self, total: Tensor, noise_P: Tensor) -> Tensor:
        if self.random.is_seeded:  # on a grid too: a simulation's noise is the same wherever its clients are
            return total.float().add_(noise_P, alpha=self.std_sum)
        assert self.grid is not None
        return self._wrapped(add_on_grid(total, noise_P, std=self.std_sum, grid=self.grid, layout=self.layout))

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
        else show, whatever the noise, on which side an update left it. Sums of clipped updates, and 16 standard
        deviations of noise, stay as they are.
        """
        if self.word_bits is None:
            return noised
        assert self.grid is not None
        half = math.ldexp(self.grid, self.word_bits - 1)
        noised[noised >= half] -= 2 * half
        noised[noised < -half] += 2 * half
        return noised
