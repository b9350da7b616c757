"""Files that a family's models are made from and that lie at every client: a base model's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class BaseModelName(NamedTuple):
    """A base model for people: its name, the SHA-256 of its files, and what of it is trained."""

    name: str
    digest: str
    trained: str


@dataclass(frozen=True, kw_only=True)
class BaseFiles:
    """Files that models are made from, which lie at every client and are never sent.

    `pin(options)` are options that know them by their digest alone; pinned ones stay as they are. `describe(options)`
    is InputError for all but pinned ones: a client opens nothing that a server names. `find(options, folder)` is
    InputError unless they are here: in the `folder` that a person gave, or, with None, where such files are kept.
    """

    pin: Callable[[Any], Any]
    describe: Callable[[Any], BaseModelName]
    find: Callable[[Any, Path | None], None]
