"""Who is in which group of a release with correlated noise: the same clients in the same groups, whenever it goes on.

Between two rows of noise that may have the same client lie at least `cycle` − 1 others: that is what is charged. It
holds only while nobody moves to another group. Groups go by places in the population, so one client more and one less
would move many. A release keeps no digest of its data where others see it; so this one is keyed, and lies with its key
in `secrets/` until the run has ended.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from sottovoce.errors import InputError
from sottovoce.files import read_json, sealed, unsealed
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import write_secret
from sottovoce.users.population import Population
from sottovoce.users.used_utterances import owners, utterance_samples, utterances_of

GROUPS = "groups.json"


def keep_groups(secrets: Path, population: Population, sampler: CyclicSampler, *, begun: bool) -> None:
    """Remember who is in which group, or refuse to go on where that is not as it was, or not known.

    `begun`: whether the run may have charged a round already.
    """
    path = secrets / GROUPS
    if not begun:
        key = os.urandom(32)
        content = {"key": key.hex(), "members": members_digest(population, sampler, key=key)}
        with write_secret(path) as file:
            file.write(json.dumps(sealed(content)).encode())
        return
    if not path.exists():
        raise InputError(
            f"{path} is missing: nobody can say whether clients are still in the groups in which this release began; "
            "restore it, or begin another run with --out"
        )
    known = unsealed(read_json(path), where=path)
    try:
        same = members_digest(population, sampler, key=bytes.fromhex(known["key"])) == known["members"]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path} is damaged: expected who is in which group, as a digest and its key") from None
    if not same:
        raise InputError(
            f"{path}: clients are no longer in the groups in which this release began (others came, some left or were "
            "renamed, or their recordings changed), and its noise holds for these groups alone: restore the store, or "
            "begin another run with --out"
        )


def members_digest(population: Population, sampler: CyclicSampler, *, key: bytes) -> str:
    """Equal where the same people, with recordings of the same lengths, are in the same groups.

    In whatever order a store has them: people go by the keys of their names. Lengths show that two have changed names.
    """
    store, members = population.store, population.members
    utterances = members if population.settings.deals_utterances else utterances_of(store, members)
    group_of = np.empty(len(population), dtype=np.uint64)
    for group, places in enumerate(sampler.groups(len(population))):
        group_of[places] = group
    rows = utterances.members
    said = (  # of every utterance: the group of its client, whose it is, and how long it lasts
        np.repeat(group_of, utterances.sizes),
        store.user_keys[owners(store, rows)],
        utterance_samples(store, rows).astype(np.uint64),
    )
    table = np.stack(said)[:, np.lexsort(said[::-1])]
    digest = hashlib.blake2b(key=key, digest_size=32, person=b"groups")
    digest.update(np.array([sampler.cycle, len(population)], dtype="<u8").tobytes())
    digest.update(table.astype("<u8").tobytes())
    return digest.hexdigest()
