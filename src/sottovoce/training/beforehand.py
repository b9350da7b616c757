"""Before the first long step: what is still to be made, and whether all that it needs is there and fits together.

A seed model may take days. Whatever would stop the runs after it, a store that is not there, another number of clients
than the plan assumes, tokens that cannot write the texts, a device that an engine cannot use, stops them here.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sottovoce.config import ManifestCorpus, Recipe
from sottovoce.errors import InputError
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, sketch_recogniser
from sottovoce.store import Store
from sottovoce.text.tokens import Tokens, load_tokens
from sottovoce.training.assemble import Federation, assemble
from sottovoce.training.context import Surroundings
from sottovoce.training.dev_measure import choose_measure
from sottovoce.training.engines import check_engine
from sottovoce.training.places import Places
from sottovoce.training.run_folder import RESULTS
from sottovoce.training.seeding import Seed, ancestors, seed_of
from sottovoce.training.speakers import choose_tokens, has_pieces_of, training_rows
from sottovoce.training.stores import ensure_store, manifests

# How the corpora of the papers become the stores that their recipes name; folders are called as they are published.
CORPORA = {
    "librispeech": "librispeech LibriSpeech",
    **{
        f"commonvoice-{code}": f"commonvoice cv-corpus-13.0-2023-03-09/{code} --as-released"
        for code in ("en", "fr", "de")
    },
    **{f"commonvoice6-{code}": f"commonvoice cv-corpus-6.1-2020-12-11/{code}" for code in ("fr", "it")},
    "librilight-large": "librilight librilight --split large --point",
    "mls-french": "mls mls_french",
}


@dataclass(frozen=True)
class Stage:
    """One run that is still to be made, and where."""

    name: str
    recipe: Recipe
    folder: Path


def stages_of(runs: Mapping[str, tuple[Recipe, Path]], *, folder: Path) -> list[Stage]:
    """What is to be made for `runs`, each with its folder: seeds that are not there, each once, then the runs.

    Seeds lie in `folder`, and come in the order in which they start from one another.
    """
    seeds: dict[Path, Stage] = {}
    wanted = [Stage(name, recipe, place) for name, (recipe, place) in runs.items() if not (place / RESULTS).exists()]
    for stage in wanted:
        chain = list(ancestors(seed_of(stage.recipe, runs=folder), runs=folder))
        for place, known in reversed(chain):
            if known is not None and not Seed(place, known).is_there:
                seeds.setdefault(place, Stage(f"seed model {place.name}", known, place))
    return [*seeds.values(), *wanted]


# Stores.


def missing_stores(stages: Sequence[Stage], stores: Path) -> dict[str, str]:
    """The stores that are not there and that no run makes, each with the command that does."""
    made = {stage.recipe.data.store for stage in stages if stage.recipe.data.prepare is not None}
    named = dict.fromkeys(name for stage in stages for name in _stores_of(stage.recipe))
    absent = [name for name in named if name not in made and not _is_there(name, stores)]
    return {name: _command(name, stores) for name in absent}


def _stores_of(recipe: Recipe) -> Iterator[str]:
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
    if absent := missing_stores(stages, stores):
        what = "this store is" if len(absent) == 1 else f"these {len(absent)} stores are"
        lines = "".join(f"\n  {command}" for command in absent.values())
        raise InputError(f"{what} not there: {', '.join(absent)}; first give{lines}")
    for stage in stages:
        how = stage.recipe.data.prepare
        if isinstance(how, ManifestCorpus) and not _is_there(stage.recipe.data.store, stores):
            for path in manifests(how):
                if not path.is_file():
                    raise InputError(f"store {stage.recipe.data.store}: it is made of {path}, which is not there")


# All else.


@dataclass(frozen=True, eq=False)
class Ready:
    """A stage that was checked: its model without its numbers, and its federation, where it is one, with that model."""

    start: Recogniser
    federation: Federation | None = None


def make_ready(stages: Sequence[Stage], around: Surroundings) -> dict[Path, Ready | None]:
    """Make the stores that can be made, then check every stage as it will be checked when its turn comes.

    Returns what is known of each, by its folder; None where tokens are still to be made of texts.
    """
    check_stores(stages, around.stores)
    _check_given(stages, around.runs)
    for stage in stages:
        ensure_store(stage.recipe, around.stores, around.on_prepare)
    quietly = replace(around, say=lambda _: None)
    known: dict[Path, Ready | None] = {}
    for stage in stages:
        try:
            known[stage.folder] = _checked(stage.recipe, known, quietly)
        except InputError as error:
            raise InputError(f"{stage.name}: {error}" if len(stages) > 1 else str(error)) from None
    return known


def _check_given(stages: Sequence[Stage], runs: Path) -> None:
    """Refuse models and tokens that the user has, and that cannot be read, before stores are made: that takes long."""
    for stage in stages:
        seed = seed_of(stage.recipe, runs=runs)
        if seed is not None and seed.is_there and not seed.is_own:
            seed.load()
        if stage.recipe.reads_texts and stage.recipe.tokens.file is not None:
            load_tokens(Path(stage.recipe.tokens.file))


def _checked(recipe: Recipe, known: Mapping[Path, Ready | None], around: Surroundings) -> Ready | None:
    """A run as far as it can be known before, `known` being those that it may start from.

    None where tokens are still to be made of texts.
    """
    places = Places.of(recipe, around.stores)
    seed = seed_of(recipe, runs=around.runs)
    found = None
    if seed is not None and seed.is_there:
        found = seed.load()
    elif seed is not None:
        before = known.get(seed.folder)
        if before is None:
            return None
        found = before.start
    tokens = _tokens(recipe, places.store, found)
    if tokens is None:
        return None
    family = find_family(recipe.model.family)
    speaks = found is not None and found.family is family and family.recognition is not None
    language = (
        found.language if found is not None and speaks and recipe.federation is not None else places.store.language
    )
    start = sketch_recogniser(
        family, recipe.model.settings(tokens=tokens.size + 1), tokens, language=language, seed=found
    )
    if recipe.federation is None:
        training_rows(recipe, places.store)
        choose_measure(recipe, start, places, say=around.say)
        return Ready(start)
    federation = assemble(recipe, context=around, sketch=start)
    check_engine(recipe.federation.engine, start, around.device)
    return Ready(start, federation)


def _tokens(recipe: Recipe, store: Store, found: Recogniser | None) -> Tokens | None:
    federation = recipe.federation
    if federation is not None and found is not None and found.family.name == recipe.model.family:
        return found.tokens
    if federation is not None:
        return choose_tokens(recipe, store, may_read_texts=not federation.privacy.adds_noise)
    inherits = found is not None and has_pieces_of(store.language, found)
    if recipe.reads_texts and recipe.tokens.kind == "sentence_pieces" and recipe.tokens.file is None and not inherits:
        return None  # making them takes a while, and every text
    return choose_tokens(recipe, store, seed=found)
