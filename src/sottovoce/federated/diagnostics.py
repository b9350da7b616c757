"""What a round leaves behind that no accountant has counted. It goes into a simulation's diagnostics and nowhere else.

Everything is summed as it comes: a process holds, and hands over, as much for a million clients as for a few hundred.

Shapes: H layers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from sottovoce.federated.engines.engine import JointlyTrained, JointSum, Trained
from sottovoce.privacy.clipping import ClipStats, ClipSums, clip_sums, mean_and_deviation, summarise
from sottovoce.privacy.plan import Plan

S = TypeVar("S", Tensor, ClipSums)

MOST_WAITING = 256  # clients, or one stack more: summed together, because for each alone it would take a dozen kernels


@dataclass
class RoundDiagnostics:
    """By-products of users' data: for diagnostics of simulations only."""

    cohort: int = 0
    clipping: ClipSums | None = None
    loss: Tensor | None = None  # [3]: Σ and Σ of squares of clients' finite losses, and how many those are
    gradients: Tensor | None = None  # [3]: the same of gradient norms
    audio_seconds: float = 0.0
    waited_seconds: float = 0.0  # for data
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    signal_H: Tensor | None = None  # norms of the sum, before noise
    denominator: float = 1.0  # what makes a mean of the sum
    _waiting: list[tuple[ClipStats, Tensor, Tensor | None]] = field(default_factory=list, repr=False)

    def add(self, stats: ClipStats, trained: Trained) -> None:
        """Count `trained` in, without waiting for the device."""
        self._waiting.append((stats, trained.losses, trained.gradient_norms))
        self.audio_seconds += trained.audio_seconds
        for client in trained.figures:
            self.left_out.update(client.left_out)
        if sum(losses.numel() for _, losses, _ in self._waiting) >= MOST_WAITING:
            self.settle()

    def add_summed(self, summed: JointSum, trained: JointlyTrained) -> None:
        """The same for clients of whom no single update exists, nor its norms."""
        self.loss = _add(self.loss, _finite_sums(summed.losses_N))
        self.audio_seconds += trained.audio_seconds
        self.dropped.update(dropped.reason for dropped in summed.dropped)
        for client in trained.figures:
            self.left_out.update(client.left_out)

    def settle(self) -> None:
        """Sum what is waiting."""
        if not self._waiting:
            return
        clipping = clip_sums([stats for stats, _, _ in self._waiting])
        losses = torch.cat([losses.reshape(-1) for _, losses, _ in self._waiting])
        self.loss = _add(self.loss, _finite_sums(losses))
        if norms := [norms.reshape(-1) for _, _, norms in self._waiting if norms is not None]:
            self.gradients = _add(self.gradients, _finite_sums(torch.cat(norms)))
        self.clipping = _add(self.clipping, clipping)
        self._waiting = []

    def on_host(self) -> "RoundDiagnostics":
        """The same off the device, to be sent to another process. Waits for the device."""
        self.settle()
        return replace(
            self,
            clipping=None if self.clipping is None else self.clipping.on_host(),
            loss=None if self.loss is None else self.loss.cpu(),
            gradients=None if self.gradients is None else self.gradients.cpu(),
        )

    @property
    def diverged(self) -> int:
        """How many clients' updates were not finite. Waits for the device."""
        self.settle()
        return 0 if self.clipping is None else int(self.clipping.non_finite)

    def as_json(self, plan: Plan, *, step: int = 0) -> Mapping[str, object]:
        """In numbers, for round `step` of `plan`. Waits for the device."""
        self.settle()
        layers = plan.clipper_at(step).layers
        loss, _, finite = (0.0, 0.0, 0.0) if self.loss is None else self.loss.tolist()
        assert self.signal_H is not None
        noise = [plan.released_std_sum * dimension**0.5 for dimension in layers.dimensions]
        return {
            "cohort": self.cohort,
            "dropped": dict(self.dropped),
            "utterances_left_out": {reason: count for reason, count in self.left_out.items() if count},
            "loss": loss / finite if finite else None,
            **self._gradient_norms(),
            **summarise(self.clipping, layers),
            "pseudo_gradient_norm": float(torch.linalg.vector_norm(self.signal_H)) / self.denominator,
            "signal_to_noise": {
                name: signal / n if n else None
                for name, signal, n in zip(layers.names, self.signal_H.tolist(), noise, strict=True)
            },
        }

    def _gradient_norms(self) -> Mapping[str, object]:
        """Of the clients' local steps; nothing where no single client's gradient was computed."""
        if self.gradients is None or not (count := int(self.gradients[2])):
            return {}
        mean, deviation = mean_and_deviation(self.gradients[:2], count)
        return {"gradient_norm": float(mean), "gradient_norm_std": float(deviation)}


def _finite_sums(values: Tensor) -> Tensor:
    values = values.double()
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0)
    return torch.stack([values.sum(), values.square().sum(), finite.sum()])


def _add(one: S | None, other: S | None) -> S | None:
    """Their sum; None counts as nothing."""
    return other if one is None else one if other is None else one + other


def merge_diagnostics(parts: Sequence[RoundDiagnostics]) -> RoundDiagnostics:
    """The figures of several processes, each of which had a part of one cohort."""
    return replace(
        parts[0],
        cohort=sum(part.cohort for part in parts),
        clipping=reduce(_add, [part.clipping for part in parts]),
        loss=reduce(_add, [part.loss for part in parts]),
        gradients=reduce(_add, [part.gradients for part in parts]),
        audio_seconds=math.fsum(part.audio_seconds for part in parts),
        waited_seconds=max(part.waited_seconds for part in parts),
        dropped=sum((part.dropped for part in parts), Counter[str]()),
        left_out=sum((part.left_out for part in parts), Counter[str]()),
    )
