"""The interface between messages and what carries them: bytes out to nodes by name, bytes back.

    LocalLink    in this process: tests, and simulated fleets
    FlowerLink   over TLS, to nodes with keys (`transport.flower`)

A link is not trusted. It may lose, repeat, delay, swap and invent messages: orders and answers are signed, and name
what they belong to (`network.messages`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol, final

# A client's end: an order's bytes in, its answer's bytes out. It never raises; None is to stay silent.
AnswerFunction = Callable[[bytes], bytes | None]


class SentOrders(Protocol):
    """Orders that were handed out, and are open until their answers are taken."""

    def answers(self) -> Mapping[str, bytes]:
        """Wait for one answer each, until the time for them is over; what comes later is lost."""
        ...

    def close(self) -> None:
        """Take no answers any more."""
        ...


class Link(Protocol):
    """The server's end. Nodes have names: fingerprints of their public keys."""

    def present(self) -> frozenset[str]:
        """Who can be asked now."""
        ...

    def ask(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        """Hand each node its order, and wait for one answer each, together no longer than `seconds`.

        Nodes that are away, too late, or answer with more than `limit` bytes, are missing from what comes back.
        """
        ...

    def send(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> SentOrders:
        """Hand each node its order, as `ask` does, and wait for nothing. A node gets older orders first."""
        ...

    def departures(self) -> Mapping[str, bytes]:
        """Nodes' messages since the last call that they have left for good, unchecked."""
        ...

    def close(self) -> None:
        """Give back what it holds besides memory."""
        ...


@final
class LocalLink:
    """Nodes in this process, asked in order of their names. Nobody is late here: who does not answer returns None."""

    def __init__(self, answers: Mapping[str, AnswerFunction]) -> None:
        self._answers = dict(answers)

    def present(self) -> frozenset[str]:
        return frozenset(self._answers)

    def ask(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        answers = ((name, self._answers[name](orders[name])) for name in sorted(orders) if name in self._answers)
        return {name: answer for name, answer in answers if answer is not None and len(answer) <= limit}

    def send(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> "AnsweredOrders":
        return AnsweredOrders(self.ask(orders, seconds=seconds, limit=limit))

    def departures(self) -> Mapping[str, bytes]:
        return {}

    def close(self) -> None:
        pass


@final
class AnsweredOrders:
    """Orders that were answered when they were sent."""

    def __init__(self, found: Mapping[str, bytes]) -> None:
        self._found = found

    def answers(self) -> Mapping[str, bytes]:
        return self._found

    def close(self) -> None:
        pass
