"""People who are called public, or on whom a model is judged, are no clients: not by name, and not by their recordings.

One comparison for all of them. By recordings it is sample for sample, which finds a recording under another name. It
does not find one that was cut, resampled or made louder: who does that has to be trusted.

Cost: of the clients' utterances only those are looked at that are as long as one of the others, to the sample; of these
256 samples are read, which is a page or two of a store's file, and the whole only where these are the same. What was
compared once is not compared again by this process (`beforehand`, and every run of a suite, ask for the same).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.config import Recipe
from sottovoce.models.speech import Rows
from sottovoce.privacy.settings import Mode
from sottovoce.store import Store
from sottovoce.training.seeding import Keys, Seed, ancestors, check_strangers, places_beside, saying_why, split_keys
from sottovoce.training.speakers import speakers_of, store_of
from sottovoce.training.stores import open_place
from sottovoce.users.population import Population

GLIMPSE = 256  # samples out of the middle, by which two recordings are first compared

_apart: set[bytes] = set()  # pairs of clients and others that were compared, and have no recording in common


def check_unheard(
    recipe: Recipe,
    clients: Population,
    evaluated: Mapping[str, tuple[Store, str]],
    *,
    seed: Seed | None,
    runs: Path,
    stores: Path,
) -> None:
    """Refuse to evaluate on clients: a model chosen by how well it does on them has looked at them once more.

    By name in every run. In a release also by their recordings, and these are not in its seed model either (whether
    clients are in that by name is asked where the plan is made).
    """
    for what, place in evaluated.items():
        check_strangers(clients, {what: split_keys(*place)}, instead="evaluate on people who are not")
    if recipe.federated.privacy.mode is Mode.SECURE:
        for what, (store, split) in evaluated.items():
            check_recordings(what, store, split_rows(store, split), clients=clients)
        _check_seed(seed, clients, runs=runs, stores=stores)


def check_public(where: str, store: Store, *, keys: Keys, rows: Rows, clients: Population, instead: str) -> None:
    """Refuse people of `store` with these `keys`, who have said `rows`, where a client is heard, and say what is right.

    `where` is the setting that calls them public.
    """
    check_strangers(clients, {where: keys}, instead=instead)
    check_recordings(where, store, rows, clients=clients)


def _check_seed(seed: Seed | None, clients: Population, *, runs: Path, stores: Path) -> None:
    """Refuse a seed model that was trained, or judged, on a client's recordings under another name."""
    for folder, recipe in ancestors(seed, runs=runs):
        if recipe is None:
            continue
        with saying_why(folder):
            own, beside = open_place(recipe.data.store, stores), places_beside(recipe, stores)
        check_recordings(f"seed model {folder}", own, speakers_of(recipe, own).utterance_rows(), clients=clients)
        for what, (store, split) in beside.items():
            check_recordings(f"seed model {folder}, {what}", store, split_rows(store, split), clients=clients)


def check_recordings(where: str, store: Store, rows: Rows, *, clients: Population) -> None:
    """Refuse `rows` of `store` where one of them is a client's recording. Clients on other machines have none here."""
    if isinstance(clients.store, Store) and (heard := heard_twice(clients, store, rows)) is not None:
        name = store.utterance(heard).id
        raise InputError(f"{where}: utterance {name} is a client's too, sample for sample, whatever its speaker's name")


def split_rows(store: Store, split: str) -> Rows:
    """All that the people in one split of a store have said."""
    users = store.splits[split]
    return np.arange(store.user_utterances[users.start], store.user_utterances[users.stop])


def heard_twice(population: Population, store: Store, rows: Rows) -> int | None:
    """The first of `rows` whose samples a client of `population` has too; None where there is none.

    A recording in which all samples are equal is nobody's.
    """
    clients = store_of(population)
    pair = _pair(population, clients, store, rows)
    if pair in _apart:
        return None
    theirs = population.utterance_rows()
    lengths = store.audio_offsets[rows + 1] - store.audio_offsets[rows]
    their_lengths = clients.audio_offsets[theirs + 1] - clients.audio_offsets[theirs]
    in_question = np.intersect1d(lengths[lengths > 0], their_lengths)
    public: dict[bytes, list[int]] = {}
    for row in rows[np.isin(lengths, in_question)].tolist():
        public.setdefault(_glimpse(store, row), []).append(row)
    for row in theirs[np.isin(their_lengths, in_question)].tolist():
        for other in public.get(_glimpse(clients, row), ()):
            samples = store.samples(other)
            if np.array_equal(clients.samples(row), samples) and np.ptp(samples):
                return other
    _apart.add(pair)
    return None


def _glimpse(store: Store, row: int) -> bytes:
    """A digest of the length of an utterance and of what is in its middle."""
    length = int(store.audio_offsets[row + 1] - store.audio_offsets[row])
    middle = store.samples(row, start=max(0, (length - GLIMPSE) // 2), count=min(length, GLIMPSE))
    return hashlib.blake2b(middle.tobytes(), digest_size=16, salt=length.to_bytes(8)).digest()


def _pair(population: Population, clients: Store, store: Store, rows: Rows) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (clients.path, clients.digest, population.digest, store.path, store.digest):
        digest.update(f"{part}\n".encode())
    digest.update(rows.astype("<i8").tobytes())
    return digest.digest()
