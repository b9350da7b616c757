"""Ways to make clients of several speakers. Each puts every speaker, or every utterance, in exactly one client."""

import numpy as np

from sottovoce.base.seeds import keyed_group, keyed_order
from sottovoce.users.groups import Groups, group_by
from sottovoce.users.splits import Speakers, UserIndex
from sottovoce.users.used_utterances import utterance_keys, utterances_of


def devices(speakers: Speakers, *, speakers_per_device: int, seed: int) -> Groups:
    """Neighbours in a seeded queue share a device; the last device has those who are left over, if any.

    Nobody is left out: of five speakers, two by two, the last has a device alone. A speaker who leaves the corpus
    shifts the pairs behind them in the queue, and none before: one person moves others, and no guarantee is given.
    """
    queue = keyed_order(speakers.keys, seed, "users", "device")
    cuts = np.append(np.arange(0, len(speakers), speakers_per_device, dtype=np.int64), len(speakers))
    return Groups(members=queue, offsets=cuts).expand(speakers.rows)


def silos(speakers: Speakers, *, count: int, seed: int) -> Groups:
    """Each speaker's silo is a hash of their own key: who comes or goes, or says more, changes one silo and no other.

    There are always `count` of them. A silo that nobody falls into holds nothing, and sends a zero update.
    """
    silo_of = keyed_group(speakers.keys, seed, "users", "silo", count=count)
    return group_by(silo_of, count=count).expand(speakers.rows)


def shuffled(store: UserIndex, speakers: Speakers, *, seed: int) -> Groups:
    """Clients as groups of *utterance* rows: all utterances shuffled, as many to each client as a speaker had."""
    own = utterances_of(store, speakers.rows)
    order = keyed_order(utterance_keys(store, own.members), seed, "users", "iid")
    return Groups(members=own.members[order], offsets=own.offsets)


def dealt(store: UserIndex, speakers: Speakers, *, seed: int) -> Groups:
    """Clients as groups of *utterance* rows: each utterance falls to one of as many clients as there are speakers.

    "Choosing a user id uniformly and randomly from the set of user ids for each data point" (Pelikan et al. 2025,
    Table 5). Who draws nothing is no client.
    """
    own = utterances_of(store, speakers.rows).members
    client_of = keyed_group(utterance_keys(store, own), seed, "users", "iid uniform", count=len(speakers))
    drawn = group_by(client_of, count=len(speakers))
    return Groups(members=own[drawn.members], offsets=drawn.offsets).take(np.flatnonzero(drawn.sizes))
