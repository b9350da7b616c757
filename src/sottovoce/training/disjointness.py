"""Clients are in no other set: not among the speakers that models are chosen, tested or publicly trained on, and with
privacy not in the seed model.

Speakers are compared by name, recordings sample for sample, which finds a recording under another name. It does not
find one that was cut, resampled or made louder: whoever does that has to be trusted.

Cost: of the clients' utterances only those are read that are exactly as long as one of the others; of these 256
samples, and the whole where these are equal. What was compared once is not compared again by this process: the
preflight checks and every run of a suite ask for the same.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json
from sottovoce.config import Recipe
from sottovoce.data.loading import Rows
from sottovoce.data.population import Population, shared_speakers
from sottovoce.data.store import Store
from sottovoce.privacy.settings import Mode
from sottovoce.training.parent_model import ParentModel, find_enclosing_run, iterate_ancestors
from sottovoce.training.run_context import RunContext
from sottovoce.training.run_data import (
    SERVER_PASS,
    SHARED_DEV,
    Keys,
    People,
    RunData,
    build_training_population,
    find_server_people,
    find_split_people,
    list_split_rows,
    open_named_store,
    open_split,
    require_local_store,
)
from sottovoce.training.run_folder import INPUTS

EXCERPT_SAMPLES = 256  # out of the middle, by which two recordings are first compared

_disjoint: set[bytes] = set()  # digests of pairs that were compared and have no recording in common


def check_evaluation_speakers(
    recipe: Recipe, clients: Population, data: RunData, *, parent: ParentModel | None, context: RunContext
) -> None:
    """Refuse to evaluate on clients: a model chosen by how well it does on them has seen them once more.

    By name in every run. A release also compares recordings, with those of its seed model too (whether clients are in
    that by name is checked where the plan is made).
    """
    for what, split in data.evaluated.items():
        keys = find_split_people(*split).keys
        check_disjoint_speakers(what, keys, clients, instead="evaluate on people who are not")
    if recipe.federated.privacy.mode is not Mode.SECURE:
        return
    for what, split in data.evaluated.items():
        check_disjoint_recordings(what, split[0], list_split_rows(*split), clients=clients)
    for folder, known in iterate_ancestors(parent, runs=context.runs):
        if known is None:
            continue
        with explain_missing_stores(folder):
            own, others = open_named_store(known.data.store, context.stores), _find_others(known, context.stores)
        rows = build_training_population(known, own).utterance_rows()
        check_disjoint_recordings(f"seed model {folder}", own, rows, clients=clients)
        for what, people in others.items():
            check_disjoint_recordings(f"seed model {folder}, {what}", people.store, people.rows, clients=clients)


# By name.


def read_population_keys(people: Population) -> Keys:
    """The keys of all speakers in a population."""
    return np.asarray(people.store.user_keys[people.user_rows()])


def check_disjoint_speakers(where: str, keys: Keys, clients: Population, *, instead: str) -> None:
    """Refuse speakers with these `keys` where one is a client; `where` is the setting that names them."""
    both = np.intersect1d(read_population_keys(clients), keys)
    if len(both):
        raise InputError(f"{where}: {len(both)} of its speakers are clients too; {instead}")


@dataclass(frozen=True)
class ClientsInParent:
    """How many clients a seed model was trained on, and the ancestors of which that is unknown."""

    clients: int
    unknown: tuple[Path, ...]


def count_clients_in_parent(
    parent: ParentModel | None, clients: Population, *, runs: Path, stores: Path, is_planned: bool = False
) -> ClientsInParent:
    """Compare the speakers of a seed model, and of whatever it started from, with the `clients`.

    Speakers by whom its checkpoint was chosen, or whom its server trained on, count too. Where a store is no longer the
    one that it was trained on, its speakers are unknown. If `is_planned`, a model that is not trained yet will be
    trained on those who are in its store now.
    """
    shared: set[int] = set()
    unknown = []
    for folder, recipe in iterate_ancestors(parent, runs=runs):
        if recipe is None:
            unknown.append(folder)
            continue
        with explain_missing_stores(folder):
            will_be_trained = is_planned and not ParentModel(folder, recipe).is_trained
            if not (will_be_trained or _has_same_stores(folder, recipe, stores)):
                unknown.append(folder)
            people = build_training_population(recipe, open_named_store(recipe.data.store, stores))
            shared |= set(shared_speakers(people, clients).tolist())
            for others in _find_others(recipe, stores).values():
                shared |= set(np.intersect1d(others.keys, read_population_keys(clients)).tolist())
    return ClientsInParent(len(shared), tuple(unknown))


@contextmanager
def explain_missing_stores(folder: Path) -> Iterator[None]:
    """Within, an error about a store says what it is needed for: a user may know only the model's folder."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"seed model {folder}: the stores that it was trained and chosen on are needed, to find out whether some "
            f"of the clients are in them ({error}); give those stores, or for a simulation the model without its run: "
            "a copy of the run's folder `model`"
        ) from None


