"""Ways to make clients of several speakers. Each puts every speaker, or every utterance, in exactly one client."""

import heapq

import numpy as np

from sottovoce.errors import InputError
from sottovoce.seeds import keyed_order
from sottovoce.users.groups import Groups, group_by
from sottovoce.users.splits import Speakers, UserIndex
from sottovoce.users.utterances import utterance_keys, utterances_of


def devices(speakers: Speakers, *, speakers_per_device: int, seed: int) -> Groups:
    """Neighbours in a seeded queue share a device; the last device has those who are left over, if any.

    Nobody is left out: of five speakers, two by two, the last has a device alone. A speaker who leaves the corpus
    shifts the pairs behind them in the queue, and none before.
    """
    queue = keyed_order(speakers.keys, seed, "users", "device")
    cuts = np.append(np.arange(0, len(speakers), speakers_per_device, dtype=np.int64), len(speakers))
    return Groups(members=queue, offsets=cuts).expand(speakers.rows)


def silos(speakers: Speakers, *, count: int, seed: int) -> Groups:
    """Silos of about equal hours: each speaker goes to the one that has least so far, large speakers first.

    Speakers within a factor of two of one another come in seeded order, so that another seed gives other silos. The
    fullest silo is ahead of the emptiest by no more than the largest speaker.
    """
    if count > len(speakers):
        raise InputError(f"silos={count}: expected at most one per speaker, and there are {len(speakers)} speakers")
    queue = keyed_order(speakers.keys, seed, "users", "silo")
    # frexp's exponent is the bit length of the amount: exact for integers below 2**53.
    octaves = np.frexp(speakers.samples[queue].astype(np.float64))[1]
    queue = queue[np.argsort(-octaves, kind="stable")]
    silo_of = np.empty(len(speakers), dtype=np.int64)
    # The number of speakers stands before the silo's own number so that no silo stays empty.
    filling = [(0, 0, silo) for silo in range(count)]
    for speaker, samples in zip(queue.tolist(), speakers.samples[queue].tolist(), strict=True):
        load, size, silo = filling[0]
        silo_of[speaker] = silo
        heapq.heapreplace(filling, (load + samples, size + 1, silo))
    return group_by(silo_of, count=count).expand(speakers.rows)


def shuffled(store: UserIndex, speakers: Speakers, *, seed: int) -> Groups:
    """Clients as groups of *utterance* rows: all utterances shuffled, as many to each client as a speaker had."""
    own = utterances_of(store, speakers.rows)
    order = keyed_order(utterance_keys(store, own.members), seed, "users", "iid")
    return Groups(members=own.members[order], offsets=own.offsets)
