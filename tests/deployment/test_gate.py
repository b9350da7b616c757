"""The gate: only listed paths, and no more than their bounds is read."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sottovoce.deployment.gate import Event, Gate, Receive, Scope, Send

PATHS = {"/v1/fleet/pull-messages": 10}


class _Inside:
    """An application that reads all that it is sent. Where that fails, it is to blame itself, as many are."""

    def __init__(self, *, forgiving: bool = False) -> None:
        self.reached, self._forgiving = 0, forgiving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached += 1
        status = 200
        try:
            while (await receive()).get("more_body"):
                pass
        except Exception:
            if not self._forgiving:
                raise
            status = 500
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def asked(
    path: str, bodies: Sequence[bytes] = (b"",), *, forgiving: bool = False, **scope: Any
) -> tuple[int, int, int]:
    """The status that a request gets, how often the inside was reached, and how many events were read of it."""
    inside, sent, read = _Inside(forgiving=forgiving), list[Event](), 0

    async def receive() -> Event:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": bodies[read - 1], "more_body": read < len(bodies)}

    async def send(event: Event) -> None:
        sent.append(event)

    request = {"type": "http", "method": "POST", "path": path, "headers": [], **scope}
    asyncio.run(Gate(inside, paths=PATHS)(request, receive, send))
    assert [event["type"] for event in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], inside.reached, read


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-nodes",
        "/v1/control/start-run",
        "/v1/runtime/pull-messages",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/../control/list-nodes",
        "/docs",
        "/",
    ],
)
def test_a_stranger_reaches_nothing_else(path: str) -> None:
    assert asked(path) == (403, 0, 0)


def test_other_methods_are_refused() -> None:
    assert asked("/v1/fleet/pull-messages", method="GET") == (403, 0, 0)


def test_what_fits_comes_through() -> None:
    assert asked("/v1/fleet/pull-messages", [b"12345", b"67890"]) == (200, 1, 2)


def test_what_says_that_it_is_too_large_is_not_read() -> None:
    large = [(b"content-length", b"11")]
    assert asked("/v1/fleet/pull-messages", headers=large) == (413, 0, 0)
    for nonsense in (b"-1", b"ten", b""):
        assert asked("/v1/fleet/pull-messages", headers=[(b"content-length", nonsense)]) == (413, 0, 0)


@pytest.mark.parametrize("forgiving", [False, True])
def test_what_does_not_say_how_large_it_is_is_read_up_to_its_bound(forgiving: bool) -> None:
    endless = [b"12345"] * 1000
    assert asked("/v1/fleet/pull-messages", endless, forgiving=forgiving) == (413, 1, 3)


def test_a_websocket_is_closed() -> None:
    sent: list[Event] = []

    async def send(event: Event) -> None:
        sent.append(event)

    async def receive() -> Event:
        raise AssertionError("nothing is read of it")

    scope = {"type": "websocket", "path": "/v1/fleet/pull-messages", "headers": []}
    asyncio.run(Gate(_Inside(), paths=PATHS)(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
