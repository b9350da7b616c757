"""The gate before the nodes' API: nothing else behind it can be reached, and nothing large is read.

An ASGI application around another one. Who asks for a path that is not listed is refused before a byte of what they
send is read; on a listed path no more than its bound is, whatever the request says of its own length.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, final

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CLOSED, TOO_LARGE = 403, 413


class _TooLarge(Exception):
    """More than the path's bound has come."""


@final
class Gate:
    """Lets POST requests to `paths` through to `inside`, each with at most so many bytes; refuses everything else."""

    def __init__(self, inside: Application, *, paths: Mapping[str, int]) -> None:
        self._inside, self._paths = inside, dict(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._paths.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if most is None:
            await _refuse(CLOSED, scope, send)
        elif not _says_at_most(scope, most):
            await _refuse(TOO_LARGE, scope, send)
        else:
            await self._let_through(scope, receive, send, most=most)

    async def _let_through(self, scope: Scope, receive: Receive, send: Send, *, most: int) -> None:
        read, answered = 0, False

        async def counted() -> Event:
            nonlocal read
            event = await receive()
            read += len(event.get("body", b""))
            if read > most:
                raise _TooLarge
            return event

        async def noted(event: Event) -> None:
            nonlocal answered
            if read <= most:  # what the inside makes of the exception is not the answer
                answered = True
                await send(event)

        with suppress(_TooLarge):
            await self._inside(scope, counted, noted)
        if read > most and not answered:
            await _refuse(TOO_LARGE, scope, send)


def _says_at_most(scope: Scope, most: int) -> bool:
    """Whether the request announces no more than `most` bytes, or nothing at all."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return all(value.isdigit() and int(value) <= most for value in lengths)


async def _refuse(status: int, scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    # What was not read is not waited for either.
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
