"""Canaries: users whose update is a random direction of their own, longer than the clip bound lets it be.

    people │ canaries      one population: drawn by the plan's sampler, weighted, clipped, summed and noised alike

A fair coin, known to the audit, decides whether each is among the users at all; those left out are the control group.
A direction spreads over all tensors as their bounds allow: every tensor's noise has to hide a part of it. Within a
tensor it is a random sign for each number, one bit; where even these are too many to keep, they are drawn again.

A score is how far the releases go in a canary's direction, added up as the best observer would:

    release t: x_t + z·C·y_t, y = M⁻¹w     M is public: applied to all releases, it leaves independent noise
    a canary of direction d in rounds J    leaves d·h there, h = M·1_J, which ⟨h, M·releases⟩ finds

So a score is ⟨d, Σ_t weight_t·release_t⟩ with weights Mᵀh, the same for all canaries of a group: releases are added up
for each group as they come, and directions are used once, at the end. With independent noise M = I and there is one
group.

Where rounds train some of the tensors (`Layout.held`), a canary's update lies in those, and is as long: its direction
has one length in a tensor in each such round, and releases are added up with these lengths.

Shapes: P flat length, N canaries, G groups that take part, T rounds, H tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.federated.engines import Engine, Trained
from sottovoce.federated.weighting import ClientFigures
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.strategies import first_column

Floats = NDArray[np.float64]

UPDATE_SCALE = 100.0  # times the bound: what is not clipped shows, and what is weighted by data has data for so many
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
        """How long a direction is in each tensor, over all rounds; their squares sum to 1."""
        if not self.plan.layout.held:
            return self.shares_at(0)
        turns = range(len(self.plan.layout.held))
        lengths_TH = np.array([self.shares_at(step) for step in turns])
        return tuple(np.sqrt(np.square(lengths_TH).mean(axis=0)).tolist())

    def shares_at(self, step: int) -> tuple[float, ...]:
        """The same in round `step`: none in what it holds."""
        clipper, layout, held = self.plan.clipper_at(step), self.plan.layout, self.plan.layout.held_at(step)
        if self.plan.settings.share is Share.GLOBAL or math.isinf(self.plan.clip_bound):
            one = 1 / math.sqrt(len(layout.names) - len(held))
            return tuple(0.0 if name in held else one for name in layout.names)
        layers = clipper.layers
        return tuple(
            0.0
            if name in held
            else clipper.layer_bounds[layer] / self.plan.clip_bound * math.sqrt(size / layers.dimensions[layer])
            for name, layer, size in zip(layout.names, layers.of_parameter, layout.sizes, strict=True)
        )

    def gains_at(self, step: int) -> Floats:
        """How much longer a direction is in each tensor [H] in round `step` than over all rounds."""
        own_H, over_all_H = np.array(self.shares_at(step)), np.array(self.shares_H)
        found: Floats = np.divide(own_H, over_all_H, out=np.zeros_like(own_H), where=over_all_H > 0)
        return found

    def effective_dimension(self, tensor: int | None = None, *, step: int | None = None) -> float:
        """How many independent numbers of noise a score sums up: of one tensor, or of all; of one round, or of all."""
        sizes = self.plan.layout.sizes
        if tensor is not None:
            return float(sizes[tensor])
        shares_H = self.shares_H if step is None else self.shares_at(step)
        return 1 / math.fsum(share**4 / size for share, size in zip(shares_H, sizes, strict=True))

    def directions(self, which: Sequence[int], *, step: int | None = None) -> Tensor:
        """Of length 1 [N, P]: those of one round, or over all of them."""
        size = self.plan.layout.flat_size
        if not which:
            return torch.zeros(0, size, device=self.device)
        bits = torch.stack([self._drawn(canary) for canary in which])
        return embedding(bits.int(), self._signs_of_byte).flatten(1)[:, :size].mul_(self._scales(step))

    def in_chunks(self, which: Sequence[int], *, step: int | None = None) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Their directions, some at a time."""
        size = max(1, _AT_ONCE // (4 * self.plan.layout.flat_size))
        for first in range(0, len(which), size):
            some = which[first : first + size]
            yield some, self.directions(some, step=step)

    @property
    def _bytes(self) -> int:
        return -(-self.plan.layout.flat_size // 8)

    def _scales(self, step: int | None) -> Tensor:
        """What each sign counts [P]; nothing in the padding."""
        layout = self.plan.layout
        shares_H = self.shares_H if step is None else self.shares_at(step)
        if shares_H not in self._scales_kept:
            scales_P = layout.zeros(device=self.device)
            for part, share in zip(layout.parts(scales_P), shares_H, strict=True):
                part.fill_(share / math.sqrt(part.numel()))
            self._scales_kept[shares_H] = scales_P
        return self._scales_kept[shares_H]

    @cached_property
    def _scales_kept(self) -> dict[tuple[float, ...], Tensor]:
        return {}

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

    `signs`: whether a canary's direction changes its sign in every second of its rounds. Then what is the same in all
    rounds, the way a model learns or noise that is used again, hides nothing of it. Where noise is correlated and rows
    of one user meet, it does not: there the same update in all rounds reveals most.
    """

    def __init__(self, canaries: Canaries, *, signs: bool) -> None:
        self._canaries = canaries
        settings = canaries.plan.settings
        mechanism = settings.mechanism
        self._signs = signs and not (mechanism is not None and mechanism.rows_overlap)
        self._cycle = 1 if mechanism is None else mechanism.cycle
        bound = 1.0 if math.isinf(settings.clip_bound) else settings.clip_bound
        self._length = UPDATE_SCALE * bound
        much = UPDATE_SCALE * (settings.weight_cap or 1.0)
        self.drawn: list[int] = []  # in the last round, of those that are in
        self._figures = ClientFigures(utterances=math.ceil(much), seconds=much, loss=0.0, wer=0.0)

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained]:
        self.drawn = here = [canary for canary in cohort if self._canaries.is_in[canary]]
        for some, directions_NP in self._canaries.in_chunks(here, step=step):
            updates_NP = directions_NP * (self._length * self.sign(step))
            losses_N = torch.full((len(some),), torch.nan, device=updates_NP.device)
            figures = (self._figures,) * len(some)
            yield Trained(updates_NP.to(server_P), tuple(some), losses_N, figures, audio_seconds=0.0)

    def sign(self, step: int) -> float:
        """Which way canaries point in round `step`."""
        return -1.0 if self._signs and step // self._cycle % 2 else 1.0


@final
@dataclass(frozen=True, eq=False)
class MatchedFilter:
    """For canaries that are the users `first`, `first` + 1, … of `plan`, and point as `signs_T` says.

    Groups without a round are left out; canaries of these (`takes_part_N`) have no score.
    """

    plan: Plan
    first: int
    signs_T: Floats

    @cached_property
    def groups_N(self) -> NDArray[np.int64]:
        """Which group each user from the first canary on is of: that has rounds g, g + cycle, …"""
        size = self.plan.settings.population_size
        found = np.zeros(size, dtype=np.int64)
        if isinstance(self.plan.sampler, CyclicSampler):
            for group, members in enumerate(self.plan.sampler.groups(size)):
                found[members] = group
        return found[self.first :]

    @cached_property
    def takes_part_N(self) -> NDArray[np.bool_]:
        return self.groups_N < len(self._rounds_GT)

    @cached_property
    def weights_GT(self) -> Floats:
        """What each release counts, with the canaries' sign; so that noise is as strong in all groups."""
        column, signs_T = self._column, self.signs_T
        left_GT = _shifted(self._rounds_GT * signs_T, column)  # M·1_J
        back_GT = _shifted(left_GT[:, ::-1], column)[:, ::-1]  # Mᵀ: M with time reversed
        lengths_G = np.linalg.norm(left_GT, axis=1)
        found: Floats = back_GT * signs_T * (lengths_G.max() / lengths_G)[:, None]
        return found

    def expected(self, gains_T: Floats | float = 1.0) -> Floats:
        """What one who is in, of the group in a column, adds along its own direction to what that of a row sees [G, G].

        In a tensor in which directions are so much longer in each round.
        """
        sampler = self.plan.sampler
        rate = sampler.sampling_rate if isinstance(sampler, CyclicSampler) else self.plan.sampling_rate
        found: Floats = rate * (self.weights_GT * np.square(gains_T)) @ self._rounds_GT.T
        return found

    @cached_property
    def _rounds_GT(self) -> Floats:
        """1 in the rounds of each group."""
        rounds, sampler = len(self.signs_T), self.plan.sampler
        cycle = sampler.cycle if isinstance(sampler, CyclicSampler) else 1
        groups_G = np.arange(min(cycle, rounds))
        return np.where(np.arange(rounds) % cycle == groups_G[:, None], 1.0, 0.0)

    @property
    def _column(self) -> Floats:
        """Of M."""
        mechanism = self.plan.settings.mechanism
        return np.ones(1) if mechanism is None else first_column(mechanism.strategy, len(self.signs_T))


def _shifted(rows_GT: Floats, column: Floats) -> Floats:
    """Σ_s column_s·(each row, s rounds later): the Toeplitz matrix of `column` applied to it."""
    found = np.zeros_like(rows_GT)
    for later in np.flatnonzero(column):
        found[:, later:] += column[later] * rows_GT[:, : rows_GT.shape[1] - later]
    return found


def canary_scores(canaries: Canaries, seen_GP: Tensor, groups_N: NDArray[np.int64]) -> Floats:
    """How far what its group has seen goes in each canary's direction, tensor by tensor [N, H]; 0 without a round."""
    layout = canaries.plan.layout
    parts = layout.parts(seen_GP.float())
    found = np.zeros((canaries.count, len(parts)))
    for which, directions_NP in canaries.in_chunks(range(canaries.count)):
        groups = groups_N[which]
        for group in set(groups.tolist()) & set(range(len(seen_GP))):
            rows = np.flatnonzero(groups == group)
            own_NP = directions_NP if len(rows) == len(groups) else directions_NP[torch.from_numpy(rows)]
            scores = [own @ part[group] for own, part in zip(layout.parts(own_NP), parts, strict=True)]
            found[which[0] + rows] = torch.stack(scores, dim=1).double().cpu().numpy()
    return found


def others_in(canaries: Canaries, observer: MatchedFilter) -> Floats:
    """What the other canaries that are in add to a canary's scores on average [N, H]."""
    groups_N, layout = observer.groups_N, canaries.plan.layout
    gains_TH = np.array([canaries.gains_at(step) for step in range(len(observer.signs_T))])
    expected_HGG = np.array([observer.expected(gains_T) for gains_T in gains_TH.T])
    total_GP = layout.zeros(expected_HGG.shape[1], device=canaries.device, dtype=torch.float64)
    for which, directions_NP in canaries.in_chunks(range(canaries.count)):
        members_GN = (groups_N[which] == np.arange(len(total_GP))[:, None]) & canaries.is_in[which]
        total_GP += torch.from_numpy(members_GN).to(directions_NP) @ directions_NP
    for part, expected_GG in zip(layout.parts(total_GP), expected_HGG, strict=True):
        part.copy_(torch.from_numpy(expected_GG).to(part) @ part)
    found = canary_scores(canaries, total_GP, groups_N)
    own_N = canaries.is_in & observer.takes_part_N
    diagonals_HG = expected_HGG.diagonal(axis1=1, axis2=2)
    found[own_N] -= (diagonals_HG[:, groups_N[own_N]] * np.square(canaries.shares_H)[:, None]).T
    return found
