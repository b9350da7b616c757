"""Trackers follow a run: what `metrics.jsonl` has goes to TensorBoard, MLflow or Weights & Biases, too.

    metrics.jsonl ─► follower ─► tracker        one follower for each; a service's works in a thread of its own

A follower reads the run's own files and nothing else, so no tracker gets what they do not have. Steps that a checkpoint
covers are never made again: only they are sent to a service, each once, also by a process that goes on with the run.
A tracker that fails is tried again at the next checkpoint; the run neither ends nor waits for it.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, final

from sottovoce.base.files import read_json, write_json
from sottovoce.base.parsing import parse_yaml
from sottovoce.training.run_folder import CONFIG, DIAGNOSTICS, METRICS, RESULTS, TRACKERS
from sottovoce.training.trackers import KINDS, WAIT_SECONDS, StepValues, TrackedRun, Tracker, flatten_numbers
from sottovoce.training.tracking import Tracking

Say = Callable[[str], None]

BATCH = 100  # steps that are sent, and noted as sent, together


class _Tail:
    """The lines that were added to a file since it was last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self, *, up_to: int) -> Iterator[dict[str, Any]]:
        """Records up to that step; later ones are left for the next time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                record = json.loads(line)
                if record["step"] > up_to:
                    return
                self._at += len(line)
                yield record


class Notes:
    """`trackers.json`: what each service calls the run, and the last step that it was sent."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / TRACKERS, Lock()
        self._known: dict[str, Any] = read_json(self._path) if self._path.exists() else {}
        self._is_closed = False

    def identity(self, name: str) -> str | None:
        found: str | None = self._known.get(name, {}).get("run")
        return found

    def sent(self, name: str) -> int:
        found: int = self._known.get(name, {}).get("step", -1)
        return found

    def write(self, name: str, identity: str, *, sent: int) -> None:
        with self._lock:
            if not self._is_closed:
                self._known[name] = {"run": identity, "step": sent}
                write_json(self._path, self._known)

    def close(self) -> None:
        """Write nothing any more: the run's folder is left."""
        with self._lock:
            self._is_closed = True


@final
class Follower:
    """Sends the records of one run to one tracker, in the thread that calls it. It raises nothing."""

    def __init__(
        self, name: str, run: TrackedRun, notes: Notes, *, diagnostics: bool, is_last_try: bool = False
    ) -> None:
        self.name, self.failures, self._is_last_try = name, 0, is_last_try
        self._why, self._sent = "", -1  # the last step that the tracker had when it was opened
        self._run, self._notes = run, notes
        self._metrics = _Tail(run.folder / METRICS)
        self._diagnostics = _Tail(run.folder / DIAGNOSTICS) if diagnostics else None
        self._waiting: list[StepValues] = []
        self._tracker: Tracker | None = None
        self._lines: SimpleQueue[str] = SimpleQueue()

    def lines(self) -> Iterator[str]:
        """What is to be said since the last call; by whom, and in which thread, is not known here."""
        while not self._lines.empty():
            yield self._lines.get()

    def send(self, up_to: int) -> None:
        """Send what the run's files have up to that step."""
        try:
            self._read(up_to)
            if self._waiting:
                self._send()
        except Exception as error:
            self._tracker = None  # opened anew, it can say how much it has
            self.failures += 1
            self._why = _explain(error)
            if self.failures == 1 and not self._is_last_try:
                self._lines.put(f"{self.name}: {self._why}; the run goes on, and tries again at its next checkpoints")

    def close(self, is_finished: bool) -> None:
        """Nothing more comes from this process."""
        try:
            if self._tracker is not None:
                self._tracker.close(is_finished)
        except Exception as error:
            self.failures += 1
            self._lines.put(f"{self.name}: {_explain(error)}")
        if self._waiting and (self._is_last_try or not is_finished):  # or else it is tried once more, at the very end
            self._lines.put(
                f"{self.name}: {len(self._waiting):,} steps are not sent, after {self.failures:,} failures "
                f"({self._why}): the same command with --resume sends them"
            )

    def leave(self) -> None:
        """Write nothing more into the run's folder, though the tracker has not answered yet."""
        self._notes.close()

    def _read(self, up_to: int) -> None:
        found: dict[int, dict[str, float]] = {}
        for record in self._metrics.read(up_to=up_to):
            found.setdefault(record["step"], {}).update(flatten_numbers(record))
        for record in () if self._diagnostics is None else self._diagnostics.read(up_to=up_to):
            numbers = flatten_numbers({name: value for name, value in record.items() if name != "step"})
            found.setdefault(record["step"], {}).update((f"diagnostics/{name}", value) for name, value in numbers)
        self._waiting += [one for one in sorted(found.items()) if one[0] > self._sent]

    def _send(self) -> None:
        if self._tracker is None:
            self._tracker = self._open()
        identity = self._tracker.identity
        while self._waiting:
            part = self._waiting[:BATCH]
            self._tracker.log(part)
            if identity is not None:
                self._notes.write(self.name, identity, sent=part[-1][0])
            del self._waiting[: len(part)]

    def _open(self) -> Tracker:
        known = self._notes.identity(self.name)
        tracker = KINDS[self.name].open(replace(self._run, known=known))
        sent = tracker.sent
        if tracker.identity is not None:
            if sent is None:  # a run that is new there has nothing
                sent = self._notes.sent(self.name) if tracker.identity == known else -1
            self._notes.write(self.name, tracker.identity, sent=sent)
        if sent is not None:
            self._sent = sent
            self._waiting = [one for one in self._waiting if one[0] > sent]
        return tracker


