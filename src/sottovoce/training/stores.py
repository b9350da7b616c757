"""The stores of a recipe: made where they are missing, found by name, fit to be scored."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from sottovoce.config import ManifestCorpus, Recipe, SyntheticCorpus
from sottovoce.corpora import synthetic, tsv
from sottovoce.corpora.holdout import hold_out
from sottovoce.errors import InputError
from sottovoce.evaluation.losses import select_speech
from sottovoce.evaluation.score import check_language, select_utterances
from sottovoce.models.saved import Recogniser
from sottovoce.store import Progress, Store, pack
from sottovoce.text.tokens import Tokens


def check_scored(places: Iterable[tuple[Store, str]], recogniser: Recogniser) -> None:
    """Find out before training, not at the first evaluation, that a set cannot be scored."""
    for store, split in places:
        if recogniser.family.recognition is None:
            select_speech(recogniser, store, split=split)
            continue
        check_language(recogniser, store)
        chosen = select_utterances(store, split=split)
        if not any(_writable(recogniser.tokens, text) for text in chosen.references):
            raise InputError(
                f"store {store.path}: not one of the {len(chosen.references):,} texts of split={split} can be written "
                "with the model's tokens, expected tokens of its language"
            )


def _writable(tokens: Tokens, text: str) -> bool:
    try:
        return bool(tokens.encode(text))
    except InputError:
        return False


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
    corpus = tsv.read(manifests(how), language=how.language)
    if how.hold_out:
        corpus = hold_out(corpus, how.hold_out, seed=how.seed)
    pack(corpus, place, on_progress=on_progress)


def manifests(corpus: ManifestCorpus) -> list[Path]:
    """Where its tables lie on this machine."""
    return [_expanded(path) for path in corpus.manifests]


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
