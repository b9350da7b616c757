"""Lists of integers of unequal length, one after another in a single array: who belongs to whom, at 16 bytes a head."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Groups:
    """Group `i` is `members[offsets[i]:offsets[i + 1]]`.

    >>> groups = Groups(members=np.array([7, 8, 9]), offsets=np.array([0, 1, 3]))
    >>> groups[1].tolist(), groups.sizes.tolist()
    ([8, 9], [1, 2])
    """

    members: Integers
    offsets: Integers

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Integers:
        return self.members[self.offsets[index] : self.offsets[index + 1]]

    @property
    def sizes(self) -> Integers:
        return np.diff(self.offsets)

    def take(self, indices: Integers) -> "Groups":
        """The groups at `indices`, in that order."""
        starts, stops = self.offsets[indices], self.offsets[indices + 1]
        return Groups(members=self.members[spans(starts, stops)], offsets=offsets_of(stops - starts))

    def totals(self, amounts: Integers) -> Integers:
        """The sum of `amounts` (one per entry of `members`) over each group."""
        running = offsets_of(amounts)
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    def expand(self, inner: "Groups") -> "Groups":
        """Members are indices of `inner` groups; put those groups' members in their place."""
        taken = inner.take(self.members)
        return Groups(members=taken.members, offsets=taken.offsets[self.offsets])


def group_by(labels: Integers, *, count: int) -> Groups:
    """The positions of each label 0 … count - 1, in ascending order."""
    return Groups(
        members=np.argsort(labels, kind="stable").astype(np.int64),
        offsets=offsets_of(np.bincount(labels, minlength=count).astype(np.int64)),
    )


def offsets_of(sizes: Integers) -> Integers:
    """Where each group starts, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def spans(starts: Integers, stops: Integers) -> Integers:
    """All integers of the ranges `starts[i]:stops[i]`, one range after another.

    >>> spans(np.array([5, 0]), np.array([7, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(stops - starts)
    return np.repeat(starts - offsets[:-1], stops - starts) + np.arange(offsets[-1], dtype=np.int64)
