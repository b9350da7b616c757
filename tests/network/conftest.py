"""People with speech of their own, and a server for them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.local_cluster import Content, LocalCluster, pack_cluster, recipe_of

if TYPE_CHECKING:
    from tests.network.process_cluster import ProcessCluster


@pytest.fixture(scope="session")
def cluster_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local_cluster")
    pack_cluster(folder)
    return folder


@pytest.fixture(scope="session")
def four_each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same people with four utterances, of which they can hold out two."""
    folder = tmp_path_factory.mktemp("four")
    pack_cluster(folder, utterances=4)
    return folder


MakeCluster = Callable[..., LocalCluster]


@pytest.fixture
def make_cluster(tmp_path: Path, cluster_stores: Path) -> Iterator[MakeCluster]:
    """Makes a cluster with a recipe; its nodes are closed behind the test."""
    made: list[LocalCluster] = []

    def settled(given: Content | None = None, **options: Any) -> LocalCluster:
        place = tmp_path / str(len(made))
        made.append(LocalCluster(place, options.pop("stores", cluster_stores), recipe_of(given), **options))
        return made[-1]

    yield settled
    for local_cluster in made:
        local_cluster.close()


@pytest.fixture(scope="session")
def process_cluster(tmp_path_factory: pytest.TempPathFactory, cluster_stores: Path) -> Iterator["ProcessCluster"]:
    """People who are processes; each test finds them honest and all here, or makes them so."""
    from tests.network.process_cluster import process_cluster_at

    with process_cluster_at(tmp_path_factory.mktemp("process_cluster"), cluster_stores) as found:
        yield found
