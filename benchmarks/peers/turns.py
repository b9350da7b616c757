"""How a side takes its turns: it waits for a line on standard input, does one round, and answers in one line of JSON.

Between its turns a side holds still, so that the sides of a benchmark can alternate round by round on one machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor
from workload import CLIP_BOUND, NOISE_MULTIPLIER, WORKLOADS, Tally, Task


def parse(description: str | None) -> tuple[Task, argparse.Namespace]:
    """The task on the command line, and the arguments as they are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--noise-multiplier", type=float, default=NOISE_MULTIPLIER)
    parser.add_argument("--save", help="write the server's model after the first round here (.npy)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="torch threads in each process")
    parser.add_argument("--engine", default=None, help="for a side that has several")
    parser.add_argument("--precision", choices=["auto", "bfloat16", "float32"], default="auto")
    arguments = parser.parse_args()
    task = Task(
        workload=WORKLOADS[arguments.workload],
        rounds=arguments.rounds,
        device=torch.device(arguments.device),
        noise_multiplier=arguments.noise_multiplier,
        save=arguments.save,
        precision=arguments.precision,
    )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    return task, arguments


class Turns:
    """The rounds of one side, one after another: `wait`, then the round, then `answer`."""

    def __init__(
        self,
        task: Task,
        *,
        packages: tuple[str, ...] = (),
        processes: int = 1,
        threads: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._task = task
        self._answers = _claim_standard_output()
        self._round = 0
        self._started = 0.0
        self._tally = Tally()
        self._say(
            {
                "threads": threads or torch.get_num_threads(),
                "processes": processes,
                "precision": str(dtype).removeprefix("torch."),
                "versions": {name: version(name) for name in ("torch", *packages)},
                "device": torch.cuda.get_device_name() if task.device.type == "cuda" else "cpu",
                "noise_std_mean": task.noise_multiplier * CLIP_BOUND / task.workload.cohort_size,
                "clip_bound": CLIP_BOUND,
            }
        )

    @property
    def more(self) -> bool:
        return self._round < self._task.rounds

    def wait(self) -> None:
        """Hold still until it is this side's turn, then start the clock."""
        if not sys.stdin.readline():
            sys.exit(0)
        self._started = time.perf_counter()

    def answer(self, tally: Tally, parameters: Mapping[str, Tensor] | None) -> None:
        """Stop the clock and say what was done. `tally` counts from the beginning; `parameters` are the server's."""
        if self._task.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        if self._task.save is not None and parameters is not None and self._round == 0:
            np.save(self._task.save, torch.cat([p.detach().float().cpu().flatten() for p in parameters.values()]))
        done = Tally(
            steps=tally.steps - self._tally.steps,
            audio_seconds=tally.audio_seconds - self._tally.audio_seconds,
            checksum=tally.checksum - self._tally.checksum,
        )
        self._tally = Tally(**asdict(tally))
        self._say({"round": self._round, "seconds": seconds, **asdict(done)})
        self._round += 1

    def _say(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self._answers, flush=True)


def _claim_standard_output() -> TextIO:
    """Keeps standard output for the answers: whatever a library prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
