"""The gate: only listed paths, and no more than their bounds is read."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from sottovoce.network.transport.request_limits import (
    AT_ONCE,
    REPLAYED,
    UNKNOWN,
    Caller,
    Event,
    Receive,
    RequestLimits,
    Scope,
    Send,
)

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


NOTHING = hashlib.sha256().digest()


def somebody(scope: Scope) -> Caller | int:
    """Anna, who has signed what `signed` says, or a stranger."""
    if (b"a", b"stranger") in scope["headers"]:
        return UNKNOWN
    return Caller("anna", hashlib.sha256(scope.get("signed", b"")).digest())


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

    request = {"type": "http", "method": "POST", "path": path, "headers": [], "signed": b"".join(bodies), **scope}
    asyncio.run(RequestLimits(inside, paths=PATHS, authenticate=somebody)(request, receive, send))
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


def test_of_a_stranger_nothing_is_read() -> None:
    assert asked("/v1/fleet/pull-messages", headers=[(b"a", b"stranger")]) == (401, 0, 0)


@pytest.mark.parametrize("forgiving", [False, True])
def test_another_body_than_was_signed_is_not_handed_on(forgiving: bool) -> None:
    """The inside never gets to the end of it."""
    for signed in (b"", b"12345", b"1234567891"):
        found = asked("/v1/fleet/pull-messages", [b"12345", b"67890"], forgiving=forgiving, signed=signed)
        assert found == (401, 1, 2)


def test_who_is_refused_hears_what_to_sign_and_a_replay_does_not() -> None:
    """The challenge goes with 401 alone."""

    async def refused(status: int) -> list[tuple[bytes, bytes]]:
        sent: list[Event] = []

        async def send(event: Event) -> None:
            sent.append(event)

        async def receive() -> Event:
            raise AssertionError("nothing is read of it")

        gate = RequestLimits(_Inside(), paths=PATHS, authenticate=lambda _: status, challenge=(b"session", b"abc"))
        await gate({"type": "http", "method": "POST", "path": "/v1/fleet/pull-messages", "headers": []}, receive, send)
        assert sent[0]["status"] == status
        headers: list[tuple[bytes, bytes]] = sent[0]["headers"]
        return headers

    assert (b"session", b"abc") in asyncio.run(refused(UNKNOWN))
    assert (b"session", b"abc") not in asyncio.run(refused(REPLAYED))


def test_one_node_has_so_many_requests_at_a_time_and_others_as_many() -> None:
    """All but the last wait inside; somebody else is let in all the same, and so is the node when they are done."""

    async def all_at_once() -> list[int]:
        opened, statuses = asyncio.Event(), list[int]()

        async def inside(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["headers"] != [(b"a", b"last")]:
                await opened.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(event: Event) -> None:
            statuses.extend([event["status"]] if "status" in event else [])

        async def receive() -> Event:
            return {"type": "http.request", "body": b""}

        gate = RequestLimits(inside, paths=PATHS, authenticate=lambda scope: Caller(scope["user"], NOTHING))
        request: Scope = {"type": "http", "method": "POST", "path": "/v1/fleet/pull-messages", "headers": []}
        waiting = [asyncio.ensure_future(gate(request | {"user": "anna"}, receive, send)) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        one_more = request | {"headers": [(b"a", b"last")]}
        await gate(one_more | {"user": "anna"}, receive, send)
        await gate(one_more | {"user": "bert"}, receive, send)
        opened.set()
        await asyncio.gather(*waiting)
        await gate(one_more | {"user": "anna"}, receive, send)
        return statuses

    assert asyncio.run(all_at_once()) == [503, 200, *[200] * AT_ONCE, 200]


def test_a_body_that_stops_is_given_up_and_a_whole_one_may_wait() -> None:
    async def stops(*, after: int) -> int:
        sent, events = list[Event](), iter([{"type": "http.request", "body": b"1", "more_body": True}] * after)

        async def receive() -> Event:
            return next(events, None) or await asyncio.Event().wait()  # type: ignore[func-returns-value]

        async def send(event: Event) -> None:
            sent.append(event)

        gate = RequestLimits(_Inside(), paths=PATHS, authenticate=somebody, silent_seconds=0)
        await gate({"type": "http", "method": "POST", "path": "/v1/fleet/pull-messages", "headers": []}, receive, send)
        status: int = sent[0]["status"]
        return status

    assert asyncio.run(stops(after=0)) == 408


def test_a_websocket_is_closed() -> None:
    sent: list[Event] = []

    async def send(event: Event) -> None:
        sent.append(event)

    async def receive() -> Event:
        raise AssertionError("nothing is read of it")

    scope = {"type": "websocket", "path": "/v1/fleet/pull-messages", "headers": []}
    asyncio.run(RequestLimits(_Inside(), paths=PATHS, authenticate=somebody)(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
