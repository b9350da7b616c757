"""A relay for each node that counts what passes: bytes on the wire, with TLS, HTTP and what is sent twice."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, final

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

_PIECE = 1 << 18


@dataclass
class Passed:
    """Bytes from a node to the server, and back."""

    up: int = 0
    down: int = 0


@final
class Relay:
    """Listens on a port for each of `names`, and hands everything on to 127.0.0.1:`port`."""

    def __init__(self, names: Sequence[str], *, port: int) -> None:
        self.passed = {name: Passed() for name in names}
        self.ports: dict[str, int] = {}
        self._port, self._loop = port, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(names), self._loop).result()

    async def _listen(self, names: Sequence[str]) -> None:
        for name in names:
            server = await asyncio.start_server(self._handler(self.passed[name]), "127.0.0.1", 0)
            self.ports[name] = server.sockets[0].getsockname()[1]

    def _handler(self, passed: Passed) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, back = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                writer.close()
                return
            await asyncio.gather(_pump(reader, back, passed, "up"), _pump(there, writer, passed, "down"))

        return handle

    def total(self) -> Passed:
        """Of all nodes together, so far."""
        return Passed(sum(one.up for one in self.passed.values()), sum(one.down for one in self.passed.values()))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Passed, way: str) -> None:
    try:
        while piece := await reader.read(_PIECE):
            setattr(passed, way, getattr(passed, way) + len(piece))
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
