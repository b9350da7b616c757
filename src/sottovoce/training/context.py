"""Where a run lies, computes and reports to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sottovoce.data.store import PackingProgress
from sottovoce.training.keeper import Report, Say


@dataclass(frozen=True)
class Surroundings:
    """Where a run lies, computes and reports to; nothing here changes its result.

    `stand_in`: people and noise are not the recipe's (`--smoke`), so that nothing is said of what they would promise.
    `sign`: where the private key lies that ledgers are signed with.
    """

    runs: Path
    stores: Path
    device: torch.device
    on_prepare: Callable[[PackingProgress], None] = lambda _: None
    on_report: Callable[[Report], None] = lambda _: None
    on_stage: Callable[[str], None] = lambda _: None
    say: Say = lambda _: None
    stand_in: bool = False
    sign: Path | None = None

    def silent(self, device: torch.device) -> "Surroundings":
        """For another process than the first."""
        return Surroundings(self.runs, self.stores, device)
