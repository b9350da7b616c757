"""A node's own ledger: what its user has accepted, and every answer that has left it.

HOME/ledger.jsonl    append-only lines, each sealed by a hash of all before it (`privacy.chain`)
HOME/start/DIGEST    models that training started from, as they came

A line is on the disk before the answer that it records may leave: a node that was killed and comes back knows what it
has sent, and sends nothing else in its place. The file stays with the user; times and sizes in it are for their quota.
"""

import math
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.network.limits import Limits
from sottovoce.network.messages import AnswerCode, Order, OrderKind, Refused
from sottovoce.network.node.home import LEDGER, LEFT, PAUSED, check_home, claim_home, participation_status
from sottovoce.network.turns import Turns
from sottovoce.privacy.chain import ChainWriter, read_chain

DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class Quota:
    """The most that a node does in a day: rounds, seconds of training, bytes sent. None is no limit.

    Above the first two it sends zeros and trains nothing, above the third it sends nothing: whether somebody still
    trains depends on their speech and on earlier sampling, and must show in nothing but their own update.
    """

    rounds: int | None = None
    seconds: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name, most in vars(self).items():
            if most is not None and not (most > 0 and math.isfinite(most)):
                raise InputError(f"quota: {name}={most}, expected a positive number, or none; pausing is for zero")
        if self.seconds is not None and self.seconds > DAY_SECONDS:
            raise InputError(f"quota: seconds={self.seconds:g}, expected at most the {DAY_SECONDS:,} of a day, or none")


@dataclass
class _Spent:
    """What a node did in a day; `zeros`: in so many rounds it did not train."""

    rounds: int = 0
    zeros: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """One answer."""
        idle = record.get("idle", False)
        self.rounds += record["answered"] in (_ROUND, _WER) and not idle
        self.zeros += idle
        self.seconds += record["seconds"]
        self.bytes += record["bytes"]


@dataclass
class _Run:
    """What was answered in a run: attempts only ever grow, and each asks for each kind once.

    Updates and word error rates are counted by run, so that accepting the same run again does not start a new count.
    `row` is the last of correlated noise that an update was for.
    """

    attempt: int = 0
    row: int | None = None
    kinds: set[str] = field(default_factory=set)
    updates: int = 0
    wers: int = 0
    is_over: bool = False


