"""Many CPU cores: one process a core with one thread, each with its own working model, sent clients as it gets free.

A small model's operations are too short to be shared by threads; whole clients are not. The server's model and the
updates lie in shared memory and travel nowhere. Clients are sent out with most work first, and their updates come
back in that same order, whichever process was the quickest: sums have the same bits whatever the timing and the
number of processes.

    train ─► Job(client, slot) ─► worker: reads, trains, leaves the update in its slot ─► Done ─► clip and sum

Shapes: N rows of shared memory (the server's model, then slots), P flat length.
"""

import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.children import ChildAnswer, ChildKilled, ChildPool
from sottovoce.base.errors import check_invariant
from sottovoce.federated.client import ClientContext
from sottovoce.federated.engines import shared_memory
from sottovoce.federated.engines.engine import Dropped, Engine, Trained, drop_or_raise, with_positions
from sottovoce.federated.engines.sequential import SequentialEngine
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout

# For each worker: one update being made, one job waiting, and two updates that wait for an earlier client's.
SLOTS_PER_WORKER = 4
CONTAINER_SHARE = Path("/sys/fs/cgroup/cpu.max")
SERVER = 0  # the row of shared memory that holds the server's model; the others are slots for updates


def usable_cores() -> int:
    """The cores that this process may use, shared with the other processes that torchrun has started here."""
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):  # a container's share of the machine: microseconds of each period, or "max"
        quota, period = map(int, CONTAINER_SHARE.read_text().split())
        cores = min(cores, quota / period)
    return max(1, int(cores / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def most_work_first(context: ClientContext, cohort: Sequence[int]) -> list[int]:
    """The clients of `cohort` by how much speech they work through; those with equally much stay in order."""
    work = context.population.seconds[np.asarray(cohort, dtype=np.int64)]
    if context.local.local_steps is not None:
        work = np.minimum(work, context.local.batch_seconds)  # as many batches for each
    return [cohort[place] for place in np.argsort(-work, kind="stable").tolist()]


@dataclass(frozen=True)
class Job:
    """Train `client` in round `step`, at its own `position`, and leave its update in row `slot`."""

    client: int
    step: int
    slot: int
    position: int = 0


@dataclass(frozen=True)
class Done:
    """The update lies in its slot. `waited` is how long its data took to come, in seconds."""

    loss: float
    gradient_norm: float
    figures: ClientFigures
    audio_seconds: float
    waited: float


@dataclass(eq=False)
class _Round:
    """What is left to send out, and what has come back before it is asked for."""

    step: int
    positions: dict[int, int]
    waiting: deque[int]
    results: dict[int, tuple[Job, Done] | Dropped] = field(default_factory=dict)


class WorkersEngine(Engine):
    """Trains clients in `workers` processes of one thread each (by default one for each usable core).

    A worker that dies takes the client it was training with it: that one counts as dropped, and another worker takes
    the place. The processes end with the engine: with `close`, when it is forgotten, or when this process ends.
    """

    def __init__(
        self,
        context: ClientContext,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        workers: int | None = None,
    ) -> None:
        self._context, self._count = context, workers or usable_cores()
        slots = self._count * SLOTS_PER_WORKER
        setting = shared_memory.put((context, layout, dtype))
        memory = shared_memory.new_file(shared_memory.rows_size(1 + slots, length=layout.flat_size))
        self._rows_NP = shared_memory.shared_rows(memory, length=layout.flat_size)
        self._free = [*range(slots, SERVER, -1)]
        files = (setting, memory)
        self._pool = ChildPool(self._count, begin=_begin, given=files, descriptors=files, replaces=True)
        self._ending = weakref.finalize(self, _end, self._pool, files)

    def close(self) -> None:
        """End the processes."""
        self._ending()

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        check_invariant(self._ending.alive, "the engine is closed")
        self.waited = 0.0
        self._rows_NP[SERVER].copy_(server_P)
        order = most_work_first(self._context, cohort)
        current = _Round(step, dict(with_positions(cohort, positions)), deque(order))
        with _one_thread():
            try:
                for client in order:
                    self._advance(current, timeout=0.0)
                    while client not in current.results:
                        self._advance(current, timeout=None)
                    result = current.results.pop(client)
                    if isinstance(result, Dropped):
                        yield result
                    else:
                        yield from self._give_back(*result)
            finally:  # what is being trained of a round that was given up frees its slot when it comes
                self._free += [job.slot for _, job in self._pool.cancel_waiting()]
                self._free += [done[0].slot for done in current.results.values() if not isinstance(done, Dropped)]

    def _give_back(self, job: Job, done: Done) -> Iterator[Trained]:
        """The update, and its slot when it is done with."""
        update_P, loss, norm = self._rows_NP[job.slot], torch.tensor(done.loss), torch.tensor(done.gradient_norm)
        try:
            yield Trained(update_P, (job.client,), loss, (done.figures,), done.audio_seconds, gradient_norms=norm)
        finally:
            self._free.append(job.slot)

    def _advance(self, current: _Round, *, timeout: float | None) -> None:
        """Send out what there are slots for and take what has come; without a timeout, wait until something has."""
        while current.waiting and self._free:
            client = current.waiting.popleft()
            job = Job(client, current.step, self._free.pop(), current.positions[client])
            self._pool.submit((current, job), _train_job, job)
        for answer in self._pool.answers(timeout=timeout):
            self._take(answer, current)

    def _take(self, answer: ChildAnswer, current: _Round) -> None:
        (of_round, job), result = answer.name, answer.value
        if isinstance(answer.error, ChildKilled):
            result = Dropped(job.client, str(answer.error))
        elif answer.error is not None:
            raise RuntimeError("a worker process failed:\n" + "".join(format_exception(answer.error)))
        if of_round is not current or isinstance(result, Dropped):
            self._free.append(job.slot)
        if of_round is current:
            if isinstance(result, Done):
                self.waited += result.waited / self._count
            current.results[job.client] = result if isinstance(result, Dropped) else (job, result)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Whoever clips and sums meanwhile does it on one thread: the cores are the workers', and threads would wait for
    one another to get one. It also makes the sum's bits the same on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _end(pool: ChildPool, descriptors: Sequence[int]) -> None:
    pool.close()
    for descriptor in descriptors:
        os.close(descriptor)


# In the worker's process.


@dataclass(frozen=True, eq=False)
class _Worker:
    engine: SequentialEngine
    rows_NP: Tensor
    forgiving: bool


_worker: _Worker | None = None


def _begin(setting: int, memory: int) -> None:
    """Make this process's engine, from file descriptors of shared memory."""
    global _worker
    torch.set_num_threads(1)
    found = shared_memory.got(setting)
    assert isinstance(found, tuple)
    context, layout, dtype = found
    rows_NP = shared_memory.shared_rows(memory, length=layout.flat_size)
    engine = SequentialEngine(context, layout, device=torch.device("cpu"), dtype=dtype)
    _worker = _Worker(engine, rows_NP, context.forgiving)


def _train_job(job: Job) -> Done | Dropped:
    assert _worker is not None
    engine, rows_NP = _worker.engine, _worker.rows_NP
    try:
        (trained,) = engine.train(rows_NP[SERVER], [job.client], step=job.step, positions=[job.position])
        if isinstance(trained, Dropped):
            return trained
        rows_NP[job.slot].copy_(trained.update)
        (figures,) = trained.figures
        assert trained.gradient_norms is not None
        norm = float(trained.gradient_norms)
        return Done(float(trained.losses), norm, figures, trained.audio_seconds, engine.waited)
    except Exception as error:  # around the training itself: a thread that cannot start, a loss that cannot be read
        return drop_or_raise(job.client, error, forgiving=_worker.forgiving)
