"""Who of a roster is here, away, or out of a run for good, and whether those who are left can make a round.

    still in   everybody but those who are revoked, have left for good, or have sent all that they accepted
    here       connected, and told what it is about; who is paused is away like anybody who is not connected

K, the number of people that the plan counts, stays as it is whoever goes. Everybody is drawn by a coin of their own
with q = S/K (or among K places), and somebody who is out counts as zero wherever they are drawn: for everybody else
nothing changes but that fewer people are in a sum. So a departure changes no guarantee; it makes cohorts smaller beside
the same noise. What a departure can do is leave too few for any sum to be opened: then a run ends.

All words here are for whoever runs the server, on its terminal; nothing of it goes into what may be published.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import final

from sottovoce.deployment.messages import Code
from sottovoce.deployment.roster import Roster
from sottovoce.files import read_json, sealed, unsealed, written_atomically
from sottovoce.training.remote_clients import TooFewClients

LEFT, REVOKED, SENT_ALL = "left for good", "revoked", "has sent all that was accepted"

_MOST_NAMES = 8  # in one line
_IN_WORDS = {
    Code.NOT_ACCEPTED: "has not accepted the invitation",
    Code.PAUSED: "paused",
    Code.OVER_QUOTA: "over its own limit for today",
    Code.UNABLE: "cannot take part, and is told why",
}


@dataclass(frozen=True, kw_only=True)
class Needed:
    """How many nodes a round waits for: `wanted`, or all that are still in if they are fewer; never below `fewest`."""

    wanted: int
    fewest: int = 1

    def of(self, still_in: int) -> int:
        return max(self.fewest, min(self.wanted, still_in))


@final
class Departures:
    """The nodes that have left for good, in a file of a run: a server that goes on waits for none of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.nodes: frozenset[str] = frozenset()
        if path.exists():
            self.nodes = frozenset(unsealed(read_json(path), where=path)["left"])

    def add(self, nodes: Iterable[str]) -> None:
        """On the disk when this returns."""
        self.nodes = self.nodes.union(nodes)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with written_atomically(self._path, private=True) as file:
            file.write(json.dumps(sealed({"left": sorted(self.nodes)})).encode())


@final
class Attendance:
    """By place in the roster. `now` is for the times that an operator reads."""

    def __init__(
        self,
        roster: Roster,
        *,
        needed: Needed,
        departures: Departures,
        now: Callable[[], datetime],
        say: Callable[[str], None],
    ) -> None:
        self._users, self._needed, self._departures, self._now, self._say = roster.users, needed, departures, now, say
        self._seen: dict[int, datetime] = {}
        self.out: dict[int, str] = {place: REVOKED for place, user in enumerate(roster.users) if user.revoked}
        left = [place for place, user in enumerate(self._users) if user.node.hex() in departures.nodes]
        self.out |= dict.fromkeys(set(left) - self.out.keys(), LEFT)

    @property
    def still_in(self) -> int:
        return len(self._users) - len(self.out)

    @property
    def needed(self) -> int:
        """By a round, of those who are still in."""
        return self._needed.of(self.still_in)

    def saw(self, places: Iterable[int]) -> None:
        """They are here now."""
        self._seen |= dict.fromkeys(places, self._now())

    def took_out(self, places: Collection[int], reason: str) -> None:
        """They are out for good, for this `reason`."""
        new = [place for place in places if place not in self.out]
        if not new:
            return
        self.out |= dict.fromkeys(new, reason)
        if reason == LEFT:
            self._departures.add(self._users[place].node.hex() for place in new)
        self._say(
            f"{self._names(new)}: {reason}; {self.still_in:,} of {len(self._users):,} nodes can still take part, and "
            f"a round needs {self.needed:,}"
        )

    def check_enough(self) -> None:
        """TooFewClients where no round can be made any more, whoever comes back."""
        if self.still_in < self._needed.fewest:
            raise TooFewClients(
                f"only {self.still_in:,} of {len(self._users):,} nodes can still take part, and a round needs "
                f"{self._needed.fewest:,} ({self._told_out()}): no further round is made or charged; a new run, with "
                "more people or a smaller --least, asks everybody anew"
            )

    def waiting(self, here: Collection[int], refused: Mapping[int, Code]) -> str:
        """What is waited for, and for whom."""
        absent = [place for place in range(len(self._users)) if place not in self.out and place not in here]
        not_ready = {place: _words(refused[place]) for place in absent if place in refused}
        away = {place: self._since(place) for place in absent if place not in refused}
        listed = {"away": away, "not ready": not_ready, "out": self.out}
        return "; ".join(
            [
                f"waiting until at least {self.needed:,} of {self.still_in:,} nodes are here: {len(here):,} are",
                *(f"{what}: {self._names(whom, whom)}" for what, whom in listed.items() if whom),
            ]
        )

    def _since(self, place: int) -> str:
        seen = self._seen.get(place)
        return "not seen yet" if seen is None else f"last seen {seen:%H:%M:%S}"

    def _told_out(self) -> str:
        return self._names(self.out, self.out)

    def _names(self, places: Iterable[int], words: Mapping[int, str] | None = None) -> str:
        listed = sorted(places)
        shown = [
            self._users[place].name + (f" ({words[place]})" if words is not None else "")
            for place in listed[:_MOST_NAMES]
        ]
        more = len(listed) - len(shown)
        return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _words(code: Code) -> str:
    return _IN_WORDS.get(code, code.name.lower())
