"""How far what was seen goes in each canary's direction: what the best observer would add up.

    release t: x_t + z·C·y_t, y = M⁻¹w     M is public: applied to all releases, it leaves independent noise
    a canary of direction d in rounds J    leaves d·h there, h = M·1_J, for which one asks by ⟨h, M·releases⟩

So a score is ⟨d, Σ_t weight_t·release_t⟩ with weights Mᵀh, which all canaries of a group have in common: releases are
added up for each group as they come, and directions are looked at once, at the end. With independent noise M = I, all
canaries are one group, and releases are added up as they are.

Shapes: P flat length, N canaries, G groups that have a turn, T rounds, H tensors.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.auditing.canaries import Canaries
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.strategies import first_column

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class MatchedFilter:
    """For canaries that are the users `first`, `first` + 1, … of `plan`, and point as `signs_T` says.

    Groups that have no turn in so few rounds are left out; canaries of these (`has_turn_N`) have nothing to tell.
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
    def has_turn_N(self) -> NDArray[np.bool_]:
        return self.groups_N < len(self._turns_GT)

    @cached_property
    def weights_GT(self) -> Floats:
        """What each release counts, once it is turned as canaries are; so that noise is as strong in all groups."""
        column, signs_T = self._column, self.signs_T
        left_GT = _shifted(self._turns_GT * signs_T, column)  # M·1_J
        back_GT = _shifted(left_GT[:, ::-1], column)[:, ::-1]  # Mᵀ: M with time reversed
        lengths_G = np.linalg.norm(left_GT, axis=1)
        found: Floats = back_GT * signs_T * (lengths_G.max() / lengths_G)[:, None]
        return found

    @cached_property
    def expected_GG(self) -> Floats:
        """What one who is in, of the group in a column, adds along its own direction to what that of a row sees."""
        sampler = self.plan.sampler
        rate = sampler.sampling_rate if isinstance(sampler, CyclicSampler) else self.plan.sampling_rate
        found: Floats = rate * self.weights_GT @ self._turns_GT.T
        return found

    @cached_property
    def _turns_GT(self) -> Floats:
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
    """How far what its group has seen goes in each canary's direction, tensor by tensor [N, H]; 0 without a turn."""
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
    expected_GG, groups_N = observer.expected_GG, observer.groups_N
    total_GP = canaries.plan.layout.zeros(len(expected_GG), device=canaries.device, dtype=torch.float64)
    for which, directions_NP in canaries.in_chunks(range(canaries.count)):
        members_GN = (groups_N[which] == np.arange(len(expected_GG))[:, None]) & canaries.is_in[which]
        total_GP += torch.from_numpy(members_GN).to(directions_NP) @ directions_NP
    seen_GP = torch.from_numpy(expected_GG).to(total_GP) @ total_GP
    found = canary_scores(canaries, seen_GP, groups_N)
    own_N = canaries.is_in & observer.has_turn_N
    found[own_N] -= np.outer(expected_GG.diagonal()[groups_N[own_N]], np.square(canaries.shares_H))
    return found
