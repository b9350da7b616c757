"""What a round leaves behind that no accountant has counted. It goes into a simulation's diagnostics and nowhere else.

Shapes: N clients, H layers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sottovoce.privacy.clipping import ClipStats, summarise
from sottovoce.privacy.plan import Plan

if TYPE_CHECKING:
    from sottovoce.federated.engines.engine import Trained


@dataclass
class Private:
    """By-products of users' data: for diagnostics of simulations only."""

    cohort: int = 0
    stats: list[ClipStats] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    audio_seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    signal_H: Tensor | None = None

    def add(self, stats: ClipStats, trained: "Trained") -> None:
        self.stats.append(stats)
        self.losses.append(trained.losses)
        self.audio_seconds += trained.audio_seconds
        for client in trained.figures:
            self.left_out.update(client.left_out)

    def on_host(self) -> "Private":
        """The same in few tensors off the device, to be sent to another process. Waits for the device."""
        losses = [torch.cat([loss.reshape(-1) for loss in self.losses]).cpu()] if self.losses else []
        return replace(self, stats=[_joined(self.stats)] if self.stats else [], losses=losses)

    def as_json(self, plan: Plan) -> Mapping[str, object]:
        """In numbers. Waits for the device."""
        layers = plan.clipper.layers
        summary = summarise(self.stats, layers)
        losses = torch.cat([loss.reshape(-1) for loss in self.losses]).cpu() if self.losses else torch.zeros(0)
        finite = losses[losses.isfinite()]
        assert self.signal_H is not None
        noise = [plan.noise_std_sum * dimension**0.5 for dimension in layers.dimensions]
        return {
            "cohort": self.cohort,
            "dropped": dict(self.dropped),
            "utterances_left_out": {reason: count for reason, count in self.left_out.items() if count},
            "loss": float(finite.mean()) if len(finite) else None,
            **summary,
            "signal_to_noise": {
                name: signal / n if n else None
                for name, signal, n in zip(layers.names, self.signal_H.tolist(), noise, strict=True)
            },
        }


def merged(parts: Sequence[Private]) -> Private:
    """The figures of several processes, each of which had a part of one cohort and knew its size."""
    return replace(
        parts[0],
        stats=[stats for part in parts for stats in part.stats],
        losses=[losses for part in parts for losses in part.losses],
        audio_seconds=math.fsum(part.audio_seconds for part in parts),
        dropped=sum((part.dropped for part in parts), Counter[str]()),
        left_out=sum((part.left_out for part in parts), Counter[str]()),
    )


def _joined(stats: Sequence[ClipStats]) -> ClipStats:
    """The same clients in one record, on the host."""

    def column_N(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()

    def rows_NH(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]).cpu()

    return ClipStats(
        norm=column_N([one.norm for one in stats]),
        layer_norms=rows_NH([one.layer_norms for one in stats]),
        layer_norms_after=rows_NH([one.layer_norms_after for one in stats]),
        clipped=column_N([one.clipped for one in stats]),
        within=column_N([one.within for one in stats]),
        non_finite=column_N([one.non_finite for one in stats]),
    )
