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
from typing import Any

from tests.training.forked import FORKS, run_command

# Which rank is killed at which of its function calls (or, if it is not the first, of its rounds), by how often the
# agent has restarted all.
Kills = Mapping[int, tuple[int, int]]


def launch(
    arguments: Sequence[object], *, processes: int, log: Path, kills: Kills | None = None, by_round: bool = False
) -> None:
    """`torchrun --nproc-per-node PROCESSES --max-restarts … -m sottovoce ARGUMENTS`. What they say goes to `log`."""
    log.mkdir(exist_ok=True)
    agent = FORKS.Process(
        target=_agent, args=([str(a) for a in arguments], processes, str(log), dict(kills or {}), by_round)
    )
    agent.start()
    agent.join(100)
    assert agent.exitcode == 0, "".join(file.read_text() for file in sorted(log.iterdir()))


def _agent(arguments: list[str], processes: int, log: str, kills: dict[int, tuple[int, int]], by_round: bool) -> None:
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
        elastic_launch(config, _worker)(arguments, log, kills, by_round)


def _worker(arguments: list[str], log: str, kills: dict[int, tuple[int, int]], by_round: bool) -> None:
    # A fork keeps the agent's own handlers; a command that torchrun starts has none.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    victim, moment = kills.get(attempt, (None, 0))
    if by_round and rank == victim:
        _die_in_round(moment)
        victim = None
    place = Path(log)
    with (place / f"said-{attempt}-{rank}.txt").open("w") as said, contextlib.redirect_stdout(said):
        with contextlib.redirect_stderr(said):
            code, calls = run_command(arguments, kill_at=moment if rank == victim else None, counts=not kills)
        said.flush()
    (place / f"calls-{attempt}-{rank}").write_text(str(calls))
    if code:
        sys.exit(code)


def calls(log: Path, *, rank: int) -> int:
    """How many function calls a process made in a launch without kills."""
    return int((log / f"calls-0-{rank}").read_text())


def _die_in_round(moment: int) -> None:
    from sottovoce.training import team

    whole, taken = team.take_part, 0

    def take_part(*order: Any, **named: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(*order, **named)

    team.take_part = take_part
