"""The server's port with TLS, and bounds on what an unauthenticated connection can hold there.

A connection has some seconds for its handshake and for the head of each request, which is short. There is a fixed
number of connections, so that this process keeps files to write its ledger to; who comes above it is turned away at
once, and nodes try again.
"""

import asyncio
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sottovoce.base.errors import InputError

SECONDS = 10.0  # for a handshake, and for the head of a request
HEAD_BYTES = 1 << 14

_SHUTDOWN_SECONDS = 2.0  # until a connection that we have closed is gone, whatever the other side says
_LAST_SECONDS = 5.0  # for requests that are being answered when we close
_OWN_FILES = 256  # that this process may need besides its connections


@final
class Listener:
    """Serves `application` at `host:port` from a thread of its own, over at most `connections` at a time.

    `certificate` and `key` are files. Port 0 is any that is free; `port` is the one it got.
    """

    def __init__(
        self, application: Callable[..., Any], host: str, port: int, *, certificate: str, key: str, connections: int
    ) -> None:
        config = uvicorn.Config(
            application,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            http=_TimedProtocol,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=round(_LAST_SECONDS),
            lifespan="off",
            ws="none",
            log_config=None,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"{certificate} with {key} cannot be used ({error.strerror})") from None
        listening = _listen(host, port)
        self.port: int = listening.getsockname()[1]
        self._server = _Server(config, most=_limit_to_open_files(connections))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="nodes' API", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@final
class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's, but it counts who comes in."""

    def __init__(self, config: uvicorn.Config, *, most: int) -> None:
        super().__init__(config)
        self._most = most

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers: list[asyncio.Server] = []  # of uvicorn's own making
        self._accepting = [asyncio.create_task(self._accept(listening)) for listening in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _accept(self, listening: socket.socket) -> None:
        loop, handshakes = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        listening.setblocking(False)
        while True:
            connection, _ = await loop.sock_accept(listening)
            if len(self.server_state.connections) + len(handshakes) >= self._most:
                connection.close()
            else:
                handshake = loop.create_task(self._handshake(connection))
                handshakes.add(handshake)
                handshake.add_done_callback(handshakes.discard)
            await asyncio.sleep(0)  # others, too, while many come

    async def _handshake(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self.config.ssl,
                ssl_handshake_timeout=SECONDS,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
        except OSError:  # ssl's errors are some
            connection.close()

    def _protocol(self) -> asyncio.Protocol:
        return _TimedProtocol(config=self.config, server_state=self.server_state, app_state={})


@final
class _TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Waits so long for the head of each request. How long a body may take is limited by `RequestLimits`."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        self._cancel()
        self._waiting = self.loop.call_later(SECONDS, self._abort_if_idle)

    def _cancel(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _abort_if_idle(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()


def _limit_to_open_files(connections: int) -> int:
    """As many of them as this process may have open besides its own files; that number is raised where it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OWN_FILES
    if wanted > soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft - _OWN_FILES)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)  # from here on connections are queued
    except OSError as error:
        listening.close()
        raise InputError(f"--listen {host}:{port}: {error.strerror}") from None
    return listening
