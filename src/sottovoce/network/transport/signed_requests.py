"""A node's HTTP requests: each signed as a whole, for one session of the server, and good for one time.

Flower's own signature covers a timestamp alone. Whoever has read one request (with TLS broken) could send it again, or
another under its head, for five minutes. So a request carries a second signature, of the node's same key:

    sottovoce-proof: base64 of  nonce (16 bytes) | SHA-256 of the body (32) | signature (96)
    signed:          tag | session (16) | nonce | SHA-256 of the body | timestamp, a line feed, path

`session` is random, one for each start of the server: requests recorded before are refused by the next. A node learns
it from the first refusal. Nonces are remembered while their timestamps are valid, so many of a node. A nonce older than
any that was forgotten is refused, so that neither a clock that is set back nor many requests let one be used twice.
"""

import hashlib
import heapq
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import final

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sottovoce.base.signatures import SIGNATURE_BYTES, PrivateKey, PublicKey, sign, verified
from sottovoce.network.transport.request_limits import REPLAYED, UNKNOWN, Caller

PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"
PROOF_HEADER, SESSION_HEADER = "sottovoce-proof", "sottovoce-session"
SESSION_BYTES = NONCE_BYTES = 16
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0  # that a node's clock may differ, and a request may take; as Flower has it
MOST_REMEMBERED = 4096  # nonces of one node: 1.1 MB; a node that waits for orders sends some 170 in that time

_TAG = b"sottovoce request 1\n"
_DIGEST_BYTES = 32


def key_to_pem(key: PublicKey) -> bytes:
    """A public key as Flower registers it, and as a request names it."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def prove(key: PrivateKey, *, session: bytes, path: str, timestamp: str, body: bytes) -> str:
    """The proof of one request, with a nonce of its own."""
    nonce, digest = os.urandom(NONCE_BYTES), hashlib.sha256(body).digest()
    signature = sign(key, _signed(session, nonce, digest, timestamp.encode(), path))
    return b64encode(nonce + digest + signature).decode("ascii")


def _signed(session: bytes, nonce: bytes, digest: bytes, timestamp: bytes, path: str) -> bytes:
    """No timestamp that is parsed has a line feed in it, and all before it has one length: so this has one reading."""
    return b"".join((_TAG, session, nonce, digest, timestamp, b"\n", path.encode()))


@final
class SignedRequests:
    """The server's side, for one session: who has sent a request, if it is the first time. `keys` are by name."""

    def __init__(self, keys: Mapping[str, PublicKey], *, now: Callable[[], datetime]) -> None:
        self._keys, self._now = dict(keys), now
        self._seen = {name: _Seen() for name in keys}
        self.session = os.urandom(SESSION_BYTES)

    def caller(self, name: str, *, path: str, timestamp: bytes, proof: bytes) -> Caller | int:
        """`name` with the digest of the body that they have signed, or the status of a refusal."""
        try:
            content, signed_at = b64decode(proof, validate=True), datetime.fromisoformat(timestamp.decode("ascii"))
        except ValueError:
            return UNKNOWN
        if len(content) != NONCE_BYTES + _DIGEST_BYTES + SIGNATURE_BYTES or signed_at.tzinfo is None:
            return UNKNOWN
        nonce, digest = content[:NONCE_BYTES], content[NONCE_BYTES:-SIGNATURE_BYTES]
        signed = _signed(self.session, nonce, digest, timestamp, path)
        if not verified(self._keys[name], signed, content[-SIGNATURE_BYTES:]):
            return UNKNOWN
        now, when = _seconds(self._now()), _seconds(signed_at)
        if not -AHEAD_SECONDS < now - when < BEHIND_SECONDS:
            return UNKNOWN
        return Caller(name, digest) if self._seen[name].is_new(nonce, when=when, now=now) else REPLAYED


@dataclass
class _Seen:
    """The nonces of one node, by their time; `forgotten` is the latest time of one that is not remembered any more."""

    by_time: list[tuple[float, bytes]] = field(default_factory=list)
    nonces: set[bytes] = field(default_factory=set)
    forgotten: float = float("-inf")

    def is_new(self, nonce: bytes, *, when: float, now: float) -> bool:
        """Whether this nonce was not seen before; from now on it was."""
        while self.by_time and (len(self.by_time) >= MOST_REMEMBERED or self.by_time[0][0] < now - BEHIND_SECONDS):
            oldest, gone = heapq.heappop(self.by_time)
            self.nonces.discard(gone)
            self.forgotten = max(self.forgotten, oldest)
        if when <= self.forgotten or nonce in self.nonces:
            return False
        self.nonces.add(nonce)
        heapq.heappush(self.by_time, (when, nonce))
        return True


def _seconds(when: datetime) -> float:
    return (when - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
