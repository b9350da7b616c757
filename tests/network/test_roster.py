"""The roster: everybody once, with a key that can be read; each mistake one clear line."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import name_key
from sottovoce.network.keys import fingerprint, public_line
from sottovoce.network.roster import format_roster_entry, load_roster

KEYS = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(3)]
LINES = [public_line(key) for key in KEYS]


def written(folder: Path, *lines: str) -> Path:
    path = folder / "roster.yaml"
    path.write_text("users:\n" + "\n".join(lines) + "\n")
    return path


def test_what_keys_prints_is_read(tmp_path: Path) -> None:
    names = ["anna", "no", "o'hara"]
    path = written(tmp_path, *(format_roster_entry(name, key) for name, key in zip(names, KEYS, strict=True)))
    roster = load_roster(path)
    assert len(roster) == 3
    assert {user.name: user.key for user in roster.users} == dict(zip(names, KEYS, strict=True))
    assert {user.node: user.name for user in roster.users}[fingerprint(KEYS[1])] == "no"


def test_people_stand_where_they_stand_in_a_simulation(tmp_path: Path) -> None:
    names = ["anna", "bert", "carl"]
    roster = load_roster(
        written(tmp_path, *(format_roster_entry(name, key) for name, key in zip(names, KEYS, strict=True)))
    )
    assert [user.name for user in roster.users] == sorted(names, key=name_key)
    silos = ["silo-10", "silo-2", "silo-0"]
    roster = load_roster(
        written(tmp_path, *(format_roster_entry(name, key) for name, key in zip(silos, KEYS, strict=True)))
    )
    assert [user.name for user in roster.users] == ["silo-0", "silo-2", "silo-10"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([f"  - {{name: a, key: {LINES[0]}}}", f"  - {{name: a, key: {LINES[1]}}}"], "a is there twice"),
        ([f"  - {{name: a, key: {LINES[0]}}}", f"  - {{name: b, key: {LINES[0]}}}"], "b and a have one key"),
        ([f"  - {{name: a, key: {LINES[0]}, weight: 2}}"], r"user 1: unknown key 'weight' \(known: name, key, revoked"),
        ([f"  - {{name: a, key: {LINES[0][:-9]}}}"], r"user 1 \(a\): no public key that can be read"),
        (["  - {name: a, key: ssh-ed25519 AAAA}"], r"user 1 \(a\): no public key that can be read"),
        (["  - {name: a}"], r"user 1 \(a\): expected a key"),
        ([f"  - {{name: 7, key: {LINES[0]}}}"], "name=7, expected a word"),
        ([f"  - {{name: '', key: {LINES[0]}}}"], "name='', expected a word"),
        ([f"  - {{name: a, key: {LINES[0]}, revoked: 1}}"], "revoked=1, expected true or false"),
        (["  - anna"], "user 1: found 'anna', expected a name and a key"),
        ([""], "expected a list of people, one at least"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, lines: list[str], problem: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(InputError, match=problem) as raised:
        load_roster(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"people: []", b"- a", b"\xff\xfe", b"{", b""])
def test_what_is_no_roster_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "roster.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is no roster"):
        load_roster(path)


def test_a_missing_roster_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_roster(tmp_path / "roster.yaml")


def test_a_revoked_key_must_be_marked_and_still_counts(tmp_path: Path) -> None:
    lines = [format_roster_entry("anna", KEYS[0]), format_roster_entry("bert", KEYS[1])]
    revoked = frozenset({fingerprint(KEYS[1]).hex()})
    with pytest.raises(InputError, match="bert's key was revoked: `revoked: true` goes on without them, and K stays"):
        load_roster(written(tmp_path, *lines), revoked=revoked)
    marked = lines[1].replace("}", ", revoked: true}")
    roster = load_roster(written(tmp_path, lines[0], marked), revoked=revoked)
    assert len(roster) == 2
    assert {user.name: user.revoked for user in roster.users} == {"anna": False, "bert": True}
