"""The roster: who may take part, each with the public key of their node. Its length is K, and stays so for a run.

    users:
      - {name: anna, key: ecdsa-sha2-nistp384 AAAA…}
      - {name: bert, key: ecdsa-sha2-nistp384 AAAA…, revoked: true}

K is public and accounted for, so nobody leaves the roster of a run: who is `revoked` still counts and is sampled, but
is never asked, and counts as zero like anybody who is away. New people, and new keys, wait for the next run.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_bounded
from sottovoce.base.parsing import ParseError, parse_yaml, quote
from sottovoce.base.seeds import name_key
from sottovoce.base.signatures import PublicKey, fingerprint, parse_public_key, public_line

_FIELDS = ("name", "key", "revoked")
_LARGEST_FILE = 1 << 28
_LONGEST_NAME = 255
_SILO = re.compile(r"silo-([0-9]{1,9})")


@dataclass(frozen=True, eq=False)
class RosterEntry:
    """Somebody on the roster. `name` is that of the client: a speaker's, or `silo-3`."""

    name: str
    key: PublicKey
    revoked: bool = False

    @cached_property
    def node(self) -> bytes:
        """Their node's fingerprint."""
        return fingerprint(self.key)


@dataclass(frozen=True, eq=False)
class Roster:
    """Everybody, in the order that clients of these names have in a simulation: a place in it is a client's index."""

    users: tuple[RosterEntry, ...]

    def __len__(self) -> int:
        return len(self.users)


def load_roster(path: Path, *, revoked: frozenset[str] = frozenset()) -> Roster:
    """The roster in `path`; one line for the first thing that is wrong with it. `revoked` is the authority's list."""
    content = read_bounded(path, most=_LARGEST_FILE, what="any roster")
    try:
        found = parse_yaml(content.decode())
    except (ParseError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no roster: {error}") from None
    if not isinstance(found, dict) or list(found) != ["users"]:
        raise InputError(f"{path} is no roster: expected one key, `users`, with a list of people")
    listed = found["users"]
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path}: users: expected a list of people, one at least")
    users = [_parse_entry(each, where=f"{path}: user {number}") for number, each in enumerate(listed, start=1)]
    _check_distinct(users, path)
    for user in users:
        if user.node.hex() in revoked and not user.revoked:
            raise InputError(
                f"{path}: {user.name}'s key was revoked: `revoked: true` goes on without them, and K stays; "
                "a new key is for a new run"
            )
    return Roster(tuple(sorted(users, key=lambda user: _sort_key(user.name))))


def _parse_entry(entry: Any, *, where: str) -> RosterEntry:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: found {quote(entry)}, expected a name and a key")
    for field in entry:
        if field not in _FIELDS:
            raise InputError(f"{where}: unknown key {quote(field)} (known: {', '.join(_FIELDS)})")
    name, key, revoked = entry.get("name"), entry.get("key"), entry.get("revoked", False)
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InputError(f"{where}: name={quote(name)}, expected a word (in quotes where YAML would read a number)")
    if not isinstance(key, str):
        raise InputError(f"{where} ({name}): expected a key, `ecdsa-sha2-nistp384 AAAA…`")
    if not isinstance(revoked, bool):
        raise InputError(f"{where} ({name}): revoked={quote(revoked)}, expected true or false")
    try:
        return RosterEntry(name, parse_public_key(key), revoked)
    except InputError as error:
        raise InputError(f"{where} ({name}): {error}") from None


def _check_distinct(users: list[RosterEntry], path: Path) -> None:
    """Whoever is there twice would be counted, and asked, twice."""
    names: set[str] = set()
    nodes: dict[bytes, str] = {}
    for user in users:
        if user.name in names:
            raise InputError(f"{path}: {user.name} is there twice: expected everybody once")
        if user.node in nodes:
            raise InputError(f"{path}: {user.name} and {nodes[user.node]} have one key: expected a key for each")
        names.add(user.name)
        nodes[user.node] = user.name


def _sort_key(name: str) -> tuple[int, int]:
    """As in `users.population`: silos by their number, speakers by their keys."""
    number = _SILO.fullmatch(name)
    return (0, int(number[1])) if number else (1, name_key(name))


def format_roster_entry(name: str, key: PublicKey) -> str:
    """A roster's line for somebody. Names are quoted: YAML would take `007` or `no` for something else."""
    quoted = name.replace("'", "''")
    return f"  - {{name: '{quoted}', key: {public_line(key)}}}"
