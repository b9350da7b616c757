"""Signatures and their keys. `sottovoce keys` makes the keys (`network.keys`); here is what signs and reads them.

| who signs | key | signature |
|---|---|---|
| nodes, servers, authorities | ECDSA on P-384, which Flower takes | with SHA-384, r and s of 48 bytes each |
| whoever stands for a ledger or an export | Ed25519, or one of those | RFC 8032, 64 bytes |
"""

import hashlib
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA384

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_bounded

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
# Of whoever stands for a ledger or an export.
SigningKey = PrivateKey | Ed25519PrivateKey
VerifyingKey = PublicKey | Ed25519PublicKey
_Key = TypeVar("_Key", bound=VerifyingKey)

_NUMBER = 48
SIGNATURE_BYTES = 2 * _NUMBER
LARGEST_KEY_FILE = 1 << 20
SIGNING_KEY = "signing.key"
_SIGNING = (SIGNING_KEY, "orders.key", "node.key", "ca.key")  # of a signer, a server, a node, an authority
_ALGORITHM = ec.ECDSA(SHA384())


def sign(key: SigningKey, data: bytes) -> bytes:
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(data)
    r, s = utils.decode_dss_signature(key.sign(data, _ALGORITHM))
    return r.to_bytes(_NUMBER) + s.to_bytes(_NUMBER)


def verified(key: VerifyingKey, data: bytes, signature: bytes) -> bool:
    """Whether the holder of `key` has signed `data`."""
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, data)
            return True
        if len(signature) != SIGNATURE_BYTES:
            return False
        r, s = int.from_bytes(signature[:_NUMBER]), int.from_bytes(signature[_NUMBER:])
        key.verify(utils.encode_dss_signature(r, s), data, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def fingerprint(key: VerifyingKey) -> bytes:
    """What a node is called in messages: SHA-256 of its public key. A link calls it by the same in hexadecimal."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


# Reading keys.


def load_private_key(path: Path) -> PrivateKey:
    """A private key of a node, server or authority, in PEM or OpenSSH's format."""
    key = _read_key(path)
    if not isinstance(key, PrivateKey):
        raise InputError(f"{path} holds a key of another kind: expected ECDSA P-384")
    return key


def load_signing_key(path: Path) -> SigningKey:
    """A private key that ledgers and exports are signed with: its file, or a folder that `sottovoce keys` has made."""
    found: Path | None = path
    if path.is_dir():
        found = next((path / name for name in _SIGNING if (path / name).exists()), None)
    if found is None:
        raise InputError(f"{path}: no {', '.join(_SIGNING)}: expected a private key, or a folder of keys")
    if (key := _read_key(found)) is None:
        raise InputError(f"{found} holds a key of another kind: expected Ed25519 or ECDSA P-384")
    return key


def _read_key(path: Path) -> SigningKey | None:
    """A private key, None where it is of another kind than ours; refused where others than its owner can read it."""
    content = read_bounded(path, most=LARGEST_KEY_FILE, what="any key")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(
            f"{path} is open to others (its mode is {mode:04o}): expected 0600, and a key that nobody has seen"
        )
    reader = serialization.load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
    try:
        key = reader(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{path} holds no private key that can be read: expected one without a password") from None
    if isinstance(key, Ed25519PrivateKey) or (isinstance(key, PrivateKey) and isinstance(key.curve, ec.SECP384R1)):
        return key
    return None


def read_fingerprint(key: str) -> str:
    """The fingerprint of a public key that somebody names: by itself, or by a file (OpenSSH's, or a certificate)."""
    if re.fullmatch(r"[0-9a-f]{64}", key.lower()):
        return key.lower()
    content = read_bounded(Path(key), most=LARGEST_KEY_FILE, what="any key")
    if b"BEGIN CERTIFICATE" not in content:
        return fingerprint(_of_file(Path(key), parse_verifying_key)).hex()
    try:
        found = x509.load_pem_x509_certificate(content).public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{key} holds no certificate that can be read: expected PEM") from None
    if not isinstance(found, PublicKey):
        raise InputError(f"{key} is for a key of another kind: expected ECDSA P-384")
    return fingerprint(found).hex()


def load_public_key(path: Path) -> PublicKey:
    """A node's public key, in a file as OpenSSH writes it."""
    return _of_file(path, parse_public_key)


def _of_file(path: Path, parse: Callable[[str], _Key]) -> _Key:
    try:
        return parse(read_bounded(path, most=LARGEST_KEY_FILE, what="any key").decode(errors="replace"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_public_key(text: str) -> PublicKey:
    """A node's public key as one line of OpenSSH's."""
    key = _parse_line(text, "ecdsa-sha2-nistp384 AAAA…")
    if not isinstance(key, PublicKey):
        raise InputError("a public key of another kind: expected ECDSA P-384, `ecdsa-sha2-nistp384 AAAA…`")
    return key


def parse_verifying_key(text: str) -> VerifyingKey:
    """The public key of whoever has signed a ledger or an export, as one line of OpenSSH's."""
    key = _parse_line(text, "ssh-ed25519 AAAA…` or `ecdsa-sha2-nistp384 AAAA…")
    if key is None:
        raise InputError("a public key of another kind: expected Ed25519 or ECDSA P-384")
    return key


def _parse_line(text: str, expected: str) -> VerifyingKey | None:
    """None where it is of another kind than ours."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"no public key that can be read: expected `{expected}`") from None
    if isinstance(key, Ed25519PublicKey) or (isinstance(key, PublicKey) and isinstance(key.curve, ec.SECP384R1)):
        return key
    return None


def public_line(key: VerifyingKey) -> str:
    """A public key as `parse_verifying_key` reads it."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
