"""A line between nodes and their server that a test can cut: it carries bytes, and knows nothing of what they are."""

import contextlib
import socket
import threading
from typing import Self


class Line:
    """Listens at `port`, and carries what comes to the `server`'s port and back."""

    def __init__(self, server: int) -> None:
        self._server, self._left, self.cuts = server, None, 0
        self._counting = threading.Lock()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]

    _left: int | None

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def cut_after(self, count: int) -> None:
        """Once so many bytes have gone up, the connection that carries the last of them is cut."""
        self._left = count

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                for source, target, upwards in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._carry, args=(source, target, upwards), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, upwards: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if upwards and self._is_cut(len(data)):
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _is_cut(self, count: int) -> bool:
        with self._counting:
            if self._left is None:
                return False
            self._left -= count
            if self._left > 0:
                return False
            self._left, self.cuts = None, self.cuts + 1
            return True
