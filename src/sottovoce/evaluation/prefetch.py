"""Work done ahead of time: reading the next batches while the present one is computed."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], *, depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made in a thread of their own, up to `depth` before they are asked for.

    What goes wrong there is raised here; closing it ends the thread. `items` is only ever touched by that one thread.

    >>> list(ahead(n * n for n in range(4)))
    [0, 1, 4, 9]
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        waiting = deque(thread.submit(next, source, end) for _ in range(depth))
        try:
            while (item := waiting.popleft().result()) is not end:
                waiting.append(thread.submit(next, source, end))
                yield item  # type: ignore[misc]  # it is no sentinel, hence a T
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
