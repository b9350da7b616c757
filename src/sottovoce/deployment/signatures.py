"""Signatures of nodes and servers: ECDSA on P-384 with SHA-384, as r and s of 48 bytes each, so of one known length."""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA384

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

_NUMBER = 48
SIGNATURE_BYTES = 2 * _NUMBER
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
