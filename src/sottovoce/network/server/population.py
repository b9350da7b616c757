"""A roster as a population: people whose names the server knows, and whose speech it does not have."""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, name_key
from sottovoce.config import Recipe
from sottovoce.data.population import LeftOut, Population
from sottovoce.data.speakers import Groups, Integers, Named
from sottovoce.network.roster import Roster
from sottovoce.privacy.settings import Mode


@dataclass(frozen=True, eq=False)
class _Names:
    """What a `Population` asks of a store, answered for people without a single utterance."""

    names: tuple[str, ...]
    name = "roster"
    digest = ""

    @property
    def splits(self) -> dict[str, range]:
        return {}

    @property
    def user_utterances(self) -> Integers:
        return np.zeros(len(self.names) + 1, dtype=np.int64)

    @property
    def audio_offsets(self) -> Integers:
        return np.zeros(1, dtype=np.int64)

    @cached_property
    def user_keys(self) -> NDArray[np.uint64]:
        return np.array([name_key(name) for name in self.names], dtype=np.uint64)

    def user(self, row: int, /) -> Named:
        return SimpleNamespace(name=self.names[row])


def roster_population(roster: Roster, recipe: Recipe) -> Population:
    """The people of `roster` as the clients of `recipe`, in the roster's order. InputError for what they cannot be."""
    federated, settings = recipe.federated, recipe.federated.clients.population(recipe.data)
    if settings.clients not in ("speaker", "silo"):
        raise InputError(f"federation.clients={settings.clients}: on a roster are speakers or silos, as they are")
    if settings.silos is not None and settings.silos != len(roster):
        raise InputError(f"federation.clients.silos={settings.silos}: the roster has {len(roster)}")
    if settings.silos is not None and federated.seed_model is not None and federated.privacy.mode is Mode.SECURE:
        raise InputError(
            "federation.seed_model: nobody can say whether it was trained on people of a silo: they have no names"
        )
    for key, asked in (
        ("server_pass", federated.server_pass),  # nobody could say whether a client said the same
        ("test_clients", federated.test_clients),
        ("local.time_line", federated.local.time_line),
    ):
        if asked is not None:
            raise InputError(f"federation.{key}: needs the clients' speech here, and it stays with them")
    return Population(
        store=_Names(tuple(user.name for user in roster.users)),
        settings=settings,
        seed=derive(recipe.people_seed, "seed part"),
        members=Groups(members=np.arange(len(roster)), offsets=np.arange(len(roster) + 1)),
        seconds=np.zeros(len(roster)),
        left_out=LeftOut(),
    )