class NodeLedger:
    """A node's own record, held against other processes while it is open."""

    def __init__(self, home: Path) -> None:
        self._home, self._writing = home, threading.Lock()
        claim_home(home)
        self._file = ChainWriter(home / LEDGER)
        os.chmod(home / LEDGER, 0o600)
        self._accepted: dict[str, str | None] = {}  # recipes, with the run that they are for: the first that asked
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        self._days: defaultdict[str, _Spent] = defaultdict(_Spent)
        try:
            self._file.cut_torn_end()  # an answer that was never written down has never left
            for number, record in enumerate(self._file.chain.records, start=1):
                self._read(record, number)
        except BaseException:
            self._file.close()
            raise

    def _read(self, record: dict[str, Any], number: int) -> None:
        try:
            self._take(record)
        except (KeyError, TypeError):
            raise InputError(f"{self._home / LEDGER} line {number} is no record of this release") from None

    def close(self) -> None:
        self._file.close()

    # What its user decides.

    def accept(self, recipe: bytes) -> None:
        """The user accepts a recipe; one that was served before, for another run."""
        self._append({"accepted": recipe.hex()})

    def has_accepted(self, recipe: bytes) -> bool:
        """Whether they ever did, for whatever run."""
        return recipe.hex() in self._accepted

    def has_accepted_for(self, recipe: bytes, run: bytes) -> bool:
        """Whether they did for this run, which is not over, or for one that had no name yet."""
        is_for_run = self._accepted.get(recipe.hex(), "") in (None, run.hex())
        return is_for_run and not self._runs[run.hex()].is_over

    def check_standing(self) -> None:
        """Refused while its user does not want to take part."""
        if self.has_left:
            raise Refused(AnswerCode.LEFT)
        if (self._home / PAUSED).exists():
            raise Refused(AnswerCode.PAUSED)

    @property
    def has_left(self) -> bool:
        return (self._home / LEFT).exists()

    def may_train(self, quota: Quota, *, now: datetime) -> bool:
        """Whether one more round of training is left of today."""
        spent = self._days[_day(now)]
        return (quota.rounds is None or spent.rounds < quota.rounds) and (
            quota.seconds is None or spent.seconds < quota.seconds
        )

    def check_bytes(self, quota: Quota, *, size: int, now: datetime) -> None:
        """Refused where an answer of so many bytes would be more than is left of today."""
        if quota.bytes is not None and self._days[_day(now)].bytes + size > quota.bytes:
            raise Refused(AnswerCode.OVER_QUOTA)

    # What it has answered.

    def check_attempt(self, order: Order, *, is_accepted: bool, limits: Limits | None) -> None:
        """Refused unless `order` begins a new attempt, at what its user has accepted, within `limits` if there are."""
        if not self.has_accepted_for(order.recipe, order.run) or not is_accepted:
            raise Refused(AnswerCode.NOT_ACCEPTED)
        run = self._runs[order.run.hex()]
        if order.attempt <= run.attempt:
            raise Refused(AnswerCode.REPEATED)
        if limits is None:
            return
        is_round = order.kind is OrderKind.TRAIN
        sent, most = (run.updates, limits.updates) if is_round else (run.wers, limits.measurements)
        if order.attempt > limits.attempts or sent >= most:
            raise Refused(AnswerCode.ABOVE_ACCEPTED)

    def check_turn(self, order: Order, row: int, turns: Turns) -> None:
        """Refused unless `row` is the turn of this node, and far enough from the last that it has answered for."""
        turns.check(row, step=order.step, last=self._runs[order.run.hex()].row)

    def has_sent_all(self, run: bytes, limits: Limits) -> bool:
        """Whether nothing more may be asked in `run` of what its user has accepted."""
        found = self._runs[run.hex()]
        used_up = found.updates >= limits.updates and found.wers >= limits.measurements
        return used_up or found.attempt >= limits.attempts

    def add(
        self, order: Order, *, size: int, seconds: float, now: datetime, idle: bool = False, row: int | None = None
    ) -> None:
        """Write down that an answer of `size` bytes to `order` leaves; Refused where one has left before.

        `idle`: it was not trained for. `row` is whose turn it was, where groups take turns.
        """
        run, kind = order.run.hex(), order.kind.name.lower()
        before = self._runs[run]
        if order.attempt < before.attempt or (order.attempt == before.attempt and kind in before.kinds):
            raise Refused(AnswerCode.REPEATED)
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
            | ({"idle": True} if idle else {})
            | ({} if row is None else {"row": row})
        )

    def end(self, order: Order, *, now: datetime) -> None:
        """Write down that the run of `order` is over; Refused where it was before, or is not the one accepted."""
        if self._runs[order.run.hex()].is_over:
            raise Refused(AnswerCode.REPEATED)
        if not self.has_accepted_for(order.recipe, order.run):
            raise Refused(AnswerCode.NOT_ACCEPTED)
        self._append({"ended": order.run.hex(), "recipe": order.recipe.hex(), "rounds": order.step, "day": _day(now)})

    def _append(self, record: dict[str, Any]) -> None:
        with self._writing:  # a user may accept while an order is being answered
            self._file.append(record)
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if "accepted" in record:
            self._accepted[record["accepted"]] = None
            return
        if "ended" in record:
            self._runs[record["ended"]].is_over = True
            if record["recipe"] not in self._accepted:
                raise KeyError(record["recipe"])
            self._accepted[record["recipe"]] = record["ended"]
            return
        run, kind = self._runs[record["run"]], record["answered"]
        if record["attempt"] > run.attempt:
            run.attempt, run.kinds = record["attempt"], set()
        run.kinds.add(kind)
        run.row = record.get("row", run.row)
        self._days[record["day"]].add(record)
        run.updates += kind == _ROUND
        run.wers += kind == _WER
        if kind in (_ROUND, _WER) and record["recipe"] in self._accepted:
            self._accepted[record["recipe"]] = record["run"]


_ROUND, _WER = OrderKind.TRAIN.name.lower(), OrderKind.WER.name.lower()


def _day(now: datetime) -> str:
    return now.date().isoformat()


# For its owner, also while a node is running.


def describe_node(home: Path) -> list[str]:
    """What a node has accepted and sent, a line each; InputError where there is none."""
    check_home(home)
    lines = [f"{home}: {participation_status(home)}"]
    if not (home / LEDGER).exists():  # it is just being joined from
        return lines
    days: defaultdict[str, _Spent] = defaultdict(_Spent)
    for record in read_chain(home / LEDGER).records:
        if "accepted" in record:
            lines.append(f"accepted {record['accepted']}")
        elif "ended" in record:
            lines.append(f"{record['day']}: the run of {record['recipe']} was over after {record['rounds']:,} rounds")
        else:
            days[record["day"]].add(record)
    for day, spent in sorted(days.items()):
        zeros = f"; zeros in {spent.zeros:,} more" if spent.zeros else ""
        lines.append(
            f"{day}: trained in {spent.rounds:,} rounds for {spent.seconds:,.1f} s{zeros}; "
            f"sent {spent.bytes / 1e6:,.2f} MB"
        )
    return lines
