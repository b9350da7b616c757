"""`sottovoce keys`: one command each, and what it prints can be used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sottovoce.network.keys import fingerprint, load_private_key, revoked_in
from sottovoce.network.roster import load_roster

Command = Callable[..., Any]
Keys = Callable[..., str]


@pytest.fixture
def keys(sottovoce: Command) -> Keys:
    def called(*arguments: object) -> str:
        done = sottovoce("keys", *arguments)
        assert done.code == 0, done.err
        return str(done.out)

    return called


def test_a_federation_in_four_commands(keys: Keys, tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    assert f"give {authority / 'ca.pem'} to everybody" in keys("authority", authority)
    keys("server", tmp_path / "server", "--authority", authority, "--host", "localhost", "--host", "127.0.0.1")
    lines = [keys("node", tmp_path / name, "--user", name).splitlines()[1] for name in ("anna", "bert")]
    roster = tmp_path / "roster.yaml"
    roster.write_text("\n".join(["users:", *lines]))
    own = load_private_key(tmp_path / "bert" / "node.key").public_key()
    assert {user.node: user.name for user in load_roster(roster).users}[fingerprint(own)] == "bert"
    assert "host names: localhost, 127.0.0.1" in keys("show", tmp_path / "server")
    assert json.loads(keys("show", tmp_path / "anna", "--json"))["public key"] in lines[0]


def test_renewal_and_revocation(keys: Keys, tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    keys("authority", authority, "--days", 800)
    keys("server", tmp_path / "server", "--authority", authority, "--host", "localhost", "--days", 10)
    assert "new certificates" in keys("renew", tmp_path / "server", "--authority", authority, "--days", 20)
    keys("node", tmp_path / "anna")
    lost = fingerprint(load_private_key(tmp_path / "anna" / "node.key").public_key()).hex()
    assert lost in keys("revoke", tmp_path / "anna" / "node.pub", "--authority", authority)
    assert revoked_in(authority / "revoked.json") == {lost}
    assert "a new key, which is a new node" in keys("renew", tmp_path / "anna")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("authority", "there"), "never written over"),
        (("server", "new", "--authority", "there", "--host", "localhost"), "ca.key cannot be read"),
        (("authority", "new", "--days", "0"), "days=0: expected 1 to 36,500"),
        (("renew", "there"), "expected a folder of keys"),
        (("show", "there"), "no keys there"),
        (("revoke", "nothing.pub", "--authority", "there"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(
    sottovoce: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    done = sottovoce("keys", *arguments)
    assert done.code == 2
    assert problem in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()
