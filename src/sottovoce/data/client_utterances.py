"""Which utterances a client has: how speakers or utterances are grouped into clients, the cap and the hold-out.

Every speaker, or every utterance, is in exactly one client. Cap and hold-out depend on the client alone.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.seeds import keyed_group, keyed_order, name_key
from sottovoce.data.speakers import (
    Groups,
    Integers,
    Speakers,
    UserIndex,
    exact_fraction,
    expand_ranges,
    group_by,
    offsets_of,
)

PLACE_FACTOR = 0xD1342543DE82EF95
HELD_OUT_AT_LEAST = 2
HOLDOUT_NEEDS = 2 * HELD_OUT_AT_LEAST


def utterances_of(store: UserIndex, users: Groups) -> Groups:
    """Groups of user rows as groups of utterance rows."""
    starts, stops = store.user_utterances[users.members], store.user_utterances[users.members + 1]
    counts = offsets_of(np.asarray(stops - starts))
    return Groups(members=expand_ranges(np.asarray(starts), np.asarray(stops)), offsets=counts[users.offsets])


def find_owners(store: UserIndex, utterances: Integers) -> Integers:
    """The user rows that the utterances belong to."""
    return np.searchsorted(store.user_utterances, utterances, side="right").astype(np.int64) - 1


def utterance_keys(store: UserIndex, utterances: Integers) -> NDArray[np.uint64]:
    """A key per utterance, from its split, its speaker's key and its place among what the speaker has in that split."""
    users = find_owners(store, utterances)
    places = (utterances - store.user_utterances[users]).astype(np.uint64)
    # The split is in it because one speaker may be in two, with a first utterance in each.
    splits = sorted(store.splits, key=lambda split: store.splits[split].start)
    starts = np.array([store.splits[split].start for split in splits])
    salts = np.array([name_key(split) for split in splits], dtype=np.uint64)
    salt = salts[np.searchsorted(starts, users, side="right") - 1]
    # An odd factor spreads neighbouring places over all 64 bits; sums and products wrap around.
    return np.asarray(store.user_keys[users] + salt + places * np.uint64(PLACE_FACTOR), dtype=np.uint64)


def utterance_samples(store: UserIndex, utterances: Integers) -> Integers:
    return np.asarray(store.audio_offsets[utterances + 1] - store.audio_offsets[utterances], dtype=np.int64)


def cap_utterances(store: UserIndex, utterances: Groups, *, max_samples: int, seed: int) -> Groups:
    """A random choice of each client's utterances that lasts at most `max_samples`, in the order they came.

    Utterances are taken in a seeded order until the next would go over. Those that are too long on their own are
    passed over; where all of them are, the client keeps its shortest one, since every client has at least one.
    """
    rows, sizes = utterances.members, utterances.sizes
    samples = utterance_samples(store, rows)
    client_of = np.repeat(np.arange(len(utterances)), sizes)
    place = np.empty(len(rows), dtype=np.int64)
    place[keyed_order(utterance_keys(store, rows), seed, "users", "cap")] = np.arange(len(rows))
    # Within each client: those that fit in seeded order, then those that do not from the shortest on.
    order = np.lexsort((place, np.where(samples <= max_samples, 0, samples), client_of))
    running = np.cumsum(samples[order])
    firsts = utterances.offsets[:-1][sizes > 0]
    before = np.repeat(running[firsts] - samples[order][firsts], sizes[sizes > 0])
    taken = running - before <= max_samples
    taken[firsts] = True
    kept = np.zeros(len(rows), dtype=bool)
    kept[order[taken]] = True
    counts = np.bincount(client_of[kept], minlength=len(utterances)).astype(np.int64)
    return Groups(members=rows[kept], offsets=offsets_of(counts))


def holdout_size(count: int, *, holdout: float) -> int:
    """How many of a client's `count` utterances are held out: the share rounded down, but at least 2.

    A client with fewer than 4 utterances has no hold-out, or it would test on more than it learns from. It trains on
    all of them and is counted (`LeftOut.clients_without_holdout`); `federated.weighting` says what it weighs.
    """
    return max(HELD_OUT_AT_LEAST, math.floor(exact_fraction(holdout) * count)) if count >= HOLDOUT_NEEDS else 0


def hold_out_utterances(
    store: UserIndex, utterances: Integers, *, holdout: float, seed: int
) -> tuple[Integers, Integers]:
    """One client's utterances for training and for testing, both in ascending order."""
    order = keyed_order(utterance_keys(store, utterances), seed, "users", "hold-out")
    size = holdout_size(len(utterances), holdout=holdout)
    return np.sort(utterances[order[size:]]), np.sort(utterances[order[:size]])


def group_into_devices(speakers: Speakers, *, speakers_per_device: int, seed: int) -> Groups:
    """Neighbours in a seeded queue share a device; the last device has those who are left over, if any.

    A speaker who leaves the corpus shifts all pairs behind them in the queue, so no guarantee is given.
    """
    queue = keyed_order(speakers.keys, seed, "users", "device")
    cuts = np.append(np.arange(0, len(speakers), speakers_per_device, dtype=np.int64), len(speakers))
    return Groups(members=queue, offsets=cuts).expand(speakers.rows)


def group_into_silos(speakers: Speakers, *, count: int, seed: int) -> Groups:
    """Each speaker's silo is a hash of their own key: one speaker changes one silo and no other.

    There are always `count` silos; an empty one sends a zero update.
    """
    silo_of = keyed_group(speakers.keys, seed, "users", "silo", count=count)
    return group_by(silo_of, count=count).expand(speakers.rows)


def balance_silos(speakers: Speakers, *, count: int, seed: int) -> Groups:
    """Silos of about equal speech (Gao et al. 2022): each speaker of a seeded queue goes to the one with least so far.

    So no two silos differ by more than the longest speaker has. The queue is random, as the paper's division is;
    from the longest speaker down silos would be nearer still, but each would have one of the longest speakers.

    Who is in which silo depends on how much others have said: a speaker who leaves moves everybody behind them in the
    queue. So no guarantee is given.
    """
    held, silo_of = [0] * count, np.empty(len(speakers), dtype=np.int64)
    for place in keyed_order(speakers.keys, seed, "users", "balanced silo").tolist():
        silo_of[place] = least = held.index(min(held))
        held[least] += int(speakers.samples[place])
    return group_by(silo_of, count=count).expand(speakers.rows)


def shuffle_utterances(store: UserIndex, speakers: Speakers, *, seed: int) -> Groups:
    """Clients as groups of *utterance* rows: all utterances shuffled, as many to each client as a speaker had."""
    own = utterances_of(store, speakers.rows)
    order = keyed_order(utterance_keys(store, own.members), seed, "users", "iid")
    return Groups(members=own.members[order], offsets=own.offsets)


def deal_utterances(store: UserIndex, speakers: Speakers, *, seed: int) -> Groups:
    """Clients as groups of *utterance* rows: each utterance falls to one of as many clients as there are speakers.

    "Choosing a user id uniformly and randomly from the set of user ids for each data point" (Pelikan et al. 2025,
    Table 5). Those without any utterance are left out.
    """
    own = utterances_of(store, speakers.rows).members
    client_of = keyed_group(utterance_keys(store, own), seed, "users", "iid uniform", count=len(speakers))
    drawn = group_by(client_of, count=len(speakers))
    return Groups(members=own[drawn.members], offsets=drawn.offsets).take(np.flatnonzero(drawn.sizes))