def _explain(error: Exception) -> str:
    """The first line of what a tracker complains about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[0][:200]}"


@dataclass(frozen=True)
class _Order:
    """Up to which step to send. The last one ends the thread."""

    up_to: int
    is_last: bool = False
    is_finished: bool = False


@final
class _FollowerThread:
    """A follower in a thread that ends with the process, whatever it waits for."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"tracker {follower.name}", daemon=True)
        self._thread.start()

    def order(self, order: _Order) -> None:
        self._orders.put(order)

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended, at the latest after so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            while not (order.is_last or self._orders.empty()):  # the latest includes the others
                order = self._orders.get()
            self.follower.send(order.up_to)
            if order.is_last:
                self.follower.close(order.is_finished)
                return


@dataclass
class Followers:
    """All that follow one run: files of its folder at every record, services at every checkpoint."""

    files: Sequence[Follower] = ()
    services: Sequence[_FollowerThread] = ()
    covered: int = -1  # by a checkpoint
    say: Say = lambda _: None
    is_finished: bool = field(default=False, init=False)

    def written(self, step: int) -> None:
        """A record of `step` was written."""
        for follower in self.files:
            follower.send(step)
        self._report()

    def saved(self, step: int) -> None:
        """A checkpoint covers `step`."""
        self.covered = step
        for service in self.services:
            service.order(_Order(step))
        self._report()

    def close(self) -> None:
        """Send services what they lack, and wait for them, but not for ever."""
        for follower in self.files:
            follower.close(self.is_finished)
        for service in self.services:
            service.order(_Order(self.covered, is_last=True, is_finished=self.is_finished))
        late = self._wait()
        self._report()
        for follower in late:
            follower.leave()
            self.say(
                f"{follower.name}: no answer for {WAIT_SECONDS:g} s: the same command with --resume sends the rest"
            )

    def _wait(self) -> list[Follower]:
        """Those that have not ended in time, which they share."""
        end = math.inf if WAIT_SECONDS is None else time.monotonic() + WAIT_SECONDS
        late = []
        for service in self.services:
            left = None if math.isinf(end) else max(0.0, end - time.monotonic())
            if not service.wait(left):
                late.append(service.follower)
        return late

    def _report(self) -> None:
        for follower in (*self.files, *(service.follower for service in self.services)):
            for line in follower.lines():
                self.say(line)


@contextmanager
def follow_run(folder: Path, tracking: Tracking | None, *, after_step: int, say: Say) -> Iterator[Followers]:
    """What follows a run while it is trained, on from the checkpoint after `after_step`; for None nothing."""
    if tracking is None:
        yield Followers()
        return
    run = _describe(folder, tracking, after_step=after_step, is_release=False)
    files, services = (
        _list_followers(tracking.chosen(is_service=is_service), run, tracking) for is_service in (False, True)
    )
    followers = Followers(files, [_FollowerThread(one) for one in services], after_step, say)
    try:
        if after_step > 0:  # what an earlier process could not send
            followers.saved(after_step)
        yield followers
    finally:
        followers.close()


def send_finished(folder: Path, tracking: Tracking, *, is_release: bool, say: Say) -> None:
    """Send services what they do not have yet of a run that has its results: of a release, all that it has."""
    names = tracking.chosen(is_service=True)
    if not names or not (folder / RESULTS).exists():
        return
    last = _last_step(folder / METRICS)
    notes = Notes(folder)
    behind = [name for name in names if notes.sent(name) < last]
    run = _describe(folder, tracking, after_step=last, is_release=is_release)
    services = [_FollowerThread(one) for one in _list_followers(behind, run, tracking, is_last_try=True)]
    followers = Followers((), services, last, say)
    followers.is_finished = True
    followers.close()


def _list_followers(
    names: Sequence[str], run: TrackedRun, tracking: Tracking, *, is_last_try: bool = False
) -> list[Follower]:
    notes = Notes(run.folder)
    return [Follower(name, run, notes, diagnostics=tracking.diagnostics, is_last_try=is_last_try) for name in names]


def _describe(folder: Path, tracking: Tracking, *, after_step: int, is_release: bool) -> TrackedRun:
    settings = {} if is_release else parse_yaml((folder / CONFIG).read_text(encoding="utf-8"))
    return TrackedRun(folder, tracking.name(folder), settings, after_step, is_release)


def _last_step(path: Path) -> int:
    """Of the records of a file; -1 where it has none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else -1
