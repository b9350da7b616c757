"""Checks before the first long step: what is still to be made, and whether all that it needs is there and fits.

A seed model may take days. Whatever would stop the runs after it (a missing store, another number of clients than the
plan assumes, tokens that cannot write the texts, a device that an engine cannot use) stops them here.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.config import ManifestCorpus, Recipe, as_yaml
from sottovoce.data.loading import Speech
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import Tokens, load_tokens
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, sketch_recogniser
from sottovoce.training.assemble import Federation, assemble
from sottovoce.training.engines import check_engine
from sottovoce.training.parent_model import (
    ParentModel,
    find_parent_model,
    find_token_parent,
    list_parents,
    list_untrained_ancestors,
)
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import (
    RunData,
    ensure_store,
    list_training_rows,
    load_training_speech,
    resolve_manifests,
)
from sottovoce.training.run_folder import RESULTS, require_same_recipe
from sottovoce.training.testing import choose_measure
from sottovoce.training.tokens import check_no_other_tokens, choose_tokens, has_sentence_pieces

# How the corpora of the papers become the stores that their recipes name; folders are called as they are published.
CORPORA = {
    "librispeech": "librispeech LibriSpeech",
    **{
        f"commonvoice-{code}": f"commonvoice cv-corpus-13.0-2023-03-09/{code} --as-released"
        for code in ("en", "fr", "de")
    },
    **{
        f"commonvoice6-{code}": f"commonvoice cv-corpus-6.1-2020-12-11/{code} --spelling gao2022"
        for code in ("fr", "it")
    },
    "librilight-large": "librilight librilight --split large --point",
    "mls-french": "mls mls_french",
}


@dataclass(frozen=True)
class Stage:
    """One run that is still to be made, and where."""

    name: str
    recipe: Recipe
    folder: Path


def list_stages(runs: Mapping[str, tuple[Recipe, Path]], *, folder: Path) -> list[Stage]:
    """What is to be made for `runs`, each with its folder: what they need once each in `folder`, then the runs."""
    parents: dict[Path, Stage] = {}
    for recipe, place in runs.values():
        if (place / RESULTS).exists():  # what is there is what is asked for, or else nothing may be left out
            require_same_recipe(place, as_yaml(recipe))
    wanted = [Stage(name, recipe, place) for name, (recipe, place) in runs.items() if not (place / RESULTS).exists()]
    for stage in wanted:
        for parent in list_untrained_ancestors(stage.recipe, runs=folder):
            assert parent.recipe is not None
            parents.setdefault(parent.folder, Stage(parent.title, parent.recipe, parent.folder))
    for stage in wanted:
        if stage.folder in parents and parents[stage.folder].recipe != stage.recipe:
            raise InputError(
                f"{stage.name}: others start from it as its recipe is, and it is different here, in one folder "
                f"{stage.folder}: give parent_overrides the same key=value, or --only without it"
            )
    return [*parents.values(), *(stage for stage in wanted if stage.folder not in parents)]


def find_missing_stores(stages: Sequence[Stage], stores: Path) -> dict[str, str]:
    """The stores that are not there and that no run makes, each with the command that does."""
    made = {stage.recipe.data.store for stage in stages if stage.recipe.data.prepare is not None}
    named = dict.fromkeys(name for stage in stages for name in _list_stores(stage.recipe))
    absent = [name for name in named if name not in made and not _is_there(name, stores)]
    return {name: _command(name, stores) for name in absent}


def _list_stores(recipe: Recipe) -> Iterator[str]:
    """Every store that a recipe reads, its own first."""
    yield recipe.data.store
    places = [recipe.data.dev, *recipe.data.test]
    if recipe.federation is not None:
        shared = recipe.federation.weighed_on
        own = recipe.federation.server_pass
        places += [] if own is None else [own.data]
        places += [] if shared is None or shared.data is None else [shared.data]
    yield from (recipe.data.place(place)[0] for place in places)


def _is_there(name: str, stores: Path) -> bool:
    return (stores / name).exists() or Path(name).exists()  # what is wrong with it is said where it is opened


def _command(name: str, stores: Path) -> str:
    return f"sottovoce prepare {CORPORA.get(name, 'CORPUS FOLDER')} --out {shlex.quote(str(stores / name))}"


def check_stores(stages: Sequence[Stage], stores: Path) -> None:
    """Refuse to begin where a store is missing: all of them at once, each with the command that makes it."""
    if absent := find_missing_stores(stages, stores):
        what = "this store is" if len(absent) == 1 else f"these {len(absent)} stores are"
        lines = "".join(f"\n  {command}" for command in absent.values())
        raise InputError(f"{what} not there: {', '.join(absent)}; first give{lines}")
    for stage in stages:
        how = stage.recipe.data.prepare
        if isinstance(how, ManifestCorpus) and not _is_there(stage.recipe.data.store, stores):
            for path in resolve_manifests(how):
                if not path.is_file():
                    raise InputError(f"store {stage.recipe.data.store}: it is made of {path}, which is not there")


@dataclass(frozen=True, eq=False)
class CheckedStage:
    """A stage that was checked: its model without its numbers, and its federation, where it is one, with that model.

    `speech` is what central training by epochs has, from which its steps follow.
    """

    start: Recogniser
    federation: Federation | None = None
    speech: Speech | None = None


def check_stages(stages: Sequence[Stage], context: RunContext) -> dict[Path, CheckedStage | None]:
    """Make the stores that can be made, then check every stage as it will be checked when its turn comes.

    Returns what is known of each, by its folder; None where tokens are still to be made of texts.
    """
    check_stores(stages, context.stores)
    _check_given(stages, context.runs)
    for stage in stages:
        ensure_store(stage.recipe, context.stores, context.on_prepare)
    quiet = replace(context, say=lambda _: None)
    known: dict[Path, CheckedStage | None] = {}
    for stage in stages:
        try:
            known[stage.folder] = _check_stage(stage.recipe, known, quiet)
        except InputError as error:
            raise InputError(f"{stage.name}: {error}" if len(stages) > 1 else str(error)) from None
    return known


def _check_given(stages: Sequence[Stage], runs: Path) -> None:
    """Refuse unreadable models and tokens of the user before stores are made, which takes long."""
    for stage in stages:
        for parent in list_parents(stage.recipe, runs=runs):
            if parent.is_trained and not parent.is_own:
                parent.load()
        if stage.recipe.reads_texts and stage.recipe.tokens.file is not None:
            load_tokens(Path(stage.recipe.tokens.file))


def _check_stage(recipe: Recipe, known: Mapping[Path, CheckedStage | None], context: RunContext) -> CheckedStage | None:
    """Check one run; `known` are those that it may start from. None where tokens are still to be made of texts."""
    data = RunData.of(recipe, context.stores)
    model, source = find_parent_model(recipe, runs=context.runs), find_token_parent(recipe, runs=context.runs)
    if any(one is not None and not one.is_trained and known.get(one.folder) is None for one in (model, source)):
        return None
    found = None if model is None else _load_or_sketch(model, known)
    taken = None if source is None else _load_or_sketch(source, known).tokens
    tokens = _choose_tokens(recipe, data.store, found, taken)
    if tokens is None:
        return None
    family, language = find_family(recipe.model.family), data.store.language
    if recipe.federation is not None and found is not None and found.family is family and family.recognition:
        language = found.language
    start = sketch_recogniser(
        family, recipe.model.settings(tokens=tokens.size + 1), tokens, language=language, seed=found
    )
    if recipe.federation is None:
        choose_measure(recipe, start, data, say=context.say)
        if recipe.training.counts_epochs:
            return CheckedStage(start, speech=load_training_speech(recipe, data.store, start))
        list_training_rows(recipe, data.store)
        return CheckedStage(start)
    federation = assemble(recipe, context=context, sketch=start)
    check_engine(recipe.federation.engine, start, context.device)
    return CheckedStage(start, federation)


def _load_or_sketch(parent: ParentModel, known: Mapping[Path, CheckedStage | None]) -> Recogniser:
    """What a run needs: as it is there, or without its numbers as it was checked."""
    if parent.is_trained:
        return parent.load()
    checked = known[parent.folder]
    assert checked is not None
    return checked.start


def _choose_tokens(recipe: Recipe, store: Store, parent: Recogniser | None, taken: Tokens | None) -> Tokens | None:
    federation = recipe.federation
    if federation is not None and parent is not None and parent.family.name == recipe.model.family:
        check_no_other_tokens(recipe)
        return parent.tokens
    if federation is not None:
        return choose_tokens(recipe, store, may_read_texts=not federation.privacy.adds_noise, taken=taken)
    given = recipe.tokens.file is not None or taken is not None
    inherits = parent is not None and has_sentence_pieces(parent, store.language)
    if recipe.reads_texts and recipe.tokens.kind == "sentence_pieces" and not given and not inherits:
        return None  # making them takes a while, and every text
    return choose_tokens(recipe, store, parent=parent, taken=taken)
