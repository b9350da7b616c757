"""The seam between what is said and what carries it: bytes out to nodes by name, bytes back.

    LocalLink       in this process: tests, and fleets that are simulated
    FlowerLink      over TLS, to nodes with keys (`network.transport.flower`)
    RemindingLink   another one, whose operator is reminded of what expires

A link is trusted with nothing but its effort. Whoever runs it may lose, repeat, delay, swap and invent messages: orders
and answers are signed, and say what they belong to (`network.messages`).
"""

from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Protocol, final

# A client's end: an order's bytes in, its answer's bytes out. It never raises; None is to stay silent.
AnswerFunction = Callable[[bytes], bytes | None]


class Link(Protocol):
    """The server's end. Nodes have names: fingerprints of their public keys."""

    def present(self) -> frozenset[str]:
        """Who can be asked now."""
        ...

    def ask(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        """Hand each node its order, and wait for one answer each, together no longer than `seconds`.

        Who is away, answers too late, or with more than `limit` bytes, is missing from what comes back.
        """
        ...

    def departures(self) -> Mapping[str, bytes]:
        """What nodes have said, unasked, since this was last called: that they left for good. Nobody has checked it."""
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

    def departures(self) -> Mapping[str, bytes]:
        return {}

    def close(self) -> None:
        pass


@final
class RemindingLink:
    """`link`; before orders, once a day, its operator hears what `reminders` has to say at the time `now` gives."""

    def __init__(
        self,
        link: Link,
        *,
        reminders: Callable[[datetime], list[str]],
        now: Callable[[], datetime],
        say: Callable[[str], None],
    ) -> None:
        self._link, self._reminders, self._now, self._say = link, reminders, now, say
        self._reminded: date = now().date()  # what there was to say today is said at the start

    def present(self) -> frozenset[str]:
        return self._link.present()

    def ask(self, orders: Mapping[str, bytes], *, seconds: float, limit: int) -> Mapping[str, bytes]:
        now = self._now()
        if now.date() != self._reminded:
            self._reminded = now.date()
            for line in self._reminders(now):
                self._say(line)
        return self._link.ask(orders, seconds=seconds, limit=limit)

    def departures(self) -> Mapping[str, bytes]:
        return self._link.departures()

    def close(self) -> None:
        self._link.close()
