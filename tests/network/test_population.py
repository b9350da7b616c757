"""Rosters as populations: the very clients that a simulation of the same people has."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from tests.network.local_cluster import NAMES, content, recipe_of

from sottovoce.base.errors import InputError
from sottovoce.data.store import Store
from sottovoce.network.roster import Roster, RosterEntry
from sottovoce.network.server.population import roster_population
from sottovoce.training.run_data import build_recipe_population

KEY = ec.generate_private_key(ec.SECP384R1()).public_key()


def roster_of(*names: str) -> Roster:
    return Roster(tuple(RosterEntry(name, KEY) for name in names))


def test_it_is_the_population_of_a_store_with_these_people(cluster_stores: Path) -> None:
    recipe = recipe_of()
    simulated = build_recipe_population(
        recipe, Store(cluster_stores / "tones"), recipe.federated.clients.population(recipe.data)
    )
    served = roster_population(roster_of(*NAMES), recipe)
    assert served.digest == simulated.digest
    assert [client.id for client in served] == [client.id for client in simulated]
    assert (served.privacy_unit, served.no_guarantee) == ("speaker", None)
    assert all(len(client.utterances) == 0 for client in served)


@pytest.mark.parametrize(
    ("federation", "why"),
    [
        ({"clients": {"rule": "silo", "silos": 3}}, "federation.clients.silos=3: the roster has 2"),
        (
            {"clients": {"holdout": 0.2}, "test_clients": "all"},
            "federation.test_clients: needs the clients' speech here, and it stays with them",
        ),
        (
            {"server_pass": {"data": "public:train", "lr": 0.1, "steps": 1, "batch_seconds": 8.0}},
            "federation.server_pass: needs the clients' speech here, and it stays with them",
        ),
    ],
)
def test_what_needs_the_speech_here_is_refused(federation: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=f"^{why}$"):
        roster_population(roster_of("anna", "bert"), recipe_of(content(**federation)))


def test_a_release_by_silos_from_a_seed_model_is_refused() -> None:
    secure = content(clients={"rule": "silo", "silos": 2}, seed_model="demo-clipping/seed", privacy={"mode": "secure"})
    with pytest.raises(InputError, match="nobody can say whether it was trained on people of a silo"):
        roster_population(roster_of("silo-0", "silo-1"), recipe_of(secure))
