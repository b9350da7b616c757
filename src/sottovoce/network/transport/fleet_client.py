"""A node's HTTP client for Flower's Fleet API: protobuf over TLS, each request signed for Flower and once more for us.

The server is trusted with little: redirects are not followed, nothing is decompressed, and a reply above its bound is
not read.
"""

import re
import ssl
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Self, final

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from flwr.proto import fleet_pb2
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

from sottovoce.base.signatures import PrivateKey
from sottovoce.network.transport.chunks import CHUNK
from sottovoce.network.transport.signed_requests import (
    PROOF_HEADER,
    PUBLIC_KEY_HEADER,
    SESSION_BYTES,
    SESSION_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    key_to_pem,
    prove,
)

PATH = "/v1/fleet/"
MOST_REPLY_BYTES = CHUNK + (1 << 20)

_SECONDS = 30.0  # for each part of a request
_MEDIA_TYPE = "application/protobuf"
_METHODS = {method.input_type.full_name: method for method in fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].methods}


def now() -> datetime:
    return datetime.now(UTC)


@final
class FleetClient:
    """Calls the server at `server` (host:port), whose certificate `authority` (PEM) has signed, with a node's `key`."""

    def __init__(self, server: str, *, key: PrivateKey, authority: bytes) -> None:
        self._key, self._session = key, bytes(SESSION_BYTES)
        self._public = b64encode(key_to_pem(key.public_key())).decode("ascii")
        self._http = httpx.Client(
            base_url=f"https://{server}",
            verify=ssl.create_default_context(cadata=authority.decode("ascii")),
            event_hooks={"response": [_check_reply]},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, request: Any, *, headers: Mapping[str, str] | None = None, seconds: float = _SECONDS) -> Any:
        """Flower's response to a request of its Fleet API; httpx.HTTPError where there is none."""
        method = _METHODS[request.DESCRIPTOR.full_name]
        path = PATH + re.sub(r"(?<!^)(?=[A-Z])", "-", method.name).lower()
        body = request.SerializeToString(deterministic=True)
        response = self._post(path, body, headers or {}, seconds)
        if (session := _session_in(response)) not in (None, self._session):
            self._session = session
            response = self._post(path, body, headers or {}, seconds)
        response.raise_for_status()
        found = GetMessageClass(method.output_type)()
        try:
            found.ParseFromString(response.content)
        except DecodeError:
            raise httpx.RemoteProtocolError("no answer") from None
        return found

    def _post(self, path: str, body: bytes, headers: Mapping[str, str], seconds: float) -> httpx.Response:
        timestamp = now().isoformat()
        signature = self._key.sign(timestamp.encode("ascii"), ec.ECDSA(SHA256()))
        signed = {
            "content-type": _MEDIA_TYPE,
            "accept": _MEDIA_TYPE,
            PUBLIC_KEY_HEADER: self._public,
            TIMESTAMP_HEADER: timestamp,
            SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
            PROOF_HEADER: prove(self._key, session=self._session, path=path, timestamp=timestamp, body=body),
        }
        return self._http.post(path, content=body, headers={**signed, **headers}, timeout=seconds)


def _check_reply(response: httpx.Response) -> None:
    """Before it is read: a server, too, sends no more than was agreed, and nothing compressed."""
    is_compressed = "content-encoding" in response.headers  # however small it claims to be
    if is_compressed or int(response.headers.get("content-length", MOST_REPLY_BYTES + 1)) > MOST_REPLY_BYTES:
        raise httpx.RemoteProtocolError("more than was agreed")


def _session_in(response: httpx.Response) -> bytes | None:
    """The session that a server names in a refusal."""
    if response.status_code != httpx.codes.UNAUTHORIZED:
        return None
    try:
        named = bytes.fromhex(response.headers.get(SESSION_HEADER, ""))
    except ValueError:
        return None
    return named if len(named) == SESSION_BYTES else None
