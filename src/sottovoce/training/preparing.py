"""What a run needs before it can train: its store, its token set, the utterances it trains on."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from sottovoce.config import ManifestCorpus, Recipe, SyntheticCorpus
from sottovoce.corpora import synthetic, tsv
from sottovoce.corpora.holdout import hold_out
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import check_language, select
from sottovoce.models.saved import Recogniser
from sottovoce.models.speech import Rows
from sottovoce.seeds import derive
from sottovoce.store import Progress, Store, pack
from sottovoce.text.normalise import alphabet
from sottovoce.text.tokens import CharacterTokens, Tokens, load_tokens, train_sentence_pieces
from sottovoce.users import PopulationSettings, build_population
from sottovoce.users.population import Population


def check_scored(places: Iterable[tuple[Store, str]], recogniser: Recogniser) -> None:
    """Find out before training, not at the first evaluation, that a set cannot be scored."""
    for store, split in places:
        check_language(recogniser, store)
        select(store, split=split)


def ensure_store(recipe: Recipe, stores: Path, on_progress: Callable[[Progress], None]) -> None:
    """Make the recipe's store if it can be made and is not there."""
    place, how = stores / recipe.data.store, recipe.data.prepare
    if how is None or (place / "store.json").exists():
        return
    if isinstance(how, SyntheticCorpus):
        made = synthetic.read(
            how.task, users=how.users, hours=how.hours, seed=how.seed, language=how.language, out=place
        )
        pack(made, place, on_progress=on_progress)
        return
    assert isinstance(how, ManifestCorpus)
    corpus = tsv.read([_expanded(path) for path in how.manifests], language=how.language)
    if how.hold_out:
        corpus = hold_out(corpus, how.hold_out, seed=how.seed)
    pack(corpus, place, on_progress=on_progress)


def _expanded(path: str) -> Path:
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise InputError(f"recipe: {path} names an environment variable that is not set")
    return Path(expanded)


def open_place(name: str, stores: Path) -> Store:
    """The store called `name` under `stores`, or at that path."""
    store = Store(stores / name if (stores / name).exists() or not Path(name).exists() else Path(name))
    store.check()
    return store


def find_place(place: str, recipe: Recipe, stores: Path) -> tuple[Store, str]:
    """`split` of the recipe's store, or `STORE:split`."""
    name, split = recipe.data.place(place)
    store = open_place(name, stores)
    if split not in store.splits:
        raise InputError(f"data: no split={split!r} in store {store.path}, expected one of {', '.join(store.splits)}")
    return store, split


def choose_tokens(recipe: Recipe, store: Store, *, may_read_texts: bool = True) -> Tokens:
    """Characters of the language (or of its training texts where it has no alphabet), sentence pieces, or a file.

    Where the texts belong to clients whose privacy is counted, they may not be read: which characters or words occur
    would leave the clients without being accounted for.
    """
    if recipe.tokens.file is not None:
        return load_tokens(Path(recipe.tokens.file))
    if recipe.tokens.kind == "characters" and (letters := alphabet(store.language)) is not None:
        return CharacterTokens.seen_in(letters)
    if not may_read_texts:
        raise InputError(
            f"tokens: kind={recipe.tokens.kind} for language={store.language} would be made from the clients' texts, "
            "which no ε covers; give tokens.file, or a seed model with its own"
        )
    texts = (store.utterance(row).text or "" for row in training_rows(recipe, store).tolist())
    if recipe.tokens.kind == "characters":
        return CharacterTokens.seen_in(texts)
    return train_sentence_pieces((text for text in texts if text), size=recipe.tokens.size)


def training_rows(recipe: Recipe, store: Store) -> Rows:
    """The utterances that central training takes: all speakers of its splits, or one part of them."""
    population = speakers(recipe, store)
    return np.sort(np.concatenate([client.utterances for client in population]))


def speakers(recipe: Recipe, store: Store) -> Population:
    """The people whose speech a recipe trains on, one client each."""
    part: Literal["seed", "federation"] = "seed" if recipe.data.part == "seed" else "federation"
    return population_of(
        recipe, store, PopulationSettings(split=recipe.data.train, seed_part=recipe.data.seed_part, part=part)
    )


def population_of(recipe: Recipe, store: Store, settings: PopulationSettings) -> Population:
    """The clients of a recipe; two recipes with one `people_seed` divide the same people alike."""
    population = build_population(store, settings, seed=derive(recipe.people_seed, "seed part"))
    if not len(population):
        raise InputError(f"store {store.path}: nobody to train on in data.train={', '.join(recipe.data.train)}")
    return population
