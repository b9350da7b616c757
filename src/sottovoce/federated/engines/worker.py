"""One process of the `workers` engine: trains the clients that it is handed, one by one, on one thread.

It is started with three file descriptors as arguments: its connection, what `shared_memory.put` laid down of its
`Setting`, and the rows of shared memory. It ends when the other side of the connection closes, however that side came
to its end.
"""

import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from sottovoce.base.children import leave_with
from sottovoce.base.errors import InputError
from sottovoce.federated.client import ClientRoom
from sottovoce.federated.engines import shared_memory
from sottovoce.federated.engines.engine import Dropped, excuse
from sottovoce.federated.engines.sequential import SequentialEngine
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.privacy.settings import Weighting

CPU = torch.device("cpu")
SERVER = 0  # the row of shared memory that holds the server's model; the others are slots for updates


@dataclass(frozen=True, eq=False)
class Setting:
    """What a worker needs to know once."""

    room: ClientRoom
    layout: Layout
    dtype: torch.dtype
    weighting: Weighting


@dataclass(frozen=True)
class Job:
    """Train `client` in round `step`, in its own `turn`, and leave its update in row `slot`."""

    client: int
    step: int
    slot: int
    turn: int = 0


@dataclass(frozen=True)
class Done:
    """The update lies in its slot. `waited` is how long its data took to come, in seconds."""

    loss: float
    gradient_norm: float
    figures: ClientFigures
    audio_seconds: float
    waited: float


@dataclass(frozen=True)
class Failed:
    """This is our bug, or nothing can be trained at all (`refused`)."""

    words: str
    refused: bool = False


class Ready:
    """The worker has started."""


Answer = Ready | Done | Dropped | Failed


def main() -> None:
    torch.set_num_threads(1)
    connection, setting, memory = map(int, sys.argv[1:])
    leave_with(connection)
    try:
        _serve(Connection(connection), setting=setting, memory=memory)
    except (EOFError, OSError):  # the other side is gone
        os._exit(0)


def _serve(connection: "Connection[Answer, Job]", *, setting: int, memory: int) -> None:
    try:
        known = shared_memory.got(setting)
    except InputError as error:
        connection.send(Failed(str(error), refused=True))
        return
    assert isinstance(known, Setting)
    rows_NP = shared_memory.rows(memory, length=known.layout.flat_size)
    engine = SequentialEngine(known.room, known.layout, device=CPU, dtype=known.dtype, weighting=known.weighting)
    connection.send(Ready())
    while True:
        job = connection.recv()
        answer: Answer
        try:
            answer = _train(engine, job, rows_NP, forgiving=known.room.forgiving)
        except Exception:
            answer = Failed(traceback.format_exc())
        connection.send(answer)


def _train(engine: SequentialEngine, job: Job, rows_NP: torch.Tensor, *, forgiving: bool) -> Done | Dropped:
    try:
        (trained,) = engine.train(rows_NP[SERVER], [job.client], step=job.step, turns=[job.turn])
        if isinstance(trained, Dropped):
            return trained
        rows_NP[job.slot].copy_(trained.update)
        (figures,) = trained.figures
        assert trained.gradient_norms is not None
        norm = float(trained.gradient_norms)
        return Done(float(trained.losses), norm, figures, trained.audio_seconds, engine.waited)
    except Exception as error:  # around the training itself: a thread that cannot start, a loss that cannot be read
        return excuse(job.client, error, forgiving=forgiving)
