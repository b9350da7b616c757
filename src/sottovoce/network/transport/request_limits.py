"""Limits on requests to the nodes' API: known paths, authenticated nodes, bounded sizes, few at a time.

An ASGI application around another one. A request for a path that is not listed, or whose head does not prove who sent
it, is refused before a byte of its body is read. On a listed path no more than its bound is read, whatever the request
says of its own length, and what was read must be what was signed.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

UNKNOWN, CLOSED, TOO_SLOW, TOO_LARGE = 401, 403, 408, 413
REPLAYED, TOO_MANY = 425, 503  # a node that was meant tries again, with a new signature
AT_ONCE = 8  # requests of one node: for orders, a heartbeat and an answer; twice that where it connects again
SILENT_SECONDS = 120.0  # that the next part of a request, or of taking its answer, may take: a chunk at 0.3 Mbit/s


@dataclass(frozen=True)
class Caller:
    """Who has signed a request, and the SHA-256 of the body that they have signed with it."""

    name: str
    body_digest: bytes


Authenticate = Callable[[Scope], Caller | int]  # or the status of a refusal


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@final
class RequestLimits:
    """Passes POST requests of authenticated callers on to `inside`: to `paths`, each with at most so many bytes.

    Everything else is refused. `challenge` goes with the refusal of unknown callers: what to sign.
    """

    def __init__(
        self,
        inside: Application,
        *,
        paths: Mapping[str, int],
        authenticate: Authenticate,
        challenge: Header | None = None,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._inside, self._paths, self._authenticate, self._silent = inside, dict(paths), authenticate, silent_seconds
        self._challenge = [] if challenge is None else [challenge]
        self._busy = Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._paths.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if most is None:
            await _refuse(CLOSED, scope, send)
        elif not _says_at_most(scope, most):
            await _refuse(TOO_LARGE, scope, send)
        elif isinstance(caller := self._authenticate(scope), int):
            await _refuse(caller, scope, send, *(self._challenge if caller == UNKNOWN else ()))
        elif self._busy[caller.name] >= AT_ONCE:
            await _refuse(TOO_MANY, scope, send)
        else:
            self._busy[caller.name] += 1
            try:
                await self._forward(scope, receive, send, most=most, body_digest=caller.body_digest)
            finally:
                self._busy[caller.name] -= 1

    async def _forward(self, scope: Scope, receive: Receive, send: Send, *, most: int, body_digest: bytes) -> None:
        read, whole, answered = 0, False, False
        digest = hashlib.sha256()
        refused: _Refused | None = None

        async def counted() -> Event:
            nonlocal read, whole, refused
            try:
                event = await (receive() if whole else asyncio.wait_for(receive(), self._silent))
            except TimeoutError:
                refused = _Refused(TOO_SLOW)
                raise refused from None
            read += len(event.get("body", b""))
            whole = not event.get("more_body", False)
            if read > most:
                refused = _Refused(TOO_LARGE)
                raise refused
            digest.update(event.get("body", b""))
            if whole and event["type"] == "http.request" and digest.digest() != body_digest:
                refused = _Refused(UNKNOWN)
                raise refused
            return event

        async def watched(event: Event) -> None:
            nonlocal answered
            if refused is None:  # what the inside makes of the exception is not the answer
                answered = True
                await asyncio.wait_for(send(event), self._silent)

        with suppress(_Refused, TimeoutError):
            await self._inside(scope, counted, watched)
        if refused is not None and not answered:
            await _refuse(refused.status, scope, send)


def _says_at_most(scope: Scope, most: int) -> bool:
    """Whether the request announces no more than `most` bytes, or nothing at all."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return all(value.isdigit() and int(value) <= most for value in lengths)


async def _refuse(status: int, scope: Scope, send: Send, *more: Header) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    # What was not read is not waited for either.
    headers = [(b"content-length", b"0"), (b"connection", b"close"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
