"""Where a run reads, computes, writes and reports, and how it ended."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sottovoce.base.files import read_json, write_json
from sottovoce.base.processes import Processes
from sottovoce.config import Recipe, as_yaml
from sottovoce.data.store import PackingProgress
from sottovoce.training.agreement import require_equal_across_ranks
from sottovoce.training.following import send_finished
from sottovoce.training.ledger_check import check_resumable
from sottovoce.training.loop import INTERRUPTED, LoopEnd, ProgressReport, Say
from sottovoce.training.run_folder import RESULTS, RunFolder, open_run
from sottovoce.training.tracking import BY_DEFAULT, Tracking


@dataclass(frozen=True)
class RunContext:
    """Where a run reads, computes and reports; nothing here changes its result.

    `stand_in`: people and noise are not the recipe's (`--smoke`), so no guarantee is reported. `sign` is the file of
    the private key that signs ledgers. `tracking`: what follows the runs.
    """

    runs: Path
    stores: Path
    device: torch.device
    on_prepare: Callable[[PackingProgress], None] = lambda _: None
    on_report: Callable[[ProgressReport], None] = lambda _: None
    on_stage: Callable[[str], None] = lambda _: None
    say: Say = lambda _: None
    stand_in: bool = False
    sign: Path | None = None
    tracking: Tracking = BY_DEFAULT

    def silent(self, device: torch.device) -> "RunContext":
        """For another process than the first."""
        return RunContext(self.runs, self.stores, device, tracking=self.tracking)


@contextmanager
def deterministic_kernels(is_asked: bool, device: torch.device) -> Iterator[None]:
    """Within, a GPU adds in a fixed order, at some cost; a kernel that cannot raises.

    On a CPU the order is fixed by the number of threads (`fixed_threads`).
    """
    if not is_asked or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, and cuBLAS reads it once
    fills: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = False  # nothing is read here that was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]


@contextmanager
def fixed_threads(count: int | None) -> Iterator[None]:
    """Within, torch computes on so many threads, whatever the machine has; None leaves their number as it is."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    """How a run ended in this process: with `results`, or interrupted after step `stopped_at`.

    Processes other than the first have neither.
    """

    folder: Path
    results: dict[str, Any] | None = None
    stopped_at: int | None = None

    def as_json(self) -> dict[str, Any] | None:
        """Its results; of an interrupted run where it ended, as results say it."""
        return self.results if self.stopped_at is None else {"ended": LoopEnd(self.stopped_at, INTERRUPTED).as_json()}


@dataclass(frozen=True)
class RunTarget:
    """The folder that a run writes to; `resume` goes on with what is there, `stand_in` marks a smoke test.

    When it is left, `tracking` sends what services lack of a finished run.
    """

    out: Path
    resume: bool
    stand_in: bool = False
    tracking: Tracking = BY_DEFAULT
    say: Say = lambda _: None

    @contextmanager
    def open(
        self, recipe: Recipe, *, inputs: Mapping[str, Any], processes: Processes, is_release: bool = False
    ) -> Iterator[RunFolder]:
        """The run's folder, locked by the first process. Where that is refused, all processes stop."""
        with ExitStack() as held:
            with require_equal_across_ranks(processes):
                run = RunFolder(self.out)
                if processes.is_first:
                    opening = open_run(
                        self.out,
                        config=as_yaml(recipe),
                        inputs=inputs,
                        resume=self.resume,
                        keeps_times=not is_release,
                        stand_in=self.stand_in,
                    )
                    run = held.enter_context(opening)
                    if recipe.federation is not None:
                        check_resumable(self.out)
            yield run
            if processes.is_first:
                send_finished(run.path, self.tracking, is_release=is_release, say=self.say)


def write_results(run: RunFolder, results: dict[str, Any]) -> Outcome:
    """Write `results.json`, which ends the run."""
    write_json(run.path / RESULTS, results)
    return Outcome(run.path, results=results)


def read_finished(run: RunFolder, processes: Processes) -> Outcome | None:
    """The outcome of a run that has its results already, in this process; None for others."""
    file = run.path / RESULTS
    if not processes.any(processes.is_first and file.exists()):
        return None
    return Outcome(run.path, results=read_json(file) if processes.is_first else None)
