"""Keys: an authority that signs a server's certificates, and one key for every node.

AUTHORITY/ca.key  ca.pem  revoked.json      whoever runs the federation; keep it off the server
SERVER/server.key  server.pem               TLS, under the server's host names
       orders.key  orders.pem               what signs orders; its certificate serves nothing else
       ca.pem                               a copy, to give to everybody who joins
NODE/node.key  node.pub                     as `ssh-keygen -t ecdsa -b 384` makes them, which is what Flower takes
SIGNER/signing.key  signing.pub             what signs ledgers and exports, as `ssh-keygen -t ed25519` makes them

All others are ECDSA P-384. Private keys are readable by their owner alone, and refused where they are not. Folders
appear whole or not at all, and nothing is written over. A node is known by the fingerprint of its public key, and by
nothing else: so a node's new key is a new node, whereas certificates are renewed for the keys that they are for.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256

from sottovoce.base.errors import InputError
from sottovoce.base.files import (
    add_digest,
    check_digest,
    read_bounded,
    read_json,
    sync_folder,
    write_atomically,
    write_json,
)
from sottovoce.base.signatures import LARGEST_KEY_FILE, SIGNING_KEY, PrivateKey, SigningKey, load_signing_key
from sottovoce.base.signatures import fingerprint as fingerprint
from sottovoce.base.signatures import load_private_key as load_private_key
from sottovoce.base.signatures import load_public_key as load_public_key
from sottovoce.base.signatures import parse_public_key as parse_public_key
from sottovoce.base.signatures import public_line as public_line
from sottovoce.network.certificates import (
    Host,
    as_pem,
    check_valid,
    host_names,
    hosts_of,
    issued,
    parse_certificate,
    self_signed,
)

AUTHORITY_KEY, AUTHORITY, REVOKED = "ca.key", "ca.pem", "revoked.json"
SERVER_KEY, SERVER = "server.key", "server.pem"
ORDERS_KEY, ORDERS = "orders.key", "orders.pem"
NODE_KEY, NODE = "node.key", "node.pub"
SIGNER = "signing.pub"

AUTHORITY_DAYS, SERVER_DAYS = 3650, 365

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def make_authority(folder: Path, *, now: datetime, days: int = AUTHORITY_DAYS) -> None:
    """A new authority in a new folder."""
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = self_signed(key, now=now, days=days)
    with _new_folder(folder) as place:
        _write_key(place / AUTHORITY_KEY, key)
        _write(place / AUTHORITY, as_pem(certificate))


def make_server(folder: Path, *, authority: Path, hosts: Sequence[str], now: datetime, days: int = SERVER_DAYS) -> None:
    """The keys of a server that is reached under `hosts` (names or addresses), signed by `authority`."""
    names = host_names(hosts)
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in (SERVER_KEY, ORDERS_KEY)}
    certificates = _issue_certificates(keys, authority, hosts=names, now=now, days=days)
    with _new_folder(folder) as place:
        for name, key in keys.items():
            _write_key(place / name, key)
        for name, certificate in certificates.items():
            _write(place / name, as_pem(certificate))


def _issue_certificates(
    keys: Mapping[str, PrivateKey], authority: Path, *, hosts: Sequence[Host], now: datetime, days: int
) -> dict[str, x509.Certificate]:
    """A server's certificates for its keys, and its authority's own, by their files."""
    signer, issuer = _load_authority(authority)
    tls, orders = keys[SERVER_KEY].public_key(), keys[ORDERS_KEY].public_key()
    return {
        SERVER: issued(tls, issuer, signer, hosts=hosts, now=now, days=days),
        ORDERS: issued(orders, issuer, signer, hosts=None, now=now, days=days),
        AUTHORITY: issuer,
    }


def make_node(folder: Path) -> None:
    """A node's key in a new folder."""
    with _new_folder(folder) as place:
        _write_pair(place / NODE_KEY, place / NODE, ec.generate_private_key(ec.SECP384R1()))


