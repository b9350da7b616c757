"""A folder of somebody's recordings as a store in their node's home: prepared once, and again when it has changed.

HOME/speech/store           as `sottovoce prepare folder` would write it; nobody else's to read
HOME/speech/prepared.json   what the folder looked like then: names, sizes and times of its files, as one digest
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sottovoce.base.files import read_json, write_json
from sottovoce.corpora import folder
from sottovoce.corpora.corpus import Corpus, Speaker
from sottovoce.store import Store
from sottovoce.store.on_disk import HEADER

SPEECH, STORE, PREPARED = "speech", "store", "prepared.json"

Pack = Callable[[Corpus[Speaker], Path], Any]


def own_store(data: Path, *, home: Path, user: str | None, language: str, pack: Pack) -> Store:
    """The store at `data`, or one of the recordings there: packed by `pack` where that was not done before."""
    if not data.is_dir() or (data / HEADER).exists():
        return Store(data)  # which says what is wrong with it
    place = home / SPEECH
    looks = _listing(data, user=user, language=language)
    if not (place / PREPARED).exists() or read_json(place / PREPARED) != looks:
        corpus = folder.read(data, user=user, language=language)
        for private in (home, place):
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
        pack(corpus, place / STORE)
        write_json(place / PREPARED, looks)
    return Store(place / STORE)


def _listing(data: Path, **asked: str | None) -> dict[str, Any]:
    """What tells whether a folder has changed, without reading its files."""
    found = []
    for name in folder.files(data):
        status = os.stat(data / name, follow_symlinks=False)
        found.append((name, status.st_size, status.st_mtime_ns))
    listed = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    return {"folder": str(data.resolve()), "files": len(found), "listing": listed} | asked
