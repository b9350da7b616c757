"""The speakers of a store, and which of them train the seed model.

A speaker is one key: the same name in two splits is one person, who must never be in two clients, nor in the seed and
the federation part at once. Everything is decided by keys with integer arithmetic, so it is the same on every machine
and does not depend on rows of the store.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import keyed_order

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
        return Groups(members=self.members[expand_ranges(starts, stops)], offsets=offsets_of(stops - starts))

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


def expand_ranges(starts: Integers, stops: Integers) -> Integers:
    """All integers of the ranges `starts[i]:stops[i]`, one range after another.

    >>> expand_ranges(np.array([5, 0]), np.array([7, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(stops - starts)
    return np.repeat(starts - offsets[:-1], stops - starts) + np.arange(offsets[-1], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class SeedPart:
    """Which speakers are set aside to train the seed model; exactly one of these is given.

    `fraction`: that share of the speakers, at random (CV-en-train-10 is 0.1), rounded down as in the paper.
    `most_data_share`: the fewest speakers who together hold that share of the audio.
    `most_utterances_share`: the fewest speakers who together hold that share of the utterances (0.5 in Gao et al., who
    count "samples").

    Guarantee: none for those in it, nor for which side somebody is on; both are decided, and public, before the run.
    """

    fraction: float | None = None
    most_data_share: float | None = None
    most_utterances_share: float | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise InputError(
                f"seed_part: expected exactly one of {', '.join(vars(self))}, found {' and '.join(given) or 'none'}"
            )
        name, value = self.rule
        if not 0 < value < 1:
            raise InputError(f"seed_part.{name}={value}: expected a number between 0 and 1, both excluded")

    @property
    def rule(self) -> tuple[str, float]:
        """The one that is given, by its name."""
        return next((name, value) for name, value in vars(self).items() if value is not None)


def exact_fraction(number: float) -> Fraction:
    """The number as it was written: 0.29 of 100 speakers is 29 of them, and not 28.999… rounded down."""
    return Fraction(str(number))


class Named(Protocol):
    @property
    def name(self) -> str: ...


class UserIndex(Protocol):
    """What a population needs to know of a store: whose utterances lie where, and how long they are."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def splits(self) -> Mapping[str, range]: ...
    @property
    def user_utterances(self) -> Integers: ...
    @property
    def audio_offsets(self) -> Integers: ...
    @property
    def user_keys(self) -> NDArray[np.uint64]: ...
    def user(self, row: int, /) -> Named: ...


@dataclass(frozen=True, eq=False, slots=True)
class Speakers:
    """Distinct speakers in ascending order of their keys, with their rows in the store and how much they said."""

    keys: NDArray[np.uint64]
    rows: Groups
    samples: Integers
    utterances: Integers

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: Integers) -> "Speakers":
        return Speakers(self.keys[indices], self.rows.take(indices), self.samples[indices], self.utterances[indices])


def select_speakers(store: UserIndex, splits: tuple[str, ...]) -> Speakers:
    """Everybody in `splits`."""
    for split in splits:
        if split not in store.splits:
            raise InputError(f"split={split}: store {store.name} has {', '.join(store.splits) or 'no splits'}")
    rows = np.concatenate([np.arange(r.start, r.stop, dtype=np.int64) for r in (store.splits[s] for s in splits)])
    if len(rows) == 0:
        raise InputError(f"split={','.join(splits)}: no speakers there in store {store.name}")
    keys = np.asarray(store.user_keys)[rows]
    order = np.argsort(keys, kind="stable")
    distinct, sizes = np.unique(keys, return_counts=True)
    groups = Groups(members=rows[order], offsets=offsets_of(sizes.astype(np.int64)))
    samples, counts = user_samples(store, groups.members), user_counts(store, groups.members)
    return Speakers(distinct, groups, groups.totals(samples), groups.totals(counts))


def user_samples(store: UserIndex, rows: Integers) -> Integers:
    """How many samples of audio each of the user `rows` has."""
    starts, stops = store.user_utterances[rows], store.user_utterances[rows + 1]
    return np.asarray(store.audio_offsets[stops] - store.audio_offsets[starts], dtype=np.int64)


def user_counts(store: UserIndex, rows: Integers) -> Integers:
    """How many utterances each of the user `rows` has."""
    return np.asarray(store.user_utterances[rows + 1] - store.user_utterances[rows], dtype=np.int64)


def split_off_seed(speakers: Speakers, *, rule: SeedPart, seed: int) -> tuple[Speakers, Speakers]:
    """The seed and the federation part: disjoint, and nobody is lost.

    Under `fraction` everybody has a place in a queue by their own key and the first so many are taken, so when
    somebody leaves the corpus at most one other person changes sides (whoever stood next to the cut). The other rules
    look at amounts. So the parts are fixed, and public, before a run; its guarantee begins with the list of clients.
    """
    queue = keyed_order(speakers.keys, seed, "users", "seed part")
    name, value = rule.rule
    amounts = speakers.utterances if name == "most_utterances_share" else speakers.samples
    if name == "fraction":
        size = math.floor(exact_fraction(value) * len(speakers))
    else:  # most first; a stable sort leaves equals in the order of the queue
        queue = queue[np.argsort(-amounts[queue], kind="stable")]
        needed = math.ceil(exact_fraction(value) * int(amounts.sum()))
        size = int(np.searchsorted(np.cumsum(amounts[queue]), needed)) + 1
    if not 0 < size < len(speakers):
        side = "seed" if size == 0 else "federation"
        raise InputError(f"seed_part.{name}={value}: of {len(speakers)} speakers this leaves none for the {side} part")
    return speakers.take(np.sort(queue[:size])), speakers.take(np.sort(queue[size:]))
