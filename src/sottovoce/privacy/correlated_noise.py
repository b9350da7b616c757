"""Noise that is correlated over rounds, row after row: y = C⁻¹w for independent w (C: the strategy's matrix).

    row 0, 1, 2, …     y_t = w_t − Σ_j column_j·y_{t−j}             what a sum gets is z·(clip bound)·y_t

Whoever adds up several rounds adds up noise that partly cancels; whoever sees one row alone sees no less than w_t has.
What later rows need of earlier ones is the *memory*: the last rows themselves (banded), or a few running sums of all of
them (BLT). With it, released sums can be told from their noise in part, so it is as secret as the noise itself:

    simulation   w follows from the seed and the row; the memory lies in checkpoints
    release      w is the system's; the memory is written, for its owner's eyes alone, before a row is used

Guarantee: no row is for two sums. A row that was charged and whose sum was lost is never used again: the run goes on
with the next one, and pays for both.

Shapes: P flat length, M memory.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.errors import InputError, ensure
from sottovoce.flat.layout import Layout
from sottovoce.privacy.secret_files import written_secretly
from sottovoce.privacy.strategies import Banded, Blt, Strategy, column_of

MEMORY = "noise-memory.npy"
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements at once: few enough to stay in the cache
_ROWS_OF_INVERSE = 4096  # behind which nothing of it is left


def memory_rows(strategy: Strategy) -> int:
    """M: how many vectors of the model's size later rows need."""
    return len(strategy.column) - 1 if isinstance(strategy, Banded) else len(strategy.decays)


@lru_cache(maxsize=16)
def widening(strategy: Strategy) -> float:
    """The standard deviation of y, a row far from the first, where w has 1: the length of C⁻¹'s first column."""
    column = column_of(strategy, _ROWS_OF_INVERSE)
    inverse = np.zeros_like(column)
    inverse[0] = 1.0
    for row in range(1, len(column)):
        inverse[row] = -np.dot(column[1 : row + 1], inverse[row - 1 :: -1])
    return float(np.linalg.norm(inverse))


@final
class CorrelatedNoise:
    """The noise of one run. `draw` gives w of a row, independent of all others, and `rows` counts those made.

    With a `vault`, a folder, the memory is written there before a row is given out, and only its owner can read it.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        layout: Layout,
        draw: Callable[[int], Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        vault: Path | None = None,
    ) -> None:
        self._strategy, self._layout, self._draw, self._vault = strategy, layout, draw, vault
        self._memory_MP = layout.zeros(memory_rows(strategy), device=device, dtype=dtype)
        self.rows = 0
        if vault is not None:
            self._open(vault)

    def go_on(self, rows: int) -> None:
        """Be ready for row `rows`, of which all before are charged. Those that nobody has made are made and forgotten.

        A release can make up for one, which it was killed over before it was written; if more are missing, what earlier
        sums were noised with is lost, and no later noise can be correlated with it.
        """
        missing = rows - self.rows
        if self._vault is not None and not 0 <= missing <= 1:
            raise InputError(
                f"{self._vault / MEMORY} knows {self.rows} rows of noise, the ledger has charged {rows}: they do not "
                "belong together, or one of them was lost or rolled back; begin another run"
            )
        ensure(missing >= 0, f"row {rows} of noise after row {self.rows - 1}: it would be for two sums")
        for row in range(self.rows, rows):
            self.row(row)

    def row(self, row: int) -> Tensor:
        """y of `row` [P], which must be the next one."""
        ensure(row == self.rows, f"row {row} of noise: the next one is {self.rows}, and none is for two sums")
        noise_P = self._draw(row)
        ensure(noise_P.dtype == self._memory_MP.dtype, f"{noise_P.dtype} draws for {self._memory_MP.dtype} noise")
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
        ensure(self._vault is None, "the memory of a release lies in no checkpoint")
        if memory_MP.shape != self._memory_MP.shape:
            raise InputError("the checkpoint's noise is another mechanism's: expected that of the same recipe")
        self._memory_MP.copy_(memory_MP)
        self.rows = rows

    # A release's lies in its vault.

    def _open(self, vault: Path) -> None:
        path = vault / MEMORY
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

    def _write(self, vault: Path) -> None:
        with written_secretly(vault / MEMORY) as file:
            np.save(file, np.int64(self.rows), allow_pickle=False)
            np.save(file, self._memory_MP.cpu().numpy(), allow_pickle=False)