def _has_same_stores(folder: Path, recipe: Recipe, stores: Path) -> bool:
    """Whether the stores are those that the run in `folder` has read."""
    run = find_enclosing_run(folder)
    if run is None or not (run / INPUTS).exists():
        return False
    recorded = read_json(run / INPUTS)
    now = {"data.store": open_named_store(recipe.data.store, stores)}
    now |= {what: people.store for what, people in _find_others(recipe, stores).items()}
    return all(recorded.get(f"{what} digest") == store.digest for what, store in now.items())


def _find_others(recipe: Recipe, stores: Path) -> dict[str, People]:
    """Those whose speech a run has used besides its clients'."""
    settings = recipe.federation
    shared = None if settings is None or settings.weighed_on is None else settings.weighed_on.data
    named = {"data.dev": recipe.data.dev, SHARED_DEV: shared}
    found = {
        what: find_split_people(*open_split(place, recipe, stores))
        for what, place in named.items()
        if place is not None
    }
    server = find_server_people(recipe, stores)
    return found if server is None else found | {SERVER_PASS: server}


# By recording.


def check_disjoint_recordings(where: str, store: Store, rows: Rows, *, clients: Population) -> None:
    """Refuse `rows` of `store` where one is a client's recording. Clients on other machines have none here."""
    if isinstance(clients.store, Store) and (shared := find_shared_recording(clients, store, rows)) is not None:
        name = store.utterance(shared).id
        raise InputError(f"{where}: utterance {name} is a client's too, sample for sample, whatever its speaker's name")


def find_shared_recording(population: Population, store: Store, rows: Rows) -> int | None:
    """The first of `rows` whose samples a client of `population` has too; None where there is none.

    A recording in which all samples are equal belongs to nobody.
    """
    clients = require_local_store(population)
    pair = _digest_pair(population, clients, store, rows)
    if pair in _disjoint:
        return None
    theirs = population.utterance_rows()
    lengths = store.audio_offsets[rows + 1] - store.audio_offsets[rows]
    their_lengths = clients.audio_offsets[theirs + 1] - clients.audio_offsets[theirs]
    in_both = np.intersect1d(lengths[lengths > 0], their_lengths)
    public: dict[bytes, list[int]] = {}
    for row in rows[np.isin(lengths, in_both)].tolist():
        public.setdefault(_digest_excerpt(store, row), []).append(row)
    for row in theirs[np.isin(their_lengths, in_both)].tolist():
        for other in public.get(_digest_excerpt(clients, row), ()):
            samples = store.samples(other)
            if np.array_equal(clients.samples(row), samples) and np.ptp(samples):
                return other
    _disjoint.add(pair)
    return None


def _digest_excerpt(store: Store, row: int) -> bytes:
    """A digest of an utterance's length and of the samples in its middle."""
    length = int(store.audio_offsets[row + 1] - store.audio_offsets[row])
    first = max(0, (length - EXCERPT_SAMPLES) // 2)
    middle = store.samples(row, start=first, count=min(length, EXCERPT_SAMPLES))
    return hashlib.blake2b(middle.tobytes(), digest_size=16, salt=length.to_bytes(8)).digest()


def _digest_pair(population: Population, clients: Store, store: Store, rows: Rows) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (clients.path, clients.digest, population.digest, store.path, store.digest):
        digest.update(f"{part}\n".encode())
    digest.update(rows.astype("<i8").tobytes())
    return digest.digest()
