"""The speakers of a store, and which of them train the seed model.

A speaker is whoever has one key: the same name in two splits is one person, who must never end up in two clients, nor
in the seed and the federation part at once. Everything here is decided by keys with integer arithmetic, so it comes
out the same on every machine and does not depend on where in the store somebody lies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.seeds import keyed_order
from sottovoce.users.groups import Groups, Integers, offsets_of
from sottovoce.users.rules import SeedPart, exactly


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
        return Speakers(
            keys=self.keys[indices],
            rows=self.rows.take(indices),
            samples=self.samples[indices],
            utterances=self.utterances[indices],
        )


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
    return Speakers(
        keys=distinct,
        rows=groups,
        samples=groups.totals(user_samples(store, groups.members)),
        utterances=groups.totals(user_counts(store, groups.members)),
    )


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
    if rule.fraction is not None:
        size = math.floor(exactly(rule.fraction) * len(speakers))
        wish = f"fraction={rule.fraction}"
    else:
        amounts = speakers.samples if rule.most_utterances_share is None else speakers.utterances
        # Most first; a stable sort leaves equals in the order of the queue.
        queue = queue[np.argsort(-amounts[queue], kind="stable")]
        by_audio = rule.most_data_share is not None
        share = rule.most_data_share if by_audio else rule.most_utterances_share
        assert share is not None
        needed = math.ceil(exactly(share) * int(amounts.sum()))
        size = int(np.searchsorted(np.cumsum(amounts[queue]), needed)) + 1
        wish = f"{'most_data_share' if by_audio else 'most_utterances_share'}={share}"
    if not 0 < size < len(speakers):
        side = "seed" if size == 0 else "federation"
        raise InputError(f"seed_part.{wish}: of {len(speakers)} speakers this leaves none for the {side} part")
    return speakers.take(np.sort(queue[:size])), speakers.take(np.sort(queue[size:]))
