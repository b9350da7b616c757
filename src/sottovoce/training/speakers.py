"""Whose speech a recipe trains on, and the token set that it is written in."""

from pathlib import Path
from typing import Literal

import numpy as np

from sottovoce.config import Recipe
from sottovoce.errors import InputError
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.speech import Rows
from sottovoce.seeds import derive
from sottovoce.store import Store
from sottovoce.text.normalise import alphabet
from sottovoce.text.tokens import (
    NO_TOKENS,
    CharacterTokens,
    SentencePieceTokens,
    Tokens,
    load_tokens,
    train_sentence_pieces,
)
from sottovoce.users import PopulationSettings, build_population
from sottovoce.users.population import Population

SEED = "seed"


def training_rows(recipe: Recipe, store: Store) -> Rows:
    """The utterances that central training takes: all speakers of its splits, or one part of them."""
    population = speakers_of(recipe, store)
    return np.sort(np.concatenate([client.utterances for client in population]))


def speakers_of(recipe: Recipe, store: Store) -> Population:
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


def store_of(people: Population) -> Store:
    """Where their speech lies."""
    assert isinstance(people.store, Store)
    return people.store


def check_silos(recipe: Recipe, population: Population) -> None:
    """Refuse more silos than there are people to fill them.

    Not where somebody is promised privacy: how many people there are is no public number, and an empty silo is a
    client like the others.
    """
    silos, people = population.settings.silos, len(population.user_rows())
    if silos is not None and silos > people and not recipe.federated.privacy.adds_noise:
        raise InputError(f"federation.clients.silos={silos}: there are only {people} speakers to fill them")


def beside_the_paper(recipe: Recipe, *, clients: int) -> str | None:
    """How far the clients that there are differ from the paper's, in words; None where no paper says how many it had.

    >>> from sottovoce.config import load_recipe
    >>> print(beside_the_paper(load_recipe("pelikan2025/table01/sigma-3e-6-dim"), clients=34_000))
    34,000 clients, 753 fewer than in the paper (34,753; −2.2 %): q = S/K and ε are worked out for those there are
    """
    theirs = None if recipe.paper is None else recipe.paper.population_size
    if theirs is None:
        return None
    if clients == theirs:
        return f"{clients:,} clients, as many as in the paper"
    more = f"{abs(clients - theirs):,} {'more' if clients > theirs else 'fewer'}"
    share = f"{100 * (clients - theirs) / theirs:+.2g}".replace("-", "\N{MINUS SIGN}")
    counted = ": q = S/K and ε are worked out for those there are" if recipe.federated.privacy.adds_noise else ""
    return f"{clients:,} clients, {more} than in the paper ({theirs:,}; {share} %){counted}"


def order_of_time(population: Population) -> str | None:
    """Whose time lines are not known to be in order, in words; None where all are."""
    store = store_of(population)
    rows = population.user_rows()
    unknown = int((~store.users_in_time[rows]).sum())
    if not unknown:
        return None
    return (
        f"local.time_line: of {unknown:,} of {len(rows):,} speakers nobody knows in which order they spoke; theirs is "
        "that of their utterances' names"
    )


def choose_tokens(
    recipe: Recipe, store: Store, *, may_read_texts: bool = True, seed: Recogniser | None = None
) -> Tokens:
    """Characters of the language (or of its training texts where it has no alphabet), sentence pieces, or a file.

    None for a family that learns from speech alone.
    Sentence pieces are made once: a run that goes on from a model `seed` with pieces of its language has these, and so
    the model's output layers.
    Where the texts belong to clients whose privacy is counted, they may not be read: which characters or words occur
    would leave the clients without being accounted for. Sentence pieces are never made from clients' texts, which stay
    with them: those of the released code of Gao et al. are another set on every client.
    """
    if not find_family(recipe.model.family).training.needs_text:
        return NO_TOKENS
    if recipe.tokens.file is not None:
        return load_tokens(Path(recipe.tokens.file))
    if seed is not None and recipe.tokens.kind == "sentence_pieces" and has_pieces_of(store.language, seed):
        return seed.tokens
    if recipe.tokens.kind == "characters" and (letters := alphabet(store.language)) is not None:
        return CharacterTokens.seen_in(letters)
    if not may_read_texts or (recipe.federation is not None and recipe.tokens.kind == "sentence_pieces"):
        raise InputError(
            f"tokens: kind={recipe.tokens.kind} for language={store.language} would be made from the clients' texts, "
            "which stay with them; give tokens.file, or a seed model with its own"
        )
    texts = (store.utterance(row).text or "" for row in training_rows(recipe, store).tolist())
    if recipe.tokens.kind == "characters":
        return CharacterTokens.seen_in(texts)
    return train_sentence_pieces((text for text in texts if text), size=recipe.tokens.size)


def has_pieces_of(language: str, seed: Recogniser) -> bool:
    """Whether `seed` writes sentence pieces of that language."""
    return isinstance(seed.tokens, SentencePieceTokens) and seed.language == language