def make_signer(folder: Path) -> str:
    """A key that signs ledgers and exports, in a new folder; its fingerprint."""
    key = Ed25519PrivateKey.generate()
    with _new_folder(folder) as place:
        _write_pair(place / SIGNING_KEY, place / SIGNER, key)
    return fingerprint(key.public_key()).hex()


def renew_keys(folder: Path, *, now: datetime, authority: Path | None = None, days: int | None = None) -> str:
    """New certificates for the same keys, or for a node a new key; says which, in words.

    A node's old key is kept beside the new one: it stays the node's in a run that knows it.
    """
    if (folder / AUTHORITY_KEY).exists():
        key = load_private_key(folder / AUTHORITY_KEY)
        _write(folder / AUTHORITY, as_pem(self_signed(key, now=now, days=AUTHORITY_DAYS if days is None else days)))
        return f"{folder / AUTHORITY}: a new certificate for the same key, for those who join from now on"
    if (folder / SERVER_KEY).exists():
        if authority is None:
            raise InputError(f"{folder}: a server's certificates are signed by an authority: expected --authority")
        keys = {name: load_private_key(folder / name) for name in (SERVER_KEY, ORDERS_KEY)}
        hosts, days = hosts_of(load_certificate(folder / SERVER)), SERVER_DAYS if days is None else days
        # Each fits its key, whichever of them are new already when this is killed.
        for name, certificate in _issue_certificates(keys, authority, hosts=hosts, now=now, days=days).items():
            _write(folder / name, as_pem(certificate))
        return f"{folder}: new certificates for the same keys and host names"
    if (folder / NODE_KEY).exists():
        kept = _renew_node(folder)
        return f"{folder}: a new key, which is a new node; the old one lies in {kept}: have it revoked if it was lost"
    raise InputError(
        f"{folder}: no {AUTHORITY_KEY}, {SERVER_KEY} or {NODE_KEY}: expected a folder of keys that can be renewed"
    )


def _renew_node(folder: Path) -> str:
    old = fingerprint(load_private_key(folder / NODE_KEY).public_key()).hex()
    kept = folder / f"{NODE_KEY}.{old[:16]}"
    if not kept.exists():
        os.link(folder / NODE_KEY, kept)
    _write_pair(folder / NODE_KEY, folder / NODE, ec.generate_private_key(ec.SECP384R1()))
    return kept.name


def revoke_node(node: str, *, authority: Path) -> str:
    """Put a node's key, named by its public file or its fingerprint, on the authority's list; the fingerprint."""
    _load_authority(authority)
    name = node if _FINGERPRINT.fullmatch(node) else fingerprint(load_public_key(Path(node))).hex()
    listed = sorted(revoked_in(authority / REVOKED) | {name})
    write_json(authority / REVOKED, add_digest({"revoked": listed}))
    return name


def revoked_in(path: Path) -> frozenset[str]:
    """The fingerprints in a list of revoked keys; none where there is no list."""
    if not path.exists():
        return frozenset()
    listed = check_digest(read_json(path), where=path).get("revoked")
    names = listed if isinstance(listed, list) else [None]
    if not all(isinstance(name, str) and _FINGERPRINT.fullmatch(name) for name in names):
        raise InputError(f"{path} is damaged: expected a list of fingerprints, 64 hexadecimal digits each")
    return frozenset(names)


def load_certificate(path: Path) -> x509.Certificate:
    return parse_certificate(read_bounded(path, most=LARGEST_KEY_FILE, what="any key"), where=str(path))


def describe_keys(folder: Path) -> dict[str, str]:
    """What a folder of keys holds, for people; nothing secret."""
    found: dict[str, str] = {}
    if (folder / NODE_KEY).exists():
        key = load_private_key(folder / NODE_KEY).public_key()
        found |= {"node": fingerprint(key).hex(), "public key": public_line(key)}
    if (folder / SIGNING_KEY).exists():
        signer = load_signing_key(folder / SIGNING_KEY).public_key()
        found |= {"signer": fingerprint(signer).hex(), "public key": public_line(signer)}
    for name, what in ((AUTHORITY, "authority"), (SERVER, "server"), (ORDERS, "orders")):
        if (folder / name).exists():
            certificate = load_certificate(folder / name)
            found[what] = f"{certificate.fingerprint(SHA256()).hex()} until {certificate.not_valid_after_utc:%Y-%m-%d}"
            if name == SERVER:
                found["host names"] = ", ".join(str(host.value) for host in hosts_of(certificate))
    if (folder / REVOKED).exists():
        found["revoked"] = ", ".join(sorted(revoked_in(folder / REVOKED)))
    if not found:
        raise InputError(f"{folder}: no keys there: expected a folder that `sottovoce keys` has made")
    return found


