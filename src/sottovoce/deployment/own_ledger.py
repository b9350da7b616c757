"""What a node remembers of itself: what its user has accepted, and every answer that has left it.

HOME/ledger.jsonl    append-only lines, each sealed by a hash of all before it (`privacy.chain`)
HOME/paused          while it is there, nothing is answered; `left`: nor ever again
HOME/start/DIGEST    models that training started from, as they came

A line is on the disk before the answer that it tells of may leave: a node that was killed and comes back knows what it
has sent, and sends nothing else in its place. The file is the user's own and goes nowhere; times and sizes in it are
for their quota.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sottovoce.deployment.messages import Code, Kind, Order, Refused
from sottovoce.errors import InputError
from sottovoce.files import sync_folder
from sottovoce.privacy.chain import ChainWriter

LEDGER, PAUSED, LEFT = "ledger.jsonl", "paused", "left"


@dataclass(frozen=True, kw_only=True)
class Quota:
    """The most that a node does in a day: rounds, seconds of training, bytes sent. None is no limit."""

    rounds: int | None = None
    seconds: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name, most in vars(self).items():
            if most is not None and not most > 0:
                raise InputError(f"quota: {name}={most}, expected a positive number, or none; pausing is for zero")


@dataclass
class _Spent:
    rounds: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass
class _Acceptance:
    """A recipe that its user has said yes to: for one run, the first that asked."""

    run: str | None = None
    updates: int = 0


@dataclass
class _Run:
    """What was answered in a run: attempts only ever grow, and each asks for each kind once."""

    attempt: int = 0
    kinds: set[str] = field(default_factory=set)


class OwnLedger:
    """A node's own record, held against other processes while it is open."""

    def __init__(self, home: Path) -> None:
        self._home, self._writing = home, threading.Lock()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = ChainWriter(home / LEDGER)
        os.chmod(home / LEDGER, 0o600)
        self._accepted: dict[str, _Acceptance] = {}
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        self._days: defaultdict[str, _Spent] = defaultdict(_Spent)
        try:
            self._file.cut_torn_end()  # an answer that was never written down has never left
            self._read(self._file.chain.records)
        except BaseException:
            self._file.close()
            raise

    def _read(self, records: Sequence[dict[str, Any]]) -> None:
        for number, record in enumerate(records, start=1):
            try:
                self._take(record)
            except (KeyError, TypeError):
                raise InputError(f"{self._home / LEDGER} line {number} is no record of this release") from None

    def close(self) -> None:
        self._file.close()

    # What its user decides.

    def accept(self, recipe: bytes) -> None:
        """The user says yes to a recipe; to one that was served before, for another run."""
        self._append({"accepted": recipe.hex()})

    def has_accepted(self, recipe: bytes) -> bool:
        return recipe.hex() in self._accepted

    def check_standing(self) -> None:
        """Refused while its user does not want to take part."""
        if (self._home / LEFT).exists():
            raise Refused(Code.LEFT)
        if (self._home / PAUSED).exists():
            raise Refused(Code.PAUSED)

    def check_quota(self, quota: Quota, *, size: int, now: datetime) -> None:
        """Refused where one more round, and an answer of so many bytes, would be more than is left of today."""
        spent = self._days[_day(now)]
        over = (
            (quota.rounds is not None and spent.rounds >= quota.rounds)
            or (quota.seconds is not None and spent.seconds >= quota.seconds)
            or (quota.bytes is not None and spent.bytes + size > quota.bytes)
        )
        if over:
            raise Refused(Code.OVER_QUOTA)

    # What it has answered.

    def check_round(self, order: Order, *, rounds: int, most_updates: int | None) -> None:
        """Refused unless `order` begins a new attempt at one of the `rounds` that its user has accepted."""
        accepted = self._accepted.get(order.recipe.hex())
        if accepted is None or accepted.run not in (None, order.run.hex()) or order.step >= rounds:
            raise Refused(Code.NOT_ACCEPTED)
        if order.attempt <= self._runs[order.run.hex()].attempt:
            raise Refused(Code.REPEATED)
        if most_updates is not None and accepted.updates >= most_updates:
            raise Refused(Code.NOT_ACCEPTED)

    def add(self, order: Order, *, size: int, seconds: float, now: datetime) -> None:
        """Write down that an answer of `size` bytes to `order` leaves; Refused where one has left before."""
        run, kind = order.run.hex(), order.kind.name.lower()
        before = self._runs[run]
        if order.attempt < before.attempt or (order.attempt == before.attempt and kind in before.kinds):
            raise Refused(Code.REPEATED)
        self._append(
            {
                "answered": kind,
                "run": run,
                "step": order.step,
                "attempt": order.attempt,
                "recipe": order.recipe.hex(),
                "bytes": size,
                "seconds": round(seconds, 3),
                "day": _day(now),
            }
        )

    def _append(self, record: dict[str, Any]) -> None:
        with self._writing:  # a user may say yes while an order is being answered
            self._file.append(record)
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        """One line's meaning."""
        if "accepted" in record:
            self._accepted[record["accepted"]] = _Acceptance()
            return
        run, spent, is_round = self._runs[record["run"]], self._days[record["day"]], record["answered"] == _ROUND
        if record["attempt"] > run.attempt:
            run.attempt, run.kinds = record["attempt"], set()
        run.kinds.add(record["answered"])
        spent.rounds += is_round
        spent.seconds += record["seconds"]
        spent.bytes += record["bytes"]
        if is_round and (accepted := self._accepted.get(record["recipe"])) is not None:
            accepted.run, accepted.updates = record["run"], accepted.updates + 1


_ROUND = Kind.TRAIN.name.lower()


def _day(now: datetime) -> str:
    return now.date().isoformat()


# For the user, also while a node is running.


def pause(home: Path) -> None:
    """Answer nothing until `resume`."""
    _mark(home, PAUSED)


def resume(home: Path) -> None:
    (home / PAUSED).unlink(missing_ok=True)
    sync_folder(home)


def leave(home: Path) -> None:
    """Answer nothing any more, for good: there is no way back but a new key in a new run."""
    _mark(home, LEFT)


def _mark(home: Path, name: str) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / name).touch()
    sync_folder(home)
