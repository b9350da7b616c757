"""Cases tried in forked children, how each ended, and how many ended in which way.

Whatever a case does (die, spin, fill the memory), the next one is tried.
"""

import os
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Unusable


class Outcome(StrEnum):
    """`UNHARMED`: the result is as without the fault. The last three must never occur."""

    UNHARMED = "unharmed"
    CLEAN_ERROR = "clean error"
    TRACEBACK = "traceback"
    HANG = "hang"
    SILENT_LOSS = "silent loss"


BAD = (Outcome.TRACEBACK, Outcome.HANG, Outcome.SILENT_LOSS)


@dataclass
class Tally:
    """Counts by what was tried ("audio files", "kills of a federated run"), and a line for each bad outcome."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[str] = field(default_factory=list)

    def add(self, what: str, outcome: Outcome, *, words: str = "") -> None:
        self.counts[what][outcome] += 1
        if outcome in BAD:
            self.bad.append(f"{what}: {outcome}: {words}")

    def as_json(self) -> Mapping[str, Mapping[str, int]]:
        return {what: {"tried": found.total(), **{o: found[o] for o in Outcome}} for what, found in self.counts.items()}


# Of CPU time, so that a busy machine makes no difference; the slowest case that ends takes a tenth of it.
CPU_SECONDS = 20
# Of the clock: who waits for something that never comes takes no CPU time.
WALL_SECONDS, LEAST_SECONDS = 60, 1
# More than any case needs and less than a wrong header may ask for.
MEMORY_BYTES = 6 << 30
_PER_CHILD = 100


@dataclass(frozen=True)
class Case:
    """One damaged input: `read` gives what is understood of it, or None where a problem was counted.

    `loss` says whether what was read is other than it was without any word; inputs that come from outside have no
    memory of what they were, and theirs is always False.
    """

    what: str
    words: str
    read: Callable[[], object]
    loss: Callable[[object], bool] = lambda _: False


MakeCases = Callable[..., Iterator[Case]]


def try_shares(shares: Mapping[MakeCases, int], tally: Tally, *, count: int, seed: int) -> None:
    """Try about `count` cases, so many of each kind as its share; the same ones for the same `seed`."""
    for make, share in shares.items():
        with tempfile.TemporaryDirectory(prefix="sottovoce-faults-") as folder:
            try_all(make(Path(folder), count=-(-count * share // sum(shares.values())), seed=seed), tally)


def try_all(cases: Iterable[Case], tally: Tally) -> None:
    """Put every case to the test. Cases are made in this process and read in children."""
    cases = iter(cases)
    while batch := list(islice(cases, _PER_CHILD)):
        first = 0
        while first < len(batch):
            for outcome, words in _judged_in_child(batch[first:]):
                tally.add(batch[first].what, outcome, words=f"{batch[first].words}: {words}" if words else "")
                first += 1


def _judged_in_child(cases: Sequence[Case]) -> Iterator[tuple[Outcome, str]]:
    """How each case ended, up to the first that ends the child."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        _judge_all(cases, writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        judged = 0
        for line in lines:
            outcome, _, words = line.rstrip("\n").partition("\t")
            judged += 1
            yield Outcome(outcome), words
    _, status = os.waitpid(child, 0)
    if judged == len(cases):
        return
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGXCPU:
        yield Outcome.HANG, f"more than {CPU_SECONDS} s of CPU time"
    elif number == signal.SIGALRM:
        yield Outcome.HANG, f"waited for more than {WALL_SECONDS} s"
    else:
        yield Outcome.TRACEBACK, f"the process died ({signal.Signals(number).name if number else f'status {status}'})"


def _judge_all(cases: Sequence[Case], writer: int) -> None:
    """In the child, which never comes back."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Libraries may write to the terminal by themselves.
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for case in cases:
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            _end_if_waiting()
            outcome, words = _judge(case)
            os.write(writer, f"{outcome}\t{' '.join(words.split())[:2_000]}\n".encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)


def _end_if_waiting() -> None:
    """End this process if it waits for a minute. One that computes on a busy machine is bounded by its CPU time."""
    computed = [time.process_time()]

    def look(*_: object) -> None:
        if time.process_time() - computed[0] < LEAST_SECONDS:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGALRM)
        computed[0] = time.process_time()

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS, WALL_SECONDS)


def _judge(case: Case) -> tuple[Outcome, str]:
    try:
        read = case.read()
        if read is None:
            return Outcome.CLEAN_ERROR, ""
        return (Outcome.SILENT_LOSS, "reads otherwise") if case.loss(read) else (Outcome.UNHARMED, "")
    except (InputError, Unusable) as error:
        if "\n" in str(error):
            return Outcome.TRACEBACK, f"an error of several lines: {error}"
        return Outcome.CLEAN_ERROR, ""
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome.TRACEBACK, f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
