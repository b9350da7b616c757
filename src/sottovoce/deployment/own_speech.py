"""A node's own speech as one client of its recipe: the very one that a simulation of the same people would have."""

import re

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive
from sottovoce.config import Recipe
from sottovoce.store import Store
from sottovoce.users.groups import Groups
from sottovoce.users.population import Population, build_population, populate
from sottovoce.users.splits import select_speakers

_SILO = re.compile(r"silo-([0-9]{1,9})")


def own_client(recipe: Recipe, store: Store, *, user: str | None) -> tuple[Population, int]:
    """A population, and which client of it we are: the speaker called `user`, or the only one there is.

    A silo is all that the store holds, whoever has said it; its `user` is its name in the roster, such as `silo-3`.
    """
    settings, seed = recipe.federated.clients.population(recipe.data), derive(recipe.people_seed, "seed part")
    if settings.clients == "speaker":
        people = build_population(store, settings, seed=seed)
        return people, _speaker(people, user)
    assert settings.silos is not None
    index = _silo(user, settings.silos)
    rows = select_speakers(store, settings.splits).rows.members
    ends = np.where(np.arange(settings.silos + 1) > index, len(rows), 0)
    return populate(store, settings, Groups(members=rows, offsets=ends), seed=seed), index


def _speaker(people: Population, user: str | None) -> int:
    if user is None and len(people) > 1:
        raise InputError(f"store {people.store.name} has {len(people):,} speakers: expected to be told which one joins")
    for client in people:
        if user in (None, client.id):
            return client.index
    raise InputError(f"store {people.store.name} has no speaker {user!r} with as much speech as the recipe asks for")


def _silo(user: str | None, silos: int) -> int:
    found = _SILO.fullmatch(user or "")
    if found is None or int(found[1]) >= silos:
        raise InputError(f"user={user!r}: expected silo-0 to silo-{silos - 1}, this silo's name in the roster")
    return int(found[1])
