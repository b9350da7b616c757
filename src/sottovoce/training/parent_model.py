"""The model that a run starts from (`seed_model` or `start_from` of a recipe), and what that one started from."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from sottovoce.base.importing import refuse_imports
from sottovoce.config import DataSettings, Recipe, as_yaml, is_recipe, load_recipe, plain_name
from sottovoce.models.model_files import PARAMETERS
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.recogniser import load_recogniser as load_recogniser
from sottovoce.training.run_folder import CONFIG, RESULTS

NAME_RECIPE = "name the seed's recipe in place of its folder, if you trust it"


@dataclass(frozen=True)
class ParentModel:
    """The folder of a seed model and its recipe, which is None for a model that came without one.

    `is_own`: the user's recipe names this recipe; otherwise the folder of a run says it.
    """

    folder: Path
    recipe: Recipe | None
    is_own: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether it is there, trained by this very recipe."""
        if self.recipe is None or (self.folder / PARAMETERS).exists():  # a model itself, alone or of some run
            return True
        done, known = self.folder / RESULTS, self.folder / CONFIG
        return done.exists() and known.exists() and known.read_text(encoding="utf-8") == as_yaml(self.recipe)

    def load(self) -> Recogniser:
        return load_recogniser(self.folder)


def default_run_folder(name: str, runs: Path, *, recipe: Recipe | None = None) -> Path:
    """The default folder of a recipe's run; under another random seed than the recipe's, a folder of its own."""
    folder = plain_name(name).strip("/").replace("/", "-")
    if recipe is not None and recipe.seed != load_recipe(name).seed:
        folder += f"-seed{recipe.seed}"
    return runs / folder


def resolve_parent_model(name: str, *, runs: Path, root_seed: int, data: DataSettings | None = None) -> ParentModel:
    """The model called `name`: a recipe, to be run with the same root seed, or the folder of a model or run.

    One that is trained on a part of the people whom `data` divides has them divided alike.
    """
    if is_recipe(name):
        recipe = load_recipe(name, [f"seed={root_seed}"])
        if data is not None and _divides_alike(recipe.data, data) and recipe.people_seed != root_seed:
            recipe = load_recipe(name, [f"seed={root_seed}", f"data.people_seed={root_seed}"])
        return ParentModel(default_run_folder(name, runs, recipe=recipe), recipe, is_own=True)
    if not Path(name).exists():
        load_recipe(name)  # raises with what is wrong, and the nearest name
    run = find_enclosing_run(Path(name))
    with refuse_imports(NAME_RECIPE):
        return ParentModel(Path(name), None if run is None else load_recipe(str(run / CONFIG)))


def find_parent_model(recipe: Recipe, *, runs: Path) -> ParentModel | None:
    """The model that a recipe starts from; None for a recipe that starts from nothing."""
    name = recipe.central.start_from if recipe.central is not None else recipe.federated.seed_model
    if name is None:
        return None
    return resolve_parent_model(name, runs=runs, root_seed=recipe.people_seed, data=recipe.data)


def _divides_alike(one: DataSettings, other: DataSettings) -> bool:
    """Whether two recipes divide the same people by the same rule."""
    divided = one.seed_part is not None and one.seed_part == other.seed_part
    return divided and (one.store, one.train) == (other.store, other.train)


def find_enclosing_run(folder: Path) -> Path | None:
    """The run that a folder is, or that a model or checkpoint in it belongs to; None for a model alone."""
    resolved = folder.resolve()
    places = (folder, resolved, *resolved.parents[:2])
    return next((place for place in places if (place / CONFIG).exists()), None)


def iterate_ancestors(parent: ParentModel | None, *, runs: Path) -> Iterator[tuple[Path, Recipe | None]]:
    """A model, its parent, and so on: their folders, with a recipe where they have one."""
    seen: set[Path] = set()
    while parent is not None and parent.folder not in seen:
        seen.add(parent.folder)
        yield parent.folder, parent.recipe
        if parent.recipe is None:
            return
        with allow_own_imports(parent):
            parent = find_parent_model(parent.recipe, runs=runs)


def list_untrained_ancestors(recipe: Recipe, *, runs: Path) -> list[tuple[Path, Recipe]]:
    """The models that `recipe` needs and that are not there, with their folders, in the order to train them in."""
    chain = list(iterate_ancestors(find_parent_model(recipe, runs=runs), runs=runs))
    return [
        (folder, known)
        for folder, known in reversed(chain)
        if known is not None and not ParentModel(folder, known).is_trained
    ]


def allow_own_imports(parent: ParentModel) -> AbstractContextManager[None]:
    """Within, modules named by the model's recipe are imported if the recipe is the user's own, and refused if not."""
    return nullcontext() if parent.is_own else refuse_imports(NAME_RECIPE)
