"""Which nodes of a roster are connected, away, or out of a run for good, and whether enough are left for a round.

    still in   everybody but those who are revoked, have left for good, or have sent all that they accepted
    here       connected, and has the terms and the start model; who is paused is away like anybody not connected

K, the number of people that the plan counts, stays as it is whoever goes. Everybody is sampled independently with
q = S/K (or among K places), and somebody who is out counts as zero where they are sampled. So a departure changes no
guarantee; it makes cohorts smaller beside the same noise. Where too few are left to open any sum, the run ends. Where
groups take turns, all of this is about the group whose turn it is: nobody can take the place of somebody in another.

All messages here are for whoever runs the server; nothing of them goes into what may be published.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import final

from sottovoce.base.files import add_digest, check_digest, read_json, write_atomically
from sottovoce.network.messages import AnswerCode
from sottovoce.network.roster import Roster
from sottovoce.training.remote_clients import TooFewClients

LEFT, REVOKED, SENT_ALL = "left for good", "revoked", "has sent all that was accepted"

_MOST_NAMES = 8  # in one line
_REFUSALS = {
    AnswerCode.NOT_ACCEPTED: "has not accepted the invitation",
    AnswerCode.PAUSED: "paused",
    AnswerCode.OVER_QUOTA: "over its own limit for today",
    AnswerCode.UNABLE: "cannot take part, and is told why",
}


@dataclass(frozen=True, kw_only=True)
class NodesNeeded:
    """How many nodes a round waits for: `wanted`, or all that are still in if they are fewer; never below `fewest`."""

    wanted: int
    fewest: int = 1

    def of(self, still_in: int) -> int:
        return max(self.fewest, min(self.wanted, still_in))


@final
class Departures:
    """The nodes that have left for good, in a file of a run: a resumed server waits for none of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.nodes: frozenset[str] = frozenset()
        if path.exists():
            self.nodes = frozenset(check_digest(read_json(path), where=path)["left"])

    def add(self, nodes: Iterable[str]) -> None:
        """On the disk when this returns."""
        self.nodes = self.nodes.union(nodes)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with write_atomically(self._path, private=True) as file:
            file.write(json.dumps(add_digest({"left": sorted(self.nodes)})).encode())


@dataclass(frozen=True, kw_only=True)
class GroupsInTurn:
    """The places of each group, in the order of their turns, and how many of the group a round waits for."""

    places: tuple[frozenset[int], ...]
    needed: NodesNeeded


@final
class Availability:
    """By place in the roster. `now` is for the times that an operator reads.

    `drawn` are those whom the next cohort is drawn from: everybody, or one of the `groups`.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        needed: NodesNeeded,
        departures: Departures,
        now: Callable[[], datetime],
        say: Callable[[str], None],
        groups: GroupsInTurn | None = None,
    ) -> None:
        self._users, self._departures, self._now, self._say = roster.users, departures, now, say
        self._needed_of_all, self._groups = needed, groups
        self._seen: dict[int, datetime] = {}
        self.out: dict[int, str] = {}
        for place, user in enumerate(roster.users):
            if user.revoked or user.node.hex() in departures.nodes:
                self.out[place] = REVOKED if user.revoked else LEFT
        self.draw_from(None)

    def draw_from(self, row: int | None) -> None:
        """The next cohort is of the group whose turn `row` is; without one, of everybody."""
        self.drawn, self._needed, self._nodes = frozenset(range(len(self._users))), self._needed_of_all, "nodes"
        if row is not None and self._groups is not None:
            turn = row % len(self._groups.places)
            self.drawn, self._needed = self._groups.places[turn], self._groups.needed
            self._nodes = f"nodes of group {turn + 1:,} of {len(self._groups.places):,}"

    @property
    def still_in(self) -> int:
        """Of those whom the next cohort is drawn from."""
        return len(self.drawn - self.out.keys())

    @property
    def needed(self) -> int:
        """By a round, of those who are still in."""
        return self._needed.of(self.still_in)

    def mark_seen(self, places: Iterable[int]) -> None:
        self._seen |= dict.fromkeys(places, self._now())

    def mark_out(self, places: Collection[int], reason: str) -> None:
        """They are out for good, for this `reason`."""
        new = [place for place in places if place not in self.out]
        if not new:
            return
        self.out |= dict.fromkeys(new, reason)
        if reason == LEFT:
            self._departures.add(self._users[place].node.hex() for place in new)
        standing = f"{self._standing} can still take part, and a round needs {self.needed:,}"
        if self._groups is not None:
            standing = f"{len(self._users) - len(self.out):,} of {len(self._users):,} nodes can still take part"
        self._say(f"{self._names(new)}: {reason}; {standing}")

    @property
    def _standing(self) -> str:
        return f"{self.still_in:,} of {len(self.drawn):,} {self._nodes}"

    def check_enough(self) -> None:
        """TooFewClients where no round can be made any more, whoever comes back."""
        if self.still_in < self._needed.fewest:
            out = {place: reason for place, reason in self.out.items() if place in self.drawn}
            raise TooFewClients(
                f"only {self._standing} can still take part, and a round needs "
                f"{self._needed.fewest:,} ({self._names(out, out)}): no further round is made or charged; "
                "a new run, with more people or a smaller --least, asks everybody anew"
            )

    def describe_waiting(self, here: Collection[int], refused: Mapping[int, AnswerCode]) -> str:
        """How many nodes are waited for, and which are missing, and why."""
        here = self.drawn & frozenset(here)
        absent = [place for place in sorted(self.drawn) if place not in self.out and place not in here]
        not_ready = {p: _REFUSALS.get(refused[p], refused[p].name.lower()) for p in absent if p in refused}
        away = {place: self._last_seen(place) for place in absent if place not in refused}
        out = {place: reason for place, reason in self.out.items() if place in self.drawn}
        listed = {"away": away, "not ready": not_ready, "out": out}
        waiting = f"waiting until at least {self.needed:,} of {self.still_in:,} {self._nodes} are here"
        return "; ".join(
            [
                f"{waiting}: {len(here):,} are",
                *(f"{what}: {self._names(whom, whom)}" for what, whom in listed.items() if whom),
            ]
        )

    def _last_seen(self, place: int) -> str:
        seen = self._seen.get(place)
        return "not seen yet" if seen is None else f"last seen {seen:%H:%M:%S}"

    def _names(self, places: Collection[int], remarks: Mapping[int, str] | None = None) -> str:
        shown = [
            self._users[place].name + (f" ({remarks[place]})" if remarks is not None else "")
            for place in sorted(places)[:_MOST_NAMES]
        ]
        more = len(places) - len(shown)
        return ", ".join(shown) + (f" and {more:,} more" if more else "")
