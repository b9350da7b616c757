"""People with speech of their own, and a server for them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.deployment.village import Content, Village, pack_village, recipe_of

if TYPE_CHECKING:
    from tests.deployment.hamlet import Hamlet


@pytest.fixture(scope="session")
def village_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("village")
    pack_village(folder)
    return folder


@pytest.fixture(scope="session")
def four_each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same people with four utterances, of which they can hold out two."""
    folder = tmp_path_factory.mktemp("four")
    pack_village(folder, utterances=4)
    return folder


Settle = Callable[..., Village]


@pytest.fixture
def settle(tmp_path: Path, village_stores: Path) -> Iterator[Settle]:
    """Makes a village with a recipe; its nodes are closed behind the test."""
    made: list[Village] = []

    def settled(given: Content | None = None, **options: Any) -> Village:
        place = tmp_path / str(len(made))
        made.append(Village(place, options.pop("stores", village_stores), recipe_of(given), **options))
        return made[-1]

    yield settled
    for village in made:
        village.close()


@pytest.fixture(scope="session")
def hamlet(tmp_path_factory: pytest.TempPathFactory, village_stores: Path) -> Iterator["Hamlet"]:
    """People who are processes; each test finds them honest and all here, or makes them so."""
    from tests.deployment.hamlet import hamlet_at

    with hamlet_at(tmp_path_factory.mktemp("hamlet"), village_stores) as found:
        yield found
