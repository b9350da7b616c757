"""The runs that a run needs before it, and what those need: its parents, and all of its ancestors.

A parent is the model that it starts from (`seed_model` or `start_from` of its recipe) or the run whose tokens it takes
(`tokens.take_from`).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sottovoce.base.errors import InputError
from sottovoce.base.importing import refuse_imports
from sottovoce.config import DataSettings, Recipe, as_yaml, is_recipe, load_recipe, plain_name
from sottovoce.models.model_files import PARAMETERS
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.recogniser import load_recogniser as load_recogniser
from sottovoce.training.run_folder import CONFIG, RESULTS

NAME_RECIPE = "name the seed's recipe in place of its folder, if you trust it"


@dataclass(frozen=True)
class ParentModel:
    """The folder of a model that a run needs, and its recipe, which is None for a model that came without one.

    `is_own`: the user's recipe names this recipe; otherwise the folder of a run says it. `role` is what it is to the
    run that needs it.
    """

    folder: Path
    recipe: Recipe | None
    is_own: bool = False
    role: Literal["seed model", "tokens of"] = "seed model"

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.role} {self.folder.name}"

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


def resolve_parent_model(
    name: str, *, runs: Path, root_seed: int, data: DataSettings | None = None, overrides: Sequence[str] = ()
) -> ParentModel:
    """The model called `name`: a recipe, to be run with the same root seed, or the folder of a model or run.

    One that is trained on a part of the people whom `data` divides has them divided alike. The `overrides` change that
    recipe, and those that it needs in turn.
    """
    if is_recipe(name):
        seeds = [f"seed={root_seed}"]
        recipe = load_recipe(name, seeds)
        if data is not None and _divides_alike(recipe.data, data) and recipe.people_seed != root_seed:
            seeds.append(f"data.people_seed={root_seed}")
        recipe = _load_overridden(name, seeds=seeds, overrides=overrides)
        return ParentModel(default_run_folder(name, runs, recipe=recipe), recipe, is_own=True)
    if not Path(name).exists():
        load_recipe(name)  # raises with what is wrong, and the nearest name
    if overrides:
        raise InputError(f"parent_overrides={list(overrides)}: {name} is a folder, not a recipe; expected none")
    run = find_enclosing_run(Path(name))
    with refuse_imports(NAME_RECIPE):
        return ParentModel(Path(name), None if run is None else load_recipe(str(run / CONFIG)))


def _load_overridden(name: str, *, seeds: Sequence[str], overrides: Sequence[str]) -> Recipe:
    """A recipe with those of the `overrides` that are not for the other kind of training, which it passes on."""
    plain = load_recipe(name, seeds)
    if not overrides:
        return plain
    other = "federation." if plain.federation is None else "central."
    own = [change for change in overrides if not change.startswith(other)]
    return load_recipe(name, [*seeds, *own, f"parent_overrides={json.dumps([*overrides])}"])


def find_parent_model(recipe: Recipe, *, runs: Path) -> ParentModel | None:
    """The model that a recipe starts from; None for a recipe that starts from nothing."""
    name = recipe.central.start_from if recipe.central is not None else recipe.federated.seed_model
    return None if name is None else _resolve(name, recipe, runs)


def find_token_parent(recipe: Recipe, *, runs: Path) -> ParentModel | None:
    """The run or model whose tokens a recipe takes; None for a recipe with tokens of its own, or of its seed model."""
    name = recipe.tokens.take_from
    return None if name is None else replace(_resolve(name, recipe, runs), role="tokens of")


def _resolve(name: str, recipe: Recipe, runs: Path) -> ParentModel:
    overrides = recipe.parent_overrides or ()
    return resolve_parent_model(name, runs=runs, root_seed=recipe.people_seed, data=recipe.data, overrides=overrides)


def _divides_alike(one: DataSettings, other: DataSettings) -> bool:
    """Whether two recipes divide the same people by the same rule."""
    divided = one.seed_part is not None and one.seed_part == other.seed_part
    return divided and (one.store, one.train) == (other.store, other.train)


def list_parents(recipe: Recipe, *, runs: Path) -> list[ParentModel]:
    """What must be there before a recipe is run: each once."""
    model, tokens = find_parent_model(recipe, runs=runs), find_token_parent(recipe, runs=runs)
    if model is not None and tokens is not None and model.folder == tokens.folder:
        return [model]
    return [parent for parent in (model, tokens) if parent is not None]


def find_enclosing_run(folder: Path) -> Path | None:
    """The run that a folder is, or that a model or checkpoint in it belongs to; None for a model alone."""
    resolved = folder.resolve()
    places = (folder, resolved, *resolved.parents[:2])
    return next((place for place in places if (place / CONFIG).exists()), None)


def iterate_ancestors(parent: ParentModel | None, *, runs: Path) -> Iterator[tuple[Path, Recipe | None]]:
    """A model, what it started from, and so on: their folders, with a recipe where they have one."""
    seen: set[Path] = set()
    while parent is not None and parent.folder not in seen:
        seen.add(parent.folder)
        yield parent.folder, parent.recipe
        if parent.recipe is None:
            return
        with allow_own_imports(parent):
            parent = find_parent_model(parent.recipe, runs=runs)


def list_ancestors(recipe: Recipe, *, runs: Path) -> list[ParentModel]:
    """All that `recipe` needs, and what that needs: each once, in the order to train them in."""
    found: dict[Path, ParentModel] = {}
    _collect_ancestors(recipe, runs, found, above=(), only_untrained=False)
    return [*found.values()]


def list_untrained_ancestors(recipe: Recipe, *, runs: Path) -> list[ParentModel]:
    """What has to be trained before `recipe` is: each once, in order. What is there needs nothing any more."""
    found: dict[Path, ParentModel] = {}
    _collect_ancestors(recipe, runs, found, above=(), only_untrained=True)
    return [*found.values()]


def _collect_ancestors(
    recipe: Recipe, runs: Path, found: dict[Path, ParentModel], *, above: tuple[Path, ...], only_untrained: bool
) -> None:
    for parent in list_parents(recipe, runs=runs):
        if parent.folder in found or (only_untrained and parent.is_trained):
            continue
        if parent.folder in above:
            raise InputError(f"{parent.title}: it needs itself, by way of {', '.join(place.name for place in above)}")
        if parent.recipe is not None:
            above_it = (*above, parent.folder)
            with allow_own_imports(parent):
                _collect_ancestors(parent.recipe, runs, found, above=above_it, only_untrained=only_untrained)
        found[parent.folder] = parent


def allow_own_imports(parent: ParentModel) -> AbstractContextManager[None]:
    """Within, modules named by the model's recipe are imported if the recipe is the user's own, and refused if not."""
    return nullcontext() if parent.is_own else refuse_imports(NAME_RECIPE)
