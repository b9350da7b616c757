"""Whose texts a token set was made from. A release takes none that clients' texts, or nobody knows whose, have made.

    the alphabet of a language     nobody's
    a file of `sottovoce tokens`   those of the store that it names (`made_from`), as it was then
    a file in a run's folder       those whose texts that run's tokens were made from: its recipe says it
    a seed model                   the same

Which words, or rare characters, are pieces of their own tells what was said: one speaker who says 'eeeeeee' adds it to
the pieces that are published with the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.config import Recipe, load_recipe
from sottovoce.errors import InputError
from sottovoce.files import read_json
from sottovoce.models.family import find_family
from sottovoce.models.speech import Rows
from sottovoce.privacy.settings import Mode
from sottovoce.store import Store
from sottovoce.text.normalise import alphabet
from sottovoce.text.tokens import MADE_FROM, CharacterTokens, Tokens, load_tokens
from sottovoce.training.run_folder import CONFIG, INPUTS
from sottovoce.training.seeding import Keys, keys_of, run_of, saying_why, seed_of
from sottovoce.training.speakers import speakers_of
from sottovoce.training.stores import open_place
from sottovoce.training.strangers import check_recordings
from sottovoce.users.population import Population

NOBODYS = "the alphabet of the language: nobody's texts"
HOW = "make them with `sottovoce tokens STORE:split`, from people who are no clients"


@dataclass(frozen=True)
class Makers:
    """Some of those whose texts made a token set. `unknown` says why nobody knows who they are, where that is so."""

    where: str
    words: str
    store: Store | None = None
    keys: Keys | None = None
    rows: Rows | None = None
    unknown: str | None = None


def check_tokens(
    recipe: Recipe, clients: Population, *, runs: Path, stores: Path, say: Callable[[str], None] = lambda _: None
) -> None:
    """Refuse a release whose tokens clients' texts have made, or nobody knows whose; a simulation says so.

    People in a seed model are compared with clients where the plan is made; here it is about files.
    """
    is_release = recipe.federated.privacy.mode is Mode.SECURE
    for one in makers_of(recipe, runs=runs, stores=stores):
        problem = _problem(one, clients)
        if problem is not None and is_release:
            raise InputError(f"{problem}; a release needs others: {HOW}")
        if problem is not None:
            say(problem)
        elif is_release and one.store is not None and one.rows is not None:
            check_recordings(one.where, one.store, one.rows, clients=clients)


def _problem(one: Makers, clients: Population) -> str | None:
    nameless = not isinstance(clients.store, Store) and clients.settings.clients == "silo"
    unknown = one.unknown or ("people of a silo have no names here" if nameless and one.keys is not None else None)
    if unknown is not None:
        return f"{one.where}: nobody can say whether clients' texts made these tokens ({unknown})"
    both = 0 if one.keys is None else len(np.intersect1d(one.keys, keys_of(clients)))
    return f"{one.where}: {both} of those whose texts made these tokens are clients" if both else None


def describe_tokens(recipe: Recipe, tokens: Tokens, *, runs: Path, stores: Path) -> dict[str, Any]:
    """The `tokens` of a run for its results, and whose texts made them: stores by their names, and nobody's name."""
    found = [one.words for one in makers_of(recipe, runs=runs, stores=stores)]
    made_from = "; ".join(dict.fromkeys(found)) or (NOBODYS if tokens.size else "nothing")
    return {"kind": tokens.as_json()["kind"], "size": tokens.size, "made_from": made_from}


def makers_of(recipe: Recipe, *, runs: Path, stores: Path) -> Iterator[Makers]:
    """Everybody whose texts may have made the tokens of `recipe`; nothing where that is nobody.

    Of a recipe with a seed model that is everybody whose texts made the seed's, even where it turns out not to use
    them.
    """
    yield from _makers(recipe, runs=runs, stores=stores, inputs=None, seen=set())


def _makers(
    recipe: Recipe, *, runs: Path, stores: Path, inputs: dict[str, Any] | None, seen: set[Path]
) -> Iterator[Makers]:
    """`inputs` are those of the run with this recipe, where it was made before."""
    if not find_family(recipe.model.family).training.needs_text:
        return
    if recipe.tokens.file is not None:
        language = open_place(recipe.data.store, stores).language
        yield from _file_makers(Path(recipe.tokens.file), language=language, runs=runs, stores=stores, seen=seen)
        return
    seed = seed_of(recipe, runs=runs)
    if seed is not None and seed.folder not in seen:
        where = f"seed model {seed.folder}"
        run = run_of(seed.folder)
        known = read_json(run / INPUTS) if run is not None and (run / INPUTS).exists() else None
        if seed.recipe is None:
            yield Makers(where, f"those of a model {seed.folder.name}", unknown="its recipe is missing")
        else:
            with saying_why(seed.folder):
                yield from _makers(seed.recipe, runs=runs, stores=stores, inputs=known, seen={*seen, seed.folder})
    yield from _own_makers(recipe, stores=stores, inputs=inputs)


def _own_makers(recipe: Recipe, *, stores: Path, inputs: dict[str, Any] | None) -> Iterator[Makers]:
    """Those whose texts a run reads for tokens: whom it trains on, unless they are clients (`choose_tokens`)."""
    federation = recipe.federation
    if federation is not None and (federation.privacy.adds_noise or recipe.tokens.kind == "sentence_pieces"):
        return
    store = open_place(recipe.data.store, stores)
    if recipe.tokens.kind == "characters" and alphabet(store.language) is not None:
        return
    people = speakers_of(recipe, store)
    then = store.digest if inputs is None else inputs.get("data.store digest")
    part = f", part {recipe.data.part}" if recipe.data.seed_part is not None else ""
    words = f"texts of store {store.path.name}, {', '.join(people.settings.splits)}{part}"
    where = f"tokens of {recipe.about!r}"
    if then != store.digest:
        yield Makers(where, words, unknown=f"store {store.path.name} is no longer the one that made them")
    else:
        yield Makers(where, words, store, keys_of(people), people.utterance_rows())


def _file_makers(path: Path, *, language: str, runs: Path, stores: Path, seen: set[Path]) -> Iterator[Makers]:
    where = f"tokens.file={path}"
    if is_fixed(load_tokens(path), language) or path.resolve() in seen:
        return
    run = run_of(path.parent)
    if run is not None:
        known = read_json(run / INPUTS) if (run / INPUTS).exists() else {}
        recipe = load_recipe(str(run / CONFIG))
        for one in _makers(recipe, runs=runs, stores=stores, inputs=known, seen={*seen, path.resolve()}):
            yield Makers(where, one.words, one.store, one.keys, one.rows, one.unknown)
        return
    sources = read_json(path).get(MADE_FROM)
    if not isinstance(sources, list):
        yield Makers(where, f"not known: {path.name} does not say", unknown=f"the file has no {MADE_FROM!r}")
        return
    if not sources:
        yield Makers(where, f"no texts of any store, as {path.name} declares")
    for source in sources:
        yield _store_makers(source, where=where, stores=stores, beside=path.parent)


def is_fixed(tokens: Tokens, language: str) -> bool:
    """Whether a set is the alphabet of a language, or empty: no text has made it."""
    letters = alphabet(language)
    return not tokens.size or (
        isinstance(tokens, CharacterTokens) and letters is not None and {*tokens.characters} == {*letters}
    )


def _store_makers(source: Any, *, where: str, stores: Path, beside: Path) -> Makers:
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
        return Makers(where, words, store, np.asarray(store.user_keys[users.start : users.stop]), rows)
    return Makers(where, words, unknown=f"store {name} as it was then is missing in {stores}")
