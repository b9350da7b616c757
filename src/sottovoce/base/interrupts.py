"""What SIGINT, SIGTERM and SIGHUP do: while training they ask to stop, elsewhere they end all in good order."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within this scope a signal only asks to stop; the function it gives says whether one did.

    So what was begun is finished and saved first.
    """
    asked = False

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    with _handled(ask):
        yield lambda: asked


@contextmanager
def exit_cleanly_on_signals() -> Iterator[None]:
    """Within this scope any of the signals ends the program by an exception, as Ctrl-C does: files are put in order and
    processes ended on its way out. The first one decides; more of them do not disturb that.

    In another thread than the first, where no signal arrives, it changes nothing.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(end):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    # Who starts a program with `nohup` means it: SIGHUP stays ignored.
    wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
