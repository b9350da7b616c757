"""Many CPU cores: one process a core with one thread, each with its own working model, handed clients as it gets free.

A small model's operations are too short to be shared by threads; whole clients are not. The server's model and the
updates lie in shared memory and travel nowhere. Clients are handed out with most work first, and their updates come
back in that same order, whichever process was the quickest: sums have the same bits whatever the timing and the
number of processes.

    train ─► Job(client, slot) ─► worker: reads, trains, leaves the update in its slot ─► Done ─► clip and sum

Shapes: N rows of shared memory (the server's model, then slots), P flat length.
"""

import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sottovoce.errors import InputError, check_invariant
from sottovoce.federated.client import ClientRoom
from sottovoce.federated.engines import shared_memory
from sottovoce.federated.engines.engine import Dropped, Engine, Trained, with_turns
from sottovoce.federated.engines.worker import SERVER, Answer, Done, Failed, Job, Ready, Setting
from sottovoce.flat.layout import Layout
from sottovoce.privacy.settings import Weighting

# For each worker: one update being made, one job waiting, and two updates that wait for an earlier client's.
SLOTS_PER_WORKER = 4
CONTAINER_SHARE = Path("/sys/fs/cgroup/cpu.max")
PROGRAM = "from sottovoce.federated.engines.worker import main; main()"


