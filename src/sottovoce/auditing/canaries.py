"""Canaries: users whose update is a random direction of their own, longer than the clip bound lets it be.

    people │ canaries      one population: drawn by the plan's sampler, weighted, clipped, summed and noised alike

Each flips a coin, known to the audit, whether it is among the users at all; those left out are who the others are told
apart from. A direction spreads over all tensors as their bounds allow: every tensor's noise has to hide a part of it.
Within a tensor it is a random sign for each number, so that it takes a bit to keep; where even these are too many, they
are drawn from the audit's seed again.

Shapes: P flat length, N canaries, H tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from sottovoce.errors import InputError
from sottovoce.federated.engines import Dropped, Engine, Together, Trained
from sottovoce.federated.weighting import ClientFigures
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.plan import Plan
from sottovoce.seeds import stream

LOUD = 100.0  # times the bound: what is not clipped shows, and what is weighted by data has data for so many
FEWEST, MOST = 20, 100_000
_KEPT = {"cpu": 2**28, "cuda": 2**31}  # bytes of signs that are kept rather than drawn again
_AT_ONCE = 2**26  # bytes of directions that are there at once


@final
@dataclass(frozen=True, eq=False)
class Canaries:
    """`count` directions for updates of `plan`; which of them are in is decided by `seed`, by fair coins.

    They are made on `device`, and are the same on each.
    """

    plan: Plan
    count: int
    seed: int
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.count < FEWEST:
            raise InputError(f"canaries={self.count}: expected {FEWEST} or more")

    @cached_property
    def is_in(self) -> NDArray[np.bool_]:
        return stream(self.seed, "audit", "coins").random(self.count) < 0.5

    @cached_property
    def shares_H(self) -> tuple[float, ...]:
        """How long a direction is in each tensor; their squares sum to 1."""
        layers, layout = self.plan.clipper.layers, self.plan.layout
        if self.plan.settings.share is Share.GLOBAL or math.isinf(self.plan.clip_bound):
            return (1 / math.sqrt(len(layout.names)),) * len(layout.names)
        return tuple(
            self.plan.clipper.layer_bounds[layer] / self.plan.clip_bound * math.sqrt(size / layers.dimensions[layer])
            for layer, size in zip(layers.of_parameter, layout.sizes, strict=True)
        )

    def effective_dimension(self, tensor: int | None = None) -> float:
        """How many independent numbers of noise a score sums up: of one tensor, or of all."""
        sizes = self.plan.layout.sizes
        if tensor is not None:
            return float(sizes[tensor])
        return 1 / math.fsum(share**4 / size for share, size in zip(self.shares_H, sizes, strict=True))

    def directions(self, which: Sequence[int]) -> Tensor:
        """Of length 1 [N, P]."""
        size = self.plan.layout.flat_size
        if not which:
            return torch.zeros(0, size, device=self.device)
        bits = torch.stack([self._drawn(canary) for canary in which])
        return embedding(bits.int(), self._signs_of_byte).flatten(1)[:, :size].mul_(self._scales_P)

    def in_chunks(self, which: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Their directions, some at a time."""
        size = max(1, _AT_ONCE // (4 * self.plan.layout.flat_size))
        for first in range(0, len(which), size):
            some = which[first : first + size]
            yield some, self.directions(some)

    @property
    def _bytes(self) -> int:
        return -(-self.plan.layout.flat_size // 8)

    @cached_property
    def _scales_P(self) -> Tensor:
        """What each sign counts; nothing in the padding."""
        scales_P = self.plan.layout.zeros(device=self.device)
        for part, share in zip(self.plan.layout.parts(scales_P), self.shares_H, strict=True):
            part.fill_(share / math.sqrt(part.numel()))
        return scales_P

    @cached_property
    def _signs_of_byte(self) -> Tensor:
        """The eight signs that each byte stands for."""
        signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        return torch.from_numpy(signs).to(self.device).float().mul_(2).sub_(1)

    @cached_property
    def _kept(self) -> dict[int, Tensor]:
        return {}

    def _drawn(self, canary: int) -> Tensor:
        bits = self._kept.get(canary)
        if bits is None:
            drawn = bytearray(stream(self.seed, "audit", "signs", int(canary)).bytes(self._bytes))
            bits = torch.frombuffer(drawn, dtype=torch.uint8).to(self.device)
            if self.count * self._bytes <= _KEPT.get(torch.device(self.device).type, 0):
                self._kept[canary] = bits
        return bits


@final
class CanaryEngine(Engine):
    """The canaries as clients: nothing is trained, their updates are known. One that is left out sends nothing.

    `signs`: whether a canary turns its direction round in every second of its rounds. Then what is the same in all
    rounds, the way a model learns or noise that is used again, hides nothing of it. Where noise is correlated and rows
    of one user meet, it does not: there the same update in all rounds tells most.
    """

    def __init__(self, canaries: Canaries, *, signs: bool) -> None:
        self._canaries = canaries
        settings = canaries.plan.settings
        mechanism = settings.mechanism
        self._signs = signs and not (mechanism is not None and mechanism.rows_overlap)
        self._cycle = 1 if mechanism is None else mechanism.cycle
        bound = 1.0 if math.isinf(settings.clip_bound) else settings.clip_bound
        self._length = LOUD * bound
        much = LOUD * (settings.weight_cap or 1.0)
        self.drawn: list[int] = []  # in the last round, of those that are in
        self._figures = ClientFigures(utterances=math.ceil(much), seconds=much, loss=0.0, wer=0.0)

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, turns: Sequence[int] | None = None
    ) -> Iterator[Trained]:
        self.drawn = here = [canary for canary in cohort if self._canaries.is_in[canary]]
        for some, directions_NP in self._canaries.in_chunks(here):
            updates_NP = directions_NP * (self._length * self.sign(step))
            losses_N = torch.full((len(some),), torch.nan, device=updates_NP.device)
            yield Trained(
                updates_NP.to(server_P),
                tuple(some),
                losses_N,
                (self._figures,) * len(some),
                audio_seconds=0.0,
            )

    def sign(self, step: int) -> float:
        """Which way canaries point in round `step`."""
        return -1.0 if self._signs and step // self._cycle % 2 else 1.0


@final
class JoinedEngine(Engine):
    """Several engines as one: the first has the first clients of the population, the next those behind them."""

    def __init__(self, engines: Sequence[tuple[Engine, int]]) -> None:
        self._engines = [engine for engine, _ in engines]
        self._firsts = list(accumulate((count for _, count in engines), initial=0))

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, turns: Sequence[int] | None = None
    ) -> Iterator[Trained | Together | Dropped]:
        for engine, first, end in zip(self._engines, self._firsts[:-1], self._firsts[1:], strict=True):
            places = [place for place, client in enumerate(cohort) if first <= client < end]
            own = [cohort[place] - first for place in places]
            told = {} if turns is None else {"turns": [turns[place] for place in places]}
            yield from engine.train(server_P, own, step=step, **told)
            self.waited = engine.waited if engine is self._engines[0] else self.waited

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
