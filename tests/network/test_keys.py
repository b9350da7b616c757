"""Keys: one command each, for their owner alone, and fit for those who use them: Python's ssl and Flower's nodes."""

import contextlib
import os
import re
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sottovoce.base.errors import InputError
from sottovoce.base.signatures import SIGNING_KEY, load_signing_key, read_fingerprint, sign, verified
from sottovoce.network import keys
from sottovoce.network.certificates import order_signing_key
from sottovoce.network.messages import Order, OrderKind, check_message_signature, parse_order

NOW = datetime(2031, 5, 1, tzinfo=UTC)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An authority, a server and a node, made today: TLS looks at the machine's own clock."""
    now = datetime.now(UTC)
    keys.make_authority(tmp_path / "authority", now=now)
    hosts = ["localhost", "127.0.0.1"]
    keys.make_server(tmp_path / "server", authority=tmp_path / "authority", hosts=hosts, now=now)
    keys.make_node(tmp_path / "anna")
    return tmp_path


def modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def test_private_keys_are_their_owners_alone(made: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    for folder in (made / "authority", made / "server", made / "anna"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        found = modes(folder)
        assert found
        for name, mode in found.items():
            assert mode == (0o600 if name.endswith(".key") else 0o666 & ~before)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_is_refused(made: Path, mode: int) -> None:
    (made / "anna" / "node.key").chmod(mode)
    with pytest.raises(InputError, match=f"node.key is open to others .*{mode:04o}"):
        keys.load_private_key(made / "anna" / "node.key")


def test_nothing_is_written_over(made: Path) -> None:
    before = (made / "anna" / "node.key").read_bytes()
    with pytest.raises(InputError, match="anna is there already: keys are never written over"):
        keys.make_node(made / "anna")
    assert (made / "anna" / "node.key").read_bytes() == before
    assert not [path.name for path in made.iterdir() if path.name.startswith(".")]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys, "_write", full)
    with pytest.raises(OSError, match="No space"):
        keys.make_node(tmp_path / "anna")
    assert list(tmp_path.iterdir()) == []


def test_tls_trusts_the_server_under_its_names(made: Path) -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made / "server" / "server.pem", made / "server" / "server.key")
    for host in ("localhost", "127.0.0.1"):
        shake_hands(serving, made / "server" / "ca.pem", host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(serving, made / "server" / "ca.pem", "elsewhere.example.org")


def test_tls_refuses_another_authoritys_server(made: Path) -> None:
    keys.make_authority(made / "other", now=datetime.now(UTC))
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made / "server" / "server.pem", made / "server" / "server.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(serving, made / "other" / "ca.pem", "localhost")


def test_the_key_for_orders_serves_no_tls(made: Path) -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made / "server" / "orders.pem", made / "server" / "orders.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(serving, made / "server" / "ca.pem", "localhost")


def shake_hands(serving: ssl.SSLContext, authority: Path, host: str) -> None:
    """TLS in memory, between a server and a client that trusts `authority` alone."""
    asking = ssl.create_default_context(cafile=authority)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        serving.wrap_bio(to_server, to_client, server_side=True),
        asking.wrap_bio(to_client, to_server, server_hostname=host),
    ]
    for end in (ends[1], ends[0], ends[1], ends[0]):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()


