"""A node's own speech: a folder of recordings as a store in its home, and the one client of the recipe that it is.

HOME/speech/store           as `sottovoce prepare folder` would write it; nobody else's to read
HOME/speech/prepared.json   what the folder looked like then: names, sizes and times of its files, as one digest
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json, write_json
from sottovoce.base.seeds import derive
from sottovoce.config import Recipe
from sottovoce.data.audio.narrow_band import describe_store_band
from sottovoce.data.corpora import folder
from sottovoce.data.population import Population, build_population, make_population
from sottovoce.data.speakers import Groups, select_speakers
from sottovoce.data.store import PackingProgress, Store, pack_corpus
from sottovoce.data.store.layout import HEADER

SPEECH, STORE, PREPARED = "speech", "store", "prepared.json"

_SILO = re.compile(r"silo-([0-9]{1,9})")


def open_node_store(
    data: Path,
    *,
    home: Path,
    user: str | None,
    language: str,
    say: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[PackingProgress], None] = lambda _: None,
) -> Store:
    """The store at `data`, or one made of the recordings there, which is made again where they have changed."""
    if not data.is_dir() or (data / HEADER).exists():
        return Store(data)  # which says what is wrong with it
    place = home / SPEECH
    listing = _list_files(data, user=user, language=language)
    if not (place / PREPARED).exists() or read_json(place / PREPARED) != listing:
        corpus = folder.read_folder(data, user=user, language=language)
        for private in (home, place):
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
        pack_corpus(corpus, place / STORE, on_progress=on_progress)
        write_json(place / PREPARED, listing)
        for line in _describe_store(Store(place / STORE)):
            say(line)
    return Store(place / STORE)


def _list_files(data: Path, **asked: str | None) -> dict[str, Any]:
    """What shows whether a folder has changed, without reading its files."""
    found = []
    for name in folder.list_files(data):
        status = os.stat(data / name, follow_symlinks=False)
        found.append((name, status.st_size, status.st_mtime_ns))
    listed = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    return {"folder": str(data.resolve()), "files": len(found), "listing": listed} | asked


def _describe_store(store: Store) -> list[str]:
    """How much speech there is, and what is wrong with it."""
    amounts = f"{store.user_count:,} users, {store.utterance_count:,} utterances, {store.seconds / 3600:.2f} h"
    lines = [f"{store.path}: {amounts}: your recordings, prepared; they stay here"]
    for kind, found in store.header["problems"].items():
        lines.append(f"{found['count']:,} × {kind} ({'kept' if found['kept'] else 'left out'})")
        lines += [f"      {example}" for example in found["examples"]]
    return lines + [line for line in [describe_store_band(store)] if line]


def find_own_client(recipe: Recipe, store: Store, *, user: str | None) -> tuple[Population, int]:
    """A population, and which client of it we are: the speaker called `user`, or the only one there is.

    It is the client that a simulation of the same people would have. A silo is all that the store holds, whoever has
    said it; its `user` is its name in the roster, such as `silo-3`.
    """
    settings, seed = recipe.federated.clients.population(recipe.data), derive(recipe.people_seed, "seed part")
    if settings.clients == "speaker":
        people = build_population(store, settings, seed=seed)
        return people, _find_speaker(people, user)
    assert settings.silos is not None
    index = _find_silo(user, settings.silos)
    rows = select_speakers(store, settings.splits).rows.members
    ends = np.where(np.arange(settings.silos + 1) > index, len(rows), 0)
    return make_population(store, settings, Groups(members=rows, offsets=ends), seed=seed), index


def _find_speaker(people: Population, user: str | None) -> int:
    if user is None and len(people) > 1:
        raise InputError(f"store {people.store.name} has {len(people):,} speakers: expected to be told which one joins")
    for client in people:
        if user in (None, client.id):
            return client.index
    raise InputError(f"store {people.store.name} has no speaker {user!r} with as much speech as the recipe asks for")


def _find_silo(user: str | None, silos: int) -> int:
    found = _SILO.fullmatch(user or "")
    if found is None or int(found[1]) >= silos:
        raise InputError(f"user={user!r}: expected silo-0 to silo-{silos - 1}, this silo's name in the roster")
    return int(found[1])