def usable_cores() -> int:
    """The cores that this process may use, shared with the other processes that torchrun has started here."""
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):  # a container's share of the machine: microseconds of each period, or "max"
        quota, period = map(int, CONTAINER_SHARE.read_text().split())
        cores = min(cores, quota / period)
    return max(1, int(cores / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def most_work_first(room: ClientRoom, cohort: Sequence[int]) -> list[int]:
    """The clients of `cohort` by how much speech they work through; those with equally much stay in order."""
    work = room.population.seconds[np.asarray(cohort, dtype=np.int64)]
    if room.local.local_steps is not None:
        work = np.minimum(work, room.local.batch_seconds)  # as many batches for each
    return [cohort[place] for place in np.argsort(-work, kind="stable").tolist()]


@dataclass(eq=False)
class _Round:
    """What is left to hand out, and what has come back before its turn."""

    step: int
    turns: dict[int, int]
    waiting: deque[int]
    results: dict[int, tuple[Job, Done] | Dropped] = field(default_factory=dict)


@dataclass(eq=False)
class _Worker:
    """A worker process and what it has been handed: first the client that it is training."""

    process: subprocess.Popen[bytes]
    connection: "Connection[Job, Answer]"
    ready: bool = False
    handed: deque[tuple[Job, _Round]] = field(default_factory=deque)

    def end(self) -> int:
        """End the process at once, since it keeps nothing; its exit status."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


class WorkersEngine(Engine):
    """Trains clients in `workers` processes of one thread each (by default one for each usable core).

    A worker that dies takes the client it was training with it: that one counts as dropped, and another worker takes
    the place. The processes end with the engine: with `close`, when it is forgotten, or when this process ends.
    """

    def __init__(
        self,
        room: ClientRoom,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        weighting: Weighting = Weighting.UNIFORM,
        workers: int | None = None,
    ) -> None:
        count = workers or usable_cores()
        self._room = room
        self._setting = shared_memory.put(Setting(room, layout, dtype, weighting))
        slots = count * SLOTS_PER_WORKER
        self._memory = shared_memory.new_file(shared_memory.rows_size(1 + slots, length=layout.flat_size))
        self._rows_NP = shared_memory.rows(self._memory, length=layout.flat_size)
        self._free = [*range(slots, SERVER, -1)]
        self._workers: list[_Worker] = []
        self._ending = weakref.finalize(self, _end, self._workers, (self._setting, self._memory))
        for _ in range(count):
            self._start_worker()

    def close(self) -> None:
        """End the processes."""
        self._ending()

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, turns: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        check_invariant(self._ending.alive, "the engine is closed")
        self.waited = 0.0
        self._rows_NP[SERVER].copy_(server_P)
        order = most_work_first(self._room, cohort)
        current = _Round(step, dict(with_turns(cohort, turns)), deque(order))
        with _one_thread():
            for client in order:
                self._advance(current, timeout=0.0)
                while client not in current.results:
                    self._advance(current, timeout=None)
                result = current.results.pop(client)
                if isinstance(result, Dropped):
                    yield result
                else:
                    yield from self._hand_over(*result)

    def _hand_over(self, job: Job, done: Done) -> Iterator[Trained]:
        """The update, and its slot back when it is done with."""
        update_P, loss, norm = self._rows_NP[job.slot], torch.tensor(done.loss), torch.tensor(done.gradient_norm)
        try:
            yield Trained(update_P, (job.client,), loss, (done.figures,), done.audio_seconds, gradient_norms=norm)
        finally:
            self._free.append(job.slot)

    def _advance(self, current: _Round, *, timeout: float | None) -> None:
        """Take what has come back and hand out what can be; without a timeout, wait until something has."""
        self._hand_out(current)
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout):
            assert isinstance(connection, Connection)
            self._receive(by_connection[connection], current)
        self._hand_out(current)

    def _hand_out(self, current: _Round) -> None:
        """A client for every worker, and a second one while there are plenty, so that nobody waits for this process."""
        for depth in (1, 2):
            for worker in self._workers:
                plenty = depth == 1 or len(current.waiting) > len(self._workers)
                if worker.ready and len(worker.handed) < depth and current.waiting and self._free and plenty:
                    client = current.waiting.popleft()
                    job = Job(client, current.step, self._free.pop(), current.turns[client])
                    worker.handed.append((job, current))
                    with suppress(OSError):  # it has died: reading from it will say so
                        worker.connection.send(job)

    def _receive(self, worker: _Worker, current: _Round) -> None:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        match answer:
            case Ready():
                worker.ready = True
            case Failed(words=words, refused=refused):
                raise InputError(words) if refused else RuntimeError(f"a worker process failed:\n{words}")
            case Done() | Dropped():
                job, of_round = worker.handed.popleft()
                if of_round is current and isinstance(answer, Done):
                    self.waited += answer.waited / len(self._workers)
                    current.results[job.client] = (job, answer)
                else:
                    self._give_up(job, of_round, answer)

    def _give_up(self, job: Job, of_round: _Round, answer: Done | Dropped) -> None:
        """No update in this job's slot: its client failed, or nobody waits for its round any more."""
        self._free.append(job.slot)
        if isinstance(answer, Dropped):
            of_round.results[job.client] = answer

    # The processes.

    def _replace(self, worker: _Worker) -> None:
        """The client that was being trained is lost; what had not been begun is handed out again."""
        self._workers.remove(worker)
        status = worker.end()
        if not worker.ready:
            raise RuntimeError(f"a worker process ended with status {status} before it could start")
        for place, (job, of_round) in enumerate(worker.handed):
            if place == 0:
                self._give_up(job, of_round, Dropped(job.client, f"its process ended with status {status}"))
            else:
                self._free.append(job.slot)
                of_round.waiting.appendleft(job.client)
        self._start_worker()

    def _start_worker(self) -> None:
        ours, theirs = Pipe()
        descriptors = (theirs.fileno(), self._setting, self._memory)
        here = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with _signals_held():
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": here},
                start_new_session=True,  # a terminal's Ctrl-C is for this process alone
            )
        theirs.close()
        self._workers.append(_Worker(process, ours))


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


@contextmanager
def _signals_held() -> Iterator[None]:
    """A process that is started in here never hears of SIGINT and SIGTERM: whoever hands out the work ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(workers: list[_Worker], descriptors: Sequence[int]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()
    for descriptor in descriptors:
        os.close(descriptor)
