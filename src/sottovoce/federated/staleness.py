"""Overlapping rounds: a cohort trains from the model that was current `staleness` steps before its own sum is added.

    server's steps    0     1     2     3     4         staleness 2
    cohort of step 4              ├─ trains ──┤         from the model before step 2

So a slow client has as many rounds more, and nobody waits. The cohort of a step is drawn by a coin of its own, and its
sum is released by itself, so that each release is the event that it is without staleness: a function of fewer of the
releases before it. docs/late-nodes.md has the argument.

Shapes: P flat length, N models.
"""

from collections import deque
from typing import final

import torch
from torch import Tensor

from sottovoce.base.errors import InputError, check_invariant


@final
class RecentModels:
    """The server's models before each of its last `staleness` steps, oldest first: fewer before so many were made."""

    def __init__(self, staleness: int) -> None:
        check_invariant(staleness > 0, f"staleness={staleness}: without it no model but the server's own is needed")
        self.staleness = staleness
        self._models = deque[Tensor](maxlen=staleness)

    def sent(self, server_P: Tensor) -> Tensor:
        """What the cohort of the next step trains from; `server_P` is the server's own, before that step."""
        return self._models[0] if self._models else server_P

    def keep(self, server_P: Tensor) -> None:
        """Keep a copy of the server's model before its step; of as many as are needed."""
        self._models.append(server_P.clone())

    def tensor(self) -> Tensor:
        """[N, P], for a checkpoint."""
        return torch.stack([*self._models])

    def restore(self, models_NP: Tensor, *, step: int, device: torch.device) -> None:
        """Go on before `step`."""
        expected = min(self.staleness, step)
        if models_NP.dim() != 2 or len(models_NP) != expected:
            raise InputError(f"the checkpoint has {len(models_NP)} earlier models, expected {expected}")
        self._models.clear()
        self._models.extend(models_NP.to(device).unbind())

    def models(self, *, step: int) -> dict[int, Tensor]:
        """Those that are kept before `step`, by the step that each was before."""
        return dict(enumerate(self._models, start=step - len(self._models)))
