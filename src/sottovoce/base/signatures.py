"""Signatures of nodes, servers and ledgers: ECDSA on P-384 with SHA-384, as r and s of 48 bytes each, and their keys.

`sottovoce keys` makes the keys (`network.keys`); here is what signs with them and reads them.
"""

import hashlib
import re
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA384

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_bounded

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

_NUMBER = 48
SIGNATURE_BYTES = 2 * _NUMBER
LARGEST_KEY_FILE = 1 << 20
_SIGNING = ("orders.key", "node.key", "ca.key")  # of a server, a node, an authority
_ALGORITHM = ec.ECDSA(SHA384())


def sign(key: PrivateKey, data: bytes) -> bytes:
    r, s = utils.decode_dss_signature(key.sign(data, _ALGORITHM))
    return r.to_bytes(_NUMBER) + s.to_bytes(_NUMBER)


def verified(key: PublicKey, data: bytes, signature: bytes) -> bool:
    """Whether the holder of `key` has signed `data`."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    r, s = int.from_bytes(signature[:_NUMBER]), int.from_bytes(signature[_NUMBER:])
    try:
        key.verify(utils.encode_dss_signature(r, s), data, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def fingerprint(key: PublicKey) -> bytes:
    """What a node is called in messages: SHA-256 of its public key. A link calls it by the same in hexadecimal."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


# Reading keys.


def load_private_key(path: Path) -> PrivateKey:
    """A private key of ours, in PEM or OpenSSH's format; refused where others than its owner can read it."""
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
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)):
        raise InputError(f"{path} holds a key of another kind: expected ECDSA P-384")
    return key


def load_signing_key(path: Path) -> PrivateKey:
    """A private key that ledgers are signed with: its file, or a folder that `sottovoce keys` has made."""
    if not path.is_dir():
        return load_private_key(path)
    found = next((path / name for name in _SIGNING if (path / name).exists()), None)
    if found is None:
        raise InputError(f"{path}: no {', '.join(_SIGNING)}: expected a private key, or a folder of keys")
    return load_private_key(found)


def read_fingerprint(key: str) -> str:
    """The fingerprint of a public key that somebody names: by itself, or by a file (OpenSSH's, or a certificate)."""
    if re.fullmatch(r"[0-9a-f]{64}", key.lower()):
        return key.lower()
    content = read_bounded(Path(key), most=LARGEST_KEY_FILE, what="any key")
    if b"BEGIN CERTIFICATE" not in content:
        return fingerprint(load_public_key(Path(key))).hex()
    try:
        found = x509.load_pem_x509_certificate(content).public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{key} holds no certificate that can be read: expected PEM") from None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise InputError(f"{key} is for a key of another kind: expected ECDSA P-384")
    return fingerprint(found).hex()


def load_public_key(path: Path) -> PublicKey:
    """A public key, in a file as OpenSSH writes it."""
    try:
        return parse_public_key(read_bounded(path, most=LARGEST_KEY_FILE, what="any key").decode(errors="replace"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_public_key(text: str) -> PublicKey:
    """A public key as one line of OpenSSH's."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        raise InputError("no public key that can be read: expected `ecdsa-sha2-nistp384 AAAA…`") from None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise InputError("a public key of another kind: expected ECDSA P-384, `ecdsa-sha2-nistp384 AAAA…`")
    return key


def public_line(key: PublicKey) -> str:
    """A public key as `parse_public_key` reads it."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
