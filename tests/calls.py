"""What child processes do in tests of `sottovoce.base.children`: a module of its own, which they import by name."""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from sottovoce.base.errors import InputError


def tenfold(number: int) -> int:
    if number == 13:
        raise InputError("13 brings bad luck")
    return 10 * number


def unsendable() -> Any:
    return lambda: None


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_middle_of_its_answer() -> None:
    def half(connection: Connection, _content: Any) -> None:
        os.write(connection.fileno(), b"\0\0\1\0" + b"." * 8)  # says 256 bytes, brings 8
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send_bytes = half  # type: ignore[attr-defined]
