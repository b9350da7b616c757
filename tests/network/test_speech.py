"""Whose speech a node trains on: one client, or one clear line."""

from pathlib import Path

import pytest
from tests.network.local_cluster import NAMES, content, recipe_of

from sottovoce.base.errors import InputError
from sottovoce.data.store import Store
from sottovoce.network.node.speech import find_own_client


def test_the_only_speaker_needs_no_name(cluster_stores: Path) -> None:
    people, index = find_own_client(recipe_of(), Store(cluster_stores / NAMES[0]), user=None)
    assert people.client(index).id == NAMES[0]


def test_one_of_many_is_named(cluster_stores: Path) -> None:
    store = Store(cluster_stores / "tones")
    people, index = find_own_client(recipe_of(), store, user=NAMES[3])
    assert people.client(index).id == NAMES[3]
    with pytest.raises(InputError, match="has 9 speakers: expected to be told which one joins"):
        find_own_client(recipe_of(), store, user=None)
    with pytest.raises(InputError, match="no speaker 'nobody'"):
        find_own_client(recipe_of(), store, user="nobody")


def test_too_little_speech_is_said(cluster_stores: Path) -> None:
    with pytest.raises(InputError, match="min_seconds=60"):
        find_own_client(recipe_of(content(clients={"min_seconds": 60})), Store(cluster_stores / NAMES[0]), user=None)


@pytest.mark.parametrize("user", [None, "anna", "silo-9", "silo--1"])
def test_a_silo_has_a_place(cluster_stores: Path, user: str | None) -> None:
    recipe = recipe_of(content(clients={"rule": "silo", "silos": 9}))
    with pytest.raises(InputError, match="expected silo-0 to silo-8"):
        find_own_client(recipe, Store(cluster_stores / NAMES[0]), user=user)


def test_a_silo_is_all_that_its_store_holds(cluster_stores: Path) -> None:
    recipe = recipe_of(content(clients={"rule": "silo", "silos": 9}))
    people, index = find_own_client(recipe, Store(cluster_stores / "tones"), user="silo-4")
    silo = people.client(index)
    assert (silo.id, len(people), len(silo.speakers)) == ("silo-4", 9, 9)
    assert [len(client.utterances) > 0 for client in people] == [i == 4 for i in range(9)]