def test_a_nodes_key_is_what_flower_reads(made: Path) -> None:
    private = serialization.load_ssh_private_key((made / "anna" / "node.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((made / "anna" / "node.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public


def test_orders_count_under_the_authority(made: Path) -> None:
    authority = keys.load_certificate(made / "server" / "ca.pem")
    now = datetime.now(UTC)
    key = order_signing_key(keys.load_certificate(made / "server" / "orders.pem"), authority=authority, now=now)
    order = Order(
        kind=OrderKind.TRAIN, run=bytes(16), step=0, attempt=1, nonce=bytes(16), node=b"n" * 32, recipe=bytes(32)
    )
    sent = order.signed(keys.load_private_key(made / "server" / "orders.key"))
    check_message_signature(sent, key)
    assert parse_order(sent, limit=0) == order


@pytest.mark.parametrize(
    ("certificate", "authority", "days", "problem"),
    [
        ("server/orders.pem", "other/ca.pem", 0, "not signed under the authority that was given"),
        ("server/server.pem", "server/ca.pem", 0, "a certificate that is not for that"),
        ("authority/ca.pem", "server/ca.pem", 0, "not signed under the authority that was given"),
        ("server/orders.pem", "server/ca.pem", 366, "clock says .*: set the clock, or have the certificate renewed"),
        ("server/orders.pem", "server/ca.pem", -1, "clock says .*: set the clock, or have the certificate renewed"),
    ],
)
def test_no_other_certificate_is_for_orders(
    made: Path, certificate: str, authority: str, days: int, problem: str
) -> None:
    keys.make_authority(made / "other", now=datetime.now(UTC))
    now = datetime.now(UTC) + timedelta(days=days)
    with pytest.raises(InputError, match=problem):
        order_signing_key(
            keys.load_certificate(made / certificate), authority=keys.load_certificate(made / authority), now=now
        )


def test_renewing_a_server_keeps_its_keys_and_names(made: Path) -> None:
    before = {name: (made / "server" / name).read_bytes() for name in ("server.key", "orders.key", "server.pem")}
    later = datetime.now(UTC) + timedelta(days=300)
    assert "new certificates" in keys.renew_keys(made / "server", authority=made / "authority", now=later)
    assert (made / "server" / "server.key").read_bytes() == before["server.key"]
    assert (made / "server" / "orders.key").read_bytes() == before["orders.key"]
    assert (made / "server" / "server.pem").read_bytes() != before["server.pem"]
    authority = keys.load_certificate(made / "authority" / "ca.pem")
    orders = keys.load_certificate(made / "server" / "orders.pem")
    assert order_signing_key(orders, authority=authority, now=later + timedelta(days=300))
    assert keys.describe_keys(made / "server")["host names"] == "localhost, 127.0.0.1"


MADE = datetime(2031, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (0, []),
        (334, []),
        (336, ["server.pem expires on 2032-04-30, 29 days from now", "orders.pem expires on 2032-04-30"]),
        (364, ["server.pem expires on 2032-04-30, 1 days from now", "orders.pem"]),
        (366, "server.pem has expired on 2032-04-30, and this machine's clock says 2032-05-01"),
        (-1, "ca.pem is not valid before 2031-05-01 11:00 UTC, and this machine's clock says 2031-04-30"),
        (3649, "server.pem has expired"),
    ],
)
def test_a_server_says_what_expires_within_thirty_days_and_refuses_what_has(
    tmp_path: Path, days: int, said: list[str] | str
) -> None:
    keys.make_authority(tmp_path / "authority", now=MADE)
    keys.make_server(tmp_path / "server", authority=tmp_path / "authority", hosts=["localhost"], now=MADE)
    found, now = keys.check_server(tmp_path / "server"), MADE + timedelta(days=days)
    if isinstance(said, str):
        with pytest.raises(InputError, match=re.escape(said)):
            found.check_valid(now)
        (line,) = found.reminders(now)  # one that is running is not stopped
        assert said in line
        assert line.endswith("; until then no node can connect anew")
    else:
        lines = found.check_valid(now)
        assert len(lines) == len(said)
        assert all(start in line for start, line in zip(said, lines, strict=True))
        assert all(f"`sottovoce keys renew {tmp_path / 'server'} --authority AUTHORITY`" in line for line in lines)
        assert found.reminders(now) == lines


def test_what_renew_makes_is_valid_again(tmp_path: Path) -> None:
    """Of a server whose certificates have expired, and of an authority that is about to."""
    keys.make_authority(tmp_path / "authority", now=MADE, days=380)
    keys.make_server(tmp_path / "server", authority=tmp_path / "authority", hosts=["localhost"], now=MADE, days=300)
    late = MADE + timedelta(days=360)
    with pytest.raises(InputError, match=r"server\.pem has expired"):
        keys.check_server(tmp_path / "server").check_valid(late)
    with pytest.raises(InputError, match="renew it first"):
        keys.renew_keys(tmp_path / "server", authority=tmp_path / "authority", now=late)
    keys.renew_keys(tmp_path / "authority", now=late)
    keys.renew_keys(tmp_path / "server", authority=tmp_path / "authority", now=late)
    assert keys.check_server(tmp_path / "server").check_valid(late) == []


def test_renewing_an_authority_keeps_what_it_signed(made: Path) -> None:
    later = datetime.now(UTC) + timedelta(days=10)
    keys.renew_keys(made / "authority", now=later)
    renewed = keys.load_certificate(made / "authority" / "ca.pem")
    assert order_signing_key(keys.load_certificate(made / "server" / "orders.pem"), authority=renewed, now=later)


def test_a_nodes_new_key_is_another_node(made: Path) -> None:
    old = keys.describe_keys(made / "anna")["node"]
    words = keys.renew_keys(made / "anna", now=NOW)
    assert keys.describe_keys(made / "anna")["node"] != old
    kept = re.search(r"lies in (\S+):", words)
    assert kept is not None
    assert keys.fingerprint(keys.load_private_key(made / "anna" / kept[1]).public_key()).hex() == old
    line = (made / "anna" / "node.pub").read_text()
    assert keys.describe_keys(made / "anna")["public key"] == line.strip()


def test_revoked_keys_are_listed(made: Path) -> None:
    name = keys.describe_keys(made / "anna")["node"]
    assert keys.revoked_in(made / "authority" / "revoked.json") == frozenset()
    assert keys.revoke_node(str(made / "anna" / "node.pub"), authority=made / "authority") == name
    assert keys.revoke_node("ab" * 32, authority=made / "authority") == "ab" * 32
    assert keys.revoked_in(made / "authority" / "revoked.json") == {name, "ab" * 32}
    changed = (made / "authority" / "revoked.json").read_text().replace("ab" * 32, "cd" * 32)
    (made / "authority" / "revoked.json").write_text(changed)
    with pytest.raises(InputError, match="changed after it was written"):
        keys.revoked_in(made / "authority" / "revoked.json")


def test_only_the_authority_revokes(made: Path) -> None:
    with pytest.raises(InputError, match=r"ca.key cannot be read"):
        keys.revoke_node("ab" * 32, authority=made / "server")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no private key that can be read"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", "no private key"),
        (b"x" * (1 << 21), "larger than any key"),
        (None, "cannot be read"),
    ],
)
def test_a_broken_key_is_one_line(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "node.key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(InputError, match=problem):
        keys.load_private_key(path)


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.OpenSSH
    path = tmp_path / "node.key"
    path.write_bytes(other.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(InputError, match="another kind: expected ECDSA P-384"):
        keys.load_private_key(path)
    with pytest.raises(InputError, match="another kind: expected ECDSA P-384"):
        keys.parse_public_key(keys.public_line(other.public_key()))


def test_a_signer_signs_and_is_no_node(tmp_path: Path) -> None:
    signer = keys.make_signer(tmp_path / "lab")
    key = load_signing_key(tmp_path / "lab")
    assert verified(key.public_key(), b"said", sign(key, b"said"))
    assert not verified(key.public_key(), b"other", sign(key, b"said"))
    assert not verified(key.public_key(), b"said", sign(key, b"said")[:-1])
    assert (tmp_path / "lab" / SIGNING_KEY).stat().st_mode & 0o777 == 0o600
    assert read_fingerprint(str(tmp_path / "lab" / keys.SIGNER)) == read_fingerprint(signer) == signer
    assert keys.describe_keys(tmp_path / "lab")["signer"] == signer
    with pytest.raises(InputError, match="another kind: expected ECDSA P-384"):
        keys.load_private_key(tmp_path / "lab" / SIGNING_KEY)
    with pytest.raises(InputError, match="another kind: expected ECDSA P-384"):
        keys.load_public_key(tmp_path / "lab" / keys.SIGNER)
    with pytest.raises(InputError, match="expected a folder of keys"):
        keys.renew_keys(tmp_path / "lab", now=NOW)


def test_a_signature_of_one_kind_is_none_of_the_other(tmp_path: Path) -> None:
    keys.make_signer(tmp_path / "lab")
    keys.make_node(tmp_path / "node")
    one, other = load_signing_key(tmp_path / "lab"), load_signing_key(tmp_path / "node")
    assert verified(other.public_key(), b"said", sign(other, b"said"))
    assert not verified(other.public_key(), b"said", sign(one, b"said"))
    assert not verified(one.public_key(), b"said", sign(other, b"said"))


@pytest.mark.parametrize("host", ["", "https://voices.example.org", "voices:9092", "-a", "a" * 64, "a b"])
def test_a_host_that_is_none_is_refused(made: Path, host: str) -> None:
    with pytest.raises(InputError, match="expected a host name or an address"):
        keys.make_server(made / "s", authority=made / "authority", hosts=[host], now=datetime.now(UTC))
    assert not (made / "s").exists()


def test_a_server_cannot_outlive_its_authority(made: Path) -> None:
    with pytest.raises(InputError, match="renew it first, or take fewer"):
        keys.make_server(made / "s", authority=made / "authority", hosts=["a"], now=datetime.now(UTC), days=4000)


def test_a_folder_without_keys_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no keys there"):
        keys.describe_keys(tmp_path)
    with pytest.raises(InputError, match="expected a folder of keys"):
        keys.renew_keys(tmp_path, now=NOW)