def check_server(folder: Path) -> "ServerCertificates":
    """A server's certificates; InputError where a file is missing, or a key, a certificate and ca.pem do not fit."""
    if not folder.is_dir() or not any((folder / name).exists() for name in (SERVER, SERVER_KEY, ORDERS, ORDERS_KEY)):
        raise InputError(f"{folder}: no keys there: expected a server's, as `sottovoce keys server` makes them")
    authority = load_certificate(folder / AUTHORITY)
    found = {folder / AUTHORITY: authority}
    for name, key_name in ((SERVER, SERVER_KEY), (ORDERS, ORDERS_KEY)):
        certificate, key = load_certificate(folder / name), load_private_key(folder / key_name)
        if certificate.public_key() != key.public_key():
            raise InputError(f"{folder}: {key_name} is not the key of {name}: expected both as they were made")
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise InputError(f"{folder}: {name} is not signed by the authority of {AUTHORITY}: renew it") from None
        found[folder / name] = certificate
    return ServerCertificates(found)


@dataclass(frozen=True, eq=False)
class ServerCertificates:
    """Those that a server was started with, by their files."""

    by_file: Mapping[Path, x509.Certificate]

    def check_valid(self, now: datetime) -> list[str]:
        """InputError where one is not valid now; lines about those that expire within thirty days."""
        lines = (
            check_valid(certificate, name=str(path), now=now, remedy=_remedy(path))
            for path, certificate in self.by_file.items()
        )
        return [line for line in lines if line is not None]

    def reminders(self, now: datetime) -> list[str]:
        """The same for one that is running: what has expired is a line too."""
        try:
            return self.check_valid(now)
        except InputError as error:
            return [f"{error}; until then no node can connect anew"]


@final
class DailyReminder:
    """Says `reminders` of the time that `now` gives, once a day; those of the first day are said at the start."""

    def __init__(
        self,
        reminders: Callable[[datetime], list[str]],
        *,
        now: Callable[[], datetime],
        say: Callable[[str], None],
    ) -> None:
        self._reminders, self._now, self._say = reminders, now, say
        self._day = now().date()

    def __call__(self) -> None:
        now = self._now()
        if now.date() != self._day:
            self._day = now.date()
            for line in self._reminders(now):
                self._say(line)


def _remedy(path: Path) -> str:
    if path.name == AUTHORITY:
        return f"`sottovoce keys renew AUTHORITY`, renew the server's, and give the new {AUTHORITY} to everybody"
    return f"`sottovoce keys renew {path.parent} --authority AUTHORITY`, and start the server again"


def _load_authority(folder: Path) -> tuple[PrivateKey, x509.Certificate]:
    return load_private_key(folder / AUTHORITY_KEY), load_certificate(folder / AUTHORITY)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder for its owner alone, which appears whole at the end of the block."""
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder} is there already: keys are never written over; expected the name of a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        place = Path(temporary) / folder.name
        place.mkdir(mode=0o700)
        yield place
        sync_folder(place)
        place.rename(folder)
        sync_folder(folder.parent)


def _write_pair(private: Path, public: Path, key: SigningKey) -> None:
    """The private key first: where a killed process leaves it alone, `keys show` shows the public one."""
    _write_key(private, key, form=serialization.PrivateFormat.OpenSSH)
    _write(public, f"{public_line(key.public_key())}\n".encode())


def _write_key(
    path: Path, key: SigningKey, *, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> None:
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    _write(path, content, private=True)


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    with write_atomically(path, private=private) as file:
        file.write(content)
