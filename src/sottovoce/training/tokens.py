"""Which tokens a run writes, and whose texts they were made from.

    the alphabet of a language     nobody's
    a file of `sottovoce tokens`   those of the store that it names (`made_from`), as it was then
    a file in a run's folder       those that this run's tokens were made from, by its recipe
    `take_from`, a seed model      the same

A release refuses tokens made from clients' texts, or from unknown ones: a piece of its own shows what was said. One
speaker who says 'eeeeeee' adds it to the pieces that are published with the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json
from sottovoce.config import Recipe, load_recipe
from sottovoce.data.loading import Rows
from sottovoce.data.population import Population
from sottovoce.data.store import Store
from sottovoce.data.text.normalisation import alphabet
from sottovoce.data.text.tokens import (
    MADE_FROM,
    NO_TOKENS,
    CharacterTokens,
    SentencePieceTokens,
    Tokens,
    load_tokens,
    train_sentence_pieces,
)
from sottovoce.models.family import find_family
from sottovoce.models.model_files import TOKENS, locate_model
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.settings import Mode
from sottovoce.training.disjointness import (
    check_disjoint_recordings,
    explain_missing_stores,
    read_population_keys,
)
from sottovoce.training.parent_model import ParentModel, find_enclosing_run, find_parent_model, find_token_parent
from sottovoce.training.run_data import Keys, build_training_population, list_training_rows, open_named_store
from sottovoce.training.run_folder import CONFIG, INPUTS

NOBODYS = "the alphabet of the language: nobody's texts"
HOW = "make them with `sottovoce tokens STORE:split`, from people who are no clients"


def choose_tokens(
    recipe: Recipe,
    store: Store,
    *,
    may_read_texts: bool = True,
    parent: Recogniser | None = None,
    taken: Tokens | None = None,
) -> Tokens:
    """Characters of the language (or of its training texts where it has no alphabet), sentence pieces, or others'.

    None for a family that learns from speech alone. `taken` are those of the run that the recipe takes them from. A
    run that starts from `parent` with sentence pieces of its language takes these, and so the model's output layers.
    Texts of clients with privacy may not be read: which characters or words occur would not be accounted for. Sentence
    pieces are never made from clients' texts, which stay with them (the released code of Gao et al. makes another set
    on every client).
    """
    if not find_family(recipe.model.family).training.needs_text:
        return NO_TOKENS
    if (own := find_own_tokens(recipe, store.language)) is not None:
        return own
    if recipe.tokens.file is not None:
        return load_tokens(Path(recipe.tokens.file))
    if recipe.tokens.take_from is not None:
        assert taken is not None, "its tokens are loaded, or known to be missing, before"
        return taken
    if parent is not None and recipe.tokens.kind == "sentence_pieces" and has_sentence_pieces(parent, store.language):
        return parent.tokens
    if recipe.tokens.kind == "characters" and (letters := alphabet(store.language)) is not None:
        return CharacterTokens.seen_in(letters)
    if not may_read_texts or (recipe.federation is not None and recipe.tokens.kind == "sentence_pieces"):
        raise InputError(
            f"tokens: kind={recipe.tokens.kind} for language={store.language} would be made from the clients' texts, "
            "which stay with them; give tokens.file, or a seed model with its own, or tokens.take_from"
        )
    texts = (store.utterance(row).text or "" for row in list_training_rows(recipe, store).tolist())
    if recipe.tokens.kind == "characters":
        return CharacterTokens.seen_in(texts)
    return train_sentence_pieces((text for text in texts if text), size=recipe.tokens.size)


def find_own_tokens(recipe: Recipe, language: str) -> Tokens | None:
    """The tokens that a pretrained model brings along, which no text of a client has made; None where it has none."""
    found: Tokens | None = find_family(recipe.model.family).training.own_tokens(recipe.model, language)
    if found is not None and recipe.tokens != type(recipe.tokens)():
        raise InputError("tokens: a pretrained model has tokens of its own; expected none")
    return found


def load_taken_tokens(recipe: Recipe, *, runs: Path) -> Tokens | None:
    """The tokens of the run that a recipe takes them from, which must be there; None where it takes none."""
    parent = find_token_parent(recipe, runs=runs)
    return None if parent is None else load_tokens(locate_model(parent.folder) / TOKENS)


def check_no_other_tokens(recipe: Recipe) -> None:
    """Refuse tokens from elsewhere for a federated run that starts from a model of its family, which has its own."""
    if (name := recipe.tokens.take_from) is not None:
        raise InputError(f"tokens.take_from={name}: the seed model has tokens of its own; expected none")


def has_sentence_pieces(model: Recogniser, language: str) -> bool:
    """Whether `model` writes sentence pieces of that language."""
    return isinstance(model.tokens, SentencePieceTokens) and model.language == language


@dataclass(frozen=True)
class TokenSource:
    """Some of those whose texts made a token set; `unknown` says why they are not known, where that is so."""

    where: str
    words: str
    store: Store | None = None
    keys: Keys | None = None
    rows: Rows | None = None
    unknown: str | None = None


def check_token_sources(
    recipe: Recipe, clients: Population, *, runs: Path, stores: Path, say: Callable[[str], None] = lambda _: None
) -> None:
    """Refuse a release whose tokens are made from clients' texts, or from unknown ones; a simulation only warns.

    People in a seed model are compared with clients where the plan is made; here it is about files.
    """
    is_release = recipe.federated.privacy.mode is Mode.SECURE
    for one in list_token_sources(recipe, runs=runs, stores=stores):
        problem = _problem(one, clients)
        if problem is not None and is_release:
            raise InputError(f"{problem}; a release needs others: {HOW}")
        if problem is not None:
            say(problem)
        elif is_release and one.store is not None and one.rows is not None:
            check_disjoint_recordings(one.where, one.store, one.rows, clients=clients)


def _problem(one: TokenSource, clients: Population) -> str | None:
    nameless = not isinstance(clients.store, Store) and clients.settings.clients == "silo"
    unknown = one.unknown or ("people of a silo have no names here" if nameless and one.keys is not None else None)
    if unknown is not None:
        return f"{one.where}: it is not known whether clients' texts made these tokens ({unknown})"
    both = 0 if one.keys is None else len(np.intersect1d(one.keys, read_population_keys(clients)))
    return f"{one.where}: {both} of those whose texts made these tokens are clients" if both else None


def describe_tokens(recipe: Recipe, tokens: Tokens, *, runs: Path, stores: Path) -> dict[str, Any]:
    """The `tokens` of a run for its results, and whose texts made them: stores by name, no people."""
    found = [one.words for one in list_token_sources(recipe, runs=runs, stores=stores)]
    made_from = "; ".join(dict.fromkeys(found)) or (NOBODYS if tokens.size else "nothing")
    return {"kind": tokens.as_json()["kind"], "size": tokens.size, "made_from": made_from}


def list_token_sources(recipe: Recipe, *, runs: Path, stores: Path) -> Iterator[TokenSource]:
    """Everybody whose texts may have made the tokens of `recipe`, those of its seed model included."""
    yield from _list_sources(recipe, runs=runs, stores=stores, inputs=None, seen=set())


def _list_sources(
    recipe: Recipe, *, runs: Path, stores: Path, inputs: dict[str, Any] | None, seen: set[Path]
) -> Iterator[TokenSource]:
    """`inputs` are those of the run with this recipe, where it was made before."""
    if not find_family(recipe.model.family).training.needs_text:
        return
    if find_own_tokens(recipe, open_named_store(recipe.data.store, stores).language) is not None:
        return
    if recipe.tokens.file is not None:
        language = open_named_store(recipe.data.store, stores).language
        yield from _list_file_sources(Path(recipe.tokens.file), language=language, runs=runs, stores=stores, seen=seen)
        return
    if (taken := find_token_parent(recipe, runs=runs)) is not None:
        yield from _list_parent_sources(taken, runs=runs, stores=stores, seen=seen)
        return
    if (parent := find_parent_model(recipe, runs=runs)) is not None:
        yield from _list_parent_sources(parent, runs=runs, stores=stores, seen=seen)
    yield from _list_own_sources(recipe, stores=stores, inputs=inputs)


def _list_parent_sources(parent: ParentModel, *, runs: Path, stores: Path, seen: set[Path]) -> Iterator[TokenSource]:
    if parent.folder in seen:
        return
    if parent.recipe is None:
        where = f"{parent.role} {parent.folder}"
        yield TokenSource(where, f"those of a model {parent.folder.name}", unknown="its recipe is missing")
        return
    run = find_enclosing_run(parent.folder)
    known = None if run is None else read_json(run / INPUTS) if (run / INPUTS).exists() else {}
    with explain_missing_stores(parent.folder):
        yield from _list_sources(parent.recipe, runs=runs, stores=stores, inputs=known, seen={*seen, parent.folder})


def _list_own_sources(recipe: Recipe, *, stores: Path, inputs: dict[str, Any] | None) -> Iterator[TokenSource]:
    """Those whose texts a run reads for tokens: whom it trains on, unless they are clients (`choose_tokens`)."""
    federation = recipe.federation
    if federation is not None and (federation.privacy.adds_noise or recipe.tokens.kind == "sentence_pieces"):
        return
    store = open_named_store(recipe.data.store, stores)
    if recipe.tokens.kind == "characters" and alphabet(store.language) is not None:
        return
    people = build_training_population(recipe, store)
    then = store.digest if inputs is None else inputs.get("data.store digest")
    part = f", part {recipe.data.part}" if recipe.data.seed_part is not None else ""
    words = f"texts of store {store.path.name}, {', '.join(people.settings.splits)}{part}"
    where = f"tokens of {recipe.about!r}"
    if then != store.digest:
        yield TokenSource(where, words, unknown=f"store {store.path.name} is no longer the one that made them")
    else:
        yield TokenSource(where, words, store, read_population_keys(people), people.utterance_rows())


def _list_file_sources(
    path: Path, *, language: str, runs: Path, stores: Path, seen: set[Path]
) -> Iterator[TokenSource]:
    where = f"tokens.file={path}"
    if is_alphabet(load_tokens(path), language) or path.resolve() in seen:
        return
    run = find_enclosing_run(path.parent)
    if run is not None:
        known = read_json(run / INPUTS) if (run / INPUTS).exists() else {}
        recipe = load_recipe(str(run / CONFIG))
        for one in _list_sources(recipe, runs=runs, stores=stores, inputs=known, seen={*seen, path.resolve()}):
            yield TokenSource(where, one.words, one.store, one.keys, one.rows, one.unknown)
        return
    sources = read_json(path).get(MADE_FROM)
    if not isinstance(sources, list):
        yield TokenSource(where, f"not known: {path.name} does not say", unknown=f"the file has no {MADE_FROM!r}")
        return
    if not sources:
        yield TokenSource(where, f"no texts of any store, as {path.name} declares")
    for source in sources:
        yield _find_store_source(source, where=where, stores=stores, beside=path.parent)


def is_alphabet(tokens: Tokens, language: str) -> bool:
    """Whether a set is the alphabet of a language, or empty: no text has made it."""
    letters = alphabet(language)
    return not tokens.size or (
        isinstance(tokens, CharacterTokens) and letters is not None and {*tokens.characters} == {*letters}
    )


def _find_store_source(source: Any, *, where: str, stores: Path, beside: Path) -> TokenSource:
    """The people of a store that a token file names: looked for among the stores, and beside the file."""
    try:
        name, digest, split = str(source["store"]), source["digest"], source["split"]
    except (KeyError, TypeError):
        raise InputError(f"{where}: {MADE_FROM} is damaged: expected store, digest and split of each") from None
    words = f"texts of store {name}" + ("" if split is None else f", {split}")
    for place in (stores / name, beside / name):
        if not place.is_dir():
            continue
        store = Store(place)
        if store.digest != digest or not (split is None or split in store.splits):
            continue
        store.check()
        users = range(store.user_count) if split is None else store.splits[split]
        rows = np.arange(store.user_utterances[users.start], store.user_utterances[users.stop])
        return TokenSource(where, words, store, np.asarray(store.user_keys[users.start : users.stop]), rows)
    return TokenSource(where, words, unknown=f"store {name} as it was then is missing in {stores}")
