"""Seed models: where a federated run starts, and whose speech is already in it.

A seed is trained without privacy. Whoever is in it cannot be protected by anything that comes later, so a private run
refuses clients whom its seed has heard; this file finds out, through the seed's own seeds.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sottovoce.config import Recipe, as_yaml, is_recipe, load_recipe, plain_name
from sottovoce.errors import InputError
from sottovoce.files import read_json
from sottovoce.models.model_files import PARAMETERS
from sottovoce.models.recogniser import Recogniser, load_recogniser
from sottovoce.naming import importing_nothing
from sottovoce.store import Store
from sottovoce.training.run_folder import CONFIG, INPUTS, RESULTS
from sottovoce.training.speakers import speakers_of
from sottovoce.training.stores import find_place, open_place
from sottovoce.users.population import Population, shared_speakers

SERVER_PASS = "federation.server_pass.data"
SHARED_DEV = "federation.shared_dev"
NAME_RECIPE = "name the seed's recipe in place of its folder, if you trust it"


@dataclass(frozen=True)
class Seed:
    """A seed model's recipe and the folder of its run; the recipe is None for a model that came without one.

    `is_own`: the recipe is one that the user's recipe names, and not what the folder of a run says.
    """

    folder: Path
    recipe: Recipe | None
    is_own: bool = False

    @property
    def is_there(self) -> bool:
        """Whether it is trained, by this very recipe."""
        if self.recipe is None or (self.folder / PARAMETERS).exists():  # a model itself, alone or of some run
            return True
        done, known = self.folder / RESULTS, self.folder / CONFIG
        return done.exists() and known.exists() and known.read_text(encoding="utf-8") == as_yaml(self.recipe)

    def load(self) -> Recogniser:
        return load_recogniser(self.folder)


def folder_of(name: str, runs: Path, *, recipe: Recipe | None = None) -> Path:
    """Where the run of a recipe lies by default; under another seed than the recipe's own, in a folder of its own."""
    folder = plain_name(name).strip("/").replace("/", "-")
    if recipe is not None and recipe.seed != load_recipe(name).seed:
        folder += f"-seed{recipe.seed}"
    return runs / folder


def find_seed(name: str, *, runs: Path, root_seed: int) -> Seed:
    """The seed called `name`: a recipe, to be run with the same root seed, or the folder of a model or run."""
    if is_recipe(name):
        recipe = load_recipe(name, [f"seed={root_seed}"])
        return Seed(folder_of(name, runs, recipe=recipe), recipe, is_own=True)
    if not Path(name).exists():
        load_recipe(name)  # says what is wrong, and the nearest name
    run = run_of(Path(name))
    with importing_nothing(NAME_RECIPE):
        return Seed(Path(name), None if run is None else load_recipe(str(run / CONFIG)))


def seed_of(recipe: Recipe, *, runs: Path) -> Seed | None:
    """What a recipe starts from; None for one that starts from nothing."""
    name = recipe.central.start_from if recipe.central is not None else recipe.federated.seed_model
    return None if name is None else find_seed(name, runs=runs, root_seed=recipe.people_seed)


def run_of(folder: Path) -> Path | None:
    """The run that a folder is, or that a model or checkpoint in it belongs to; None where there is only a model."""
    resolved = folder.resolve()
    places = (folder, resolved, *resolved.parents[:2])
    return next((place for place in places if (place / CONFIG).exists()), None)


@dataclass(frozen=True)
class Heard:
    """How many clients a seed has heard, and of which of its ancestors nobody knows whom they have heard."""

    clients: int
    unknown: tuple[Path, ...]


