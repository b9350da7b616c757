"""A run's folder from its opening to its results."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.base.files import read_json, write_json
from sottovoce.base.processes import Processes
from sottovoce.config import Recipe, as_yaml
from sottovoce.training.agreement import agreeing
from sottovoce.training.keeper import INTERRUPTED, Ended
from sottovoce.training.marks import check_resumable
from sottovoce.training.run_folder import RESULTS, RunFolder, open_run


@dataclass(frozen=True)
class Outcome:
    """How a run ended in this process: with `results`, or interrupted after the step `stopped_at` (`resume` goes on).

    Processes other than the first have neither.
    """

    folder: Path
    results: dict[str, Any] | None = None
    stopped_at: int | None = None

    def as_json(self) -> dict[str, Any] | None:
        """Its results; where it was interrupted, that and where, in the words in which results say how a run ended."""
        return self.results if self.stopped_at is None else {"ended": Ended(self.stopped_at, INTERRUPTED).as_json()}


@dataclass(frozen=True)
class Target:
    """The folder that a run is made in: `resume` goes on with what is there, `stand_in` marks a smoke test's."""

    out: Path
    resume: bool
    stand_in: bool = False

    @contextmanager
    def opened(
        self, recipe: Recipe, *, inputs: Mapping[str, Any], processes: Processes, is_release: bool = False
    ) -> Iterator[RunFolder]:
        """The run's folder, which the first process holds. One that is refused is refused to all."""
        with ExitStack() as held:
            with agreeing(processes):
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


def finish(run: RunFolder, results: dict[str, Any]) -> Outcome:
    """Write the results down: the run has nothing left to do."""
    write_json(run.path / RESULTS, results)
    return Outcome(run.path, results=results)


def finished_before(run: RunFolder, processes: Processes) -> Outcome | None:
    """How a run that is finished already has ended, in this process."""
    file = run.path / RESULTS
    if not processes.any(processes.is_first and file.exists()):
        return None
    return Outcome(run.path, results=read_json(file) if processes.is_first else None)
