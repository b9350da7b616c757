"""Runs of recipes under torchrun's own agent, which restarts all processes when one is lost.

It is the agent that the command `torchrun` runs, asked for through its Python interface, so that processes are forked
and need not load everything anew.
"""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.points import Point, Watch
from tests.training.forked import forked, run_command

# Which rank is killed at which point, by how often the agent has restarted all.
Kills = Mapping[int, tuple[int, Point]]


def launch(arguments: Sequence[object], *, processes: int, log: Path, kills: Kills | None = None) -> None:
    """`torchrun --nproc-per-node PROCESSES --max-restarts … -m sottovoce ARGUMENTS`. What they say goes to `log`."""
    log.mkdir(exist_ok=True)
    with forked(_agent, [str(a) for a in arguments], processes, str(log), dict(kills or {})) as agent:
        agent.join()
        assert agent.exitcode == 0, "".join(said(log, attempt=attempt) for attempt in range(len(kills or {}) + 1))


def said(log: Path, *, attempt: int = 0) -> str:
    """What all ranks said in one attempt."""
    return "".join(file.read_text() for file in sorted(log.glob(f"said-{attempt}-*.txt")))


def calls(log: Path, *, rank: int) -> int:
    """How many function calls a process made in a launch without kills."""
    return int((log / f"calls-0-{rank}").read_text())


def _agent(arguments: list[str], processes: int, log: str, kills: dict[int, tuple[int, Point]]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It adds to the environment, and its children inherit that.
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            max_restarts=len(kills),
            monitor_interval=0.02,
            start_method="fork",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        elastic_launch(config, _worker)(arguments, log, kills)


def _worker(arguments: list[str], log: str, kills: dict[int, tuple[int, Point]]) -> None:
    # A fork keeps the agent's own handlers; a command that torchrun starts has none.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    victim, point = kills.get(attempt, (None, None))
    watch, place = Watch(point if rank == victim else None, counts=not kills), Path(log)
    with (place / f"said-{attempt}-{rank}.txt").open("w") as words, contextlib.redirect_stdout(words):
        with contextlib.redirect_stderr(words):
            code = run_command(arguments, watch)
        words.flush()
    (place / f"calls-{attempt}-{rank}").write_text(str(watch.calls))
    if code:
        sys.exit(code)