def heard_by(seed: Seed | None, clients: Population, *, runs: Path, stores: Path, beforehand: bool = False) -> Heard:
    """Compare the people in a seed, and in whatever it started from, with the `clients`.

    Those on whom a seed's checkpoint was chosen, or whom its server heard, count as heard too. Where a store is no
    longer the one that a seed was trained on, who was in that is unknown. Asked `beforehand`, one that is not trained
    yet will hear those who are in its store now.
    """
    shared: set[int] = set()
    unknown = []
    for folder, recipe in ancestors(seed, runs=runs):
        if recipe is None:
            unknown.append(folder)
            continue
        with saying_why(folder):
            to_be_made = beforehand and not Seed(folder, recipe).is_there
            if not (to_be_made or _still_there(folder, recipe, stores)):
                unknown.append(folder)
            heard = shared_speakers(speakers_of(recipe, open_place(recipe.data.store, stores)), clients)
            shared |= set(heard.tolist())
            for _, keys in _beside_training(recipe, stores).values():
                shared |= set(np.intersect1d(keys, keys_of(clients)).tolist())
    return Heard(len(shared), tuple(unknown))


@contextmanager
def saying_why(folder: Path) -> Iterator[None]:
    """Within, a store that cannot be read is asked for with the reason: a user may know only the model's folder."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"seed model {folder}: the stores that it was trained and chosen on are needed, to find out whether some "
            f"of the clients are in them ({error}); give those stores, or for a simulation the model without its run: "
            "a copy of the run's folder `model`"
        ) from None


def _still_there(folder: Path, recipe: Recipe, stores: Path) -> bool:
    """Whether the stores are those that the run in `folder` has read."""
    run = run_of(folder)
    if run is None or not (run / INPUTS).exists():
        return False
    recorded = read_json(run / INPUTS)
    now = {
        "data.store digest": open_place(recipe.data.store, stores).digest,
        **{f"{what} digest": digest for what, (digest, _) in _beside_training(recipe, stores).items()},
    }
    return all(recorded.get(name) == digest for name, digest in now.items())


def _beside_training(recipe: Recipe, stores: Path) -> dict[str, tuple[str, "Keys"]]:
    """Whom a run has looked at besides those it trains on: where its model was chosen, its server's own, and
    what its clients were weighted by. Each with the digest of their store."""
    places = places_beside(recipe, stores)
    return {what: (store.digest, split_keys(store, split)) for what, (store, split) in places.items()}


def places_beside(recipe: Recipe, stores: Path) -> dict[str, tuple[Store, str]]:
    """The splits that a run has looked at besides those it trains on."""
    settings = recipe.federation
    own = None if settings is None or settings.server_pass is None else settings.server_pass.data
    shared = None if settings is None or settings.weighed_on is None else settings.weighed_on.data
    named = {"data.dev": recipe.data.dev, SERVER_PASS: own, SHARED_DEV: shared}
    return {what: find_place(place, recipe, stores) for what, place in named.items() if place is not None}


def ancestors(seed: Seed | None, *, runs: Path) -> Iterator[tuple[Path, Recipe | None]]:
    """A seed, what it started from, and so on: their folders, with a recipe where they have one."""
    seen: set[Path] = set()
    while seed is not None and seed.folder not in seen:
        seen.add(seed.folder)
        yield seed.folder, seed.recipe
        if seed.recipe is None:
            return
        with as_trusted(seed):
            seed = seed_of(seed.recipe, runs=runs)


def as_trusted(seed: Seed) -> AbstractContextManager[None]:
    """Within, what the seed's recipe names is imported if the recipe is the user's own, and not if a folder says so."""
    return nullcontext() if seed.is_own else importing_nothing(NAME_RECIPE)


Keys = NDArray[np.uint64]


def split_keys(store: Store, split: str) -> Keys:
    """The keys of the people in one split of a store."""
    rows = store.splits[split]
    return np.asarray(store.user_keys[rows.start : rows.stop])


def keys_of(people: Population) -> Keys:
    """The keys of all people in a population."""
    return np.asarray(people.store.user_keys[people.user_rows()])


def check_strangers(clients: Population, places: Mapping[str, Keys], *, instead: str) -> None:
    """Refuse the first of `places` where a client is heard, and say what would be right."""
    keys = keys_of(clients)
    for name, heard in places.items():
        both = np.intersect1d(keys, heard)
        if len(both):
            raise InputError(f"{name}: {len(both)} of its speakers are clients too; {instead}")
