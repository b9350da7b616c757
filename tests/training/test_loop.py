"""What `run_loop` does for any loop: a third one needs no copy of anything."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sottovoce.config import PatienceSettings, load_recipe
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.converged import judge_metrics
from sottovoce.evaluation.measures import LOSS, WER, Measure, Score
from sottovoce.models.recogniser import Recogniser, load_recogniser
from sottovoce.training import checkpoint
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.loop import Due, Loop, LoopEnd, LoopSettings, ProgressReport, Snapshot, StopLoop, run_loop
from sottovoce.training.records import StepRecord
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.start_model import init_start_model


class Killed(Exception):
    pass


class Counting(Loop):
    """Counts its steps. `scores` are those of the models after 1, 2, … steps; it may stop or die at a step."""

    def __init__(
        self,
        model: Recogniser,
        scores: Sequence[float],
        *,
        measure: Measure = LOSS,
        stops_at: int | None = None,
        dies_at: int | None = None,
    ) -> None:
        self.model, self.scores, self.measure, self.stops_at, self.dies_at = model, scores, measure, stops_at, dies_at
        self.made = 0
        self.is_open = False

    @contextmanager
    def open(self, found: Checkpoint | None) -> Iterator[None]:
        if found is not None:
            self.made = found.state["made"]
            assert float(found.optimiser["made"]) == self.made
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def step(self, step: int) -> None:
        assert self.is_open
        assert step == self.made
        if step == self.stops_at:
            raise StopLoop("tired", "no more of it")
        if step == self.dies_at:
            raise Killed
        self.made += 1

    def commit(self, step: int, due: Due) -> list[StepRecord]:
        return [{"step": step, "made": self.made}] if due.record and step else []

    def evaluate(self) -> tuple[Score, StepRecord]:
        return Score(self.measure, self.scores[self.made - 1] if self.made else 9.0), {}

    def snapshot(self, progress: Mapping[str, Any]) -> Snapshot:
        tensors = {"made": torch.tensor(float(self.made))}
        return Snapshot(self.model, tensors, {"made": self.made, **progress}, about={"promise": "none"})

    def report(self, step: int, due: Due) -> ProgressReport | None:
        return ProgressReport(unit="count", step=step, steps=len(self.scores)) if due.record else None


@pytest.fixture
def model(recipe_file: Path) -> Recogniser:
    return init_start_model(load_recipe(str(recipe_file)), CharacterTokens.seen_in(["abc"]), None, language="en")


Go = Callable[..., LoopEnd]


@pytest.fixture
def go(model: Recogniser, tmp_path: Path) -> Go:
    """Keeps a loop with these scores in the run folder `run`, with an evaluation each step unless `pace` says more."""

    def run(
        *scores: float, measure: Measure = LOSS, reports: list[ProgressReport] | None = None, **options: Any
    ) -> LoopEnd:
        pace = {"evaluate_every": 1, "checkpoint_every": 1, **options.pop("pace", {})}
        loop = Counting(model, scores, measure=measure, **options)
        (tmp_path / "run").mkdir(exist_ok=True)
        try:
            return run_loop(
                loop,
                RunFolder(tmp_path / "run"),
                LoopSettings(
                    recipe="counting",
                    tokens=model.tokens.digest,
                    measure=measure,
                    steps=len(scores),
                    **pace,
                ),
                on_report=lambda _: None if reports is None else reports.append(_),
            )
        finally:
            assert not loop.is_open, "what a loop holds is given back however it ends"

    return run


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def best(folder: Path) -> int:
    step: int = load_recogniser(folder / "run").about["step"]
    return step


# When what is due.


def loop_settings(**options: Any) -> LoopSettings:
    return LoopSettings(recipe="counting", tokens="none", measure=LOSS, **options)


@pytest.mark.parametrize(
    ("step", "stops", "expected"),
    [
        (1, False, Due(False, False, False)),
        (2, False, Due(True, False, False)),
        (3, False, Due(False, False, True)),
        (5, False, Due(True, True, True)),
        (7, True, Due(True, False, True)),
        (11, False, Due(True, True, True)),
    ],
)
def test_what_is_due_with_records_of_their_own(step: int, stops: bool, expected: Due) -> None:
    settings = loop_settings(steps=11, evaluate_every=5, checkpoint_every=3, log_every=2)
    assert settings.due(step, stops=stops) == expected


def test_without_records_of_their_own_they_come_with_checkpoints() -> None:
    settings = loop_settings(steps=11, evaluate_every=5, checkpoint_every=3)
    due = [settings.due(step, stops=False) for step in range(1, 12)]
    assert [one.record for one in due] == [one.save for one in due]


# The best one.


def test_the_best_model_is_the_one_with_the_lowest_score_and_the_first_of_equals(go: Go, tmp_path: Path) -> None:
    assert go(3.0, 1.0, 2.0, 1.0) == LoopEnd(4, "finished")
    assert best(tmp_path) == 2
    assert [record["dev_loss"] for record in metrics(tmp_path)] == [3.0, 1.0, 2.0, 1.0]


def test_a_model_whose_score_is_not_finite_is_never_the_best(go: Go, tmp_path: Path) -> None:
    go(math.nan, 5.0, math.inf)
    assert best(tmp_path) == 2
    assert [record["dev_loss"] for record in metrics(tmp_path)] == [None, 5.0, None]


@pytest.mark.parametrize(("measure", "own"), [(WER, "wer"), (LOSS, "loss")])
def test_files_name_the_measure(measure: Measure, own: str, go: Go, tmp_path: Path) -> None:
    go(0.5, measure=measure, pace={"may_end_early": True})
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert list(state) == ["step", "best", "files", "made", f"best_{own}", "since_best", "evaluated", "seal"]
    assert load_recogniser(tmp_path / "run").about == {
        "recipe": "counting",
        "step": 1,
        f"dev_{own}": 0.5,
        "promise": "none",
    }
    assert metrics(tmp_path) == [{"step": 1, "made": 1, f"dev_{own}": 0.5}]


# The end.


def test_patience_ends_it_and_counts_on_after_a_kill(go: Go, tmp_path: Path) -> None:
    scores, patient = (3.0, 1.0, 2.0, 2.0, 2.0, 0.5), {"may_end_early": True, "patience": 3}
    with pytest.raises(Killed):
        go(*scores, pace=patient, dies_at=4)
    ended = go(*scores, pace=patient)
    assert ended.as_json() == {
        "step": 5,
        "reason": "patience",
        "words": "no better model on the dev speakers in 3 evaluations",
    }
    assert best(tmp_path) == 2


def until_converged(**settings: Any) -> dict[str, Any]:
    return {"may_end_early": True, "patience": PatienceSettings(**settings)}


@pytest.mark.parametrize("dies_at", [None, 1, 4, 7])
def test_a_share_of_the_run_without_a_better_model_ends_it(go: Go, tmp_path: Path, dies_at: int | None) -> None:
    """After 8 steps the best, of 6, is a quarter of them old; after 7 a seventh, and only one evaluation is behind it.
    A kill changes nothing of it."""
    scores = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 5.0, 4.0, 1.0, 1.0)
    if dies_at is not None:
        with pytest.raises(Killed):
            go(*scores, pace=until_converged(), dies_at=dies_at)
    ended = go(*scores, pace=until_converged())
    assert ended == LoopEnd(8, "patience", "no better model on the dev speakers in the last 20 % of the steps")
    assert best(tmp_path) == 6
    assert judge_metrics(metrics(tmp_path), {"dev_loss": 4.0}, last_step=8) == "yes"
    assert go(*scores, pace=until_converged()) == ended, "resumed at its end, it makes no step more"


def test_a_larger_share_and_least_steps_wait_longer(go: Go, tmp_path: Path) -> None:
    scores = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, *[5.0] * 8)
    assert go(*scores, pace=until_converged(share=0.5)).step == 12
    shutil.rmtree(tmp_path / "run")
    assert go(*scores, pace=until_converged(least_steps=11)).step == 11
    shutil.rmtree(tmp_path / "run")
    assert go(*scores[:7], pace=until_converged()) == LoopEnd(7, "finished")


def test_it_ends_at_an_evaluation_and_not_between_two(go: Go, tmp_path: Path) -> None:
    """Every third step: the best is of 12, a fifth of the run old from 15 on, with two evaluations behind it at 18."""
    scores = [9.0] * 30
    scores[11] = 1.0
    assert go(*scores, pace={**until_converged(), "evaluate_every": 3, "checkpoint_every": 1}).step == 18


def test_patience_in_evaluations_leaves_the_checkpoint_as_it_was(go: Go, tmp_path: Path) -> None:
    go(3.0, 2.0, pace={"may_end_early": True, "patience": 3})
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert "scores" not in state
    go(3.0, 2.0, 1.0, pace=until_converged())
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert state["scores"] == [[3, 1.0]]


def test_a_loop_that_stops_is_looked_at_once_more(go: Go, tmp_path: Path) -> None:
    """Its last model, which no evaluation was due for, is the best."""
    ended = go(3.0, 2.0, 1.0, 0.5, stops_at=3, pace={"may_end_early": True, "evaluate_every": 2, "checkpoint_every": 2})
    assert ended == LoopEnd(3, "tired", "no more of it")
    assert best(tmp_path) == 3
    assert [record.get("dev_loss") for record in metrics(tmp_path)] == [2.0, 1.0]


def test_one_that_was_looked_at_is_not_looked_at_again(go: Go, tmp_path: Path) -> None:
    go(3.0, 2.0, 1.0, 0.5, stops_at=2, pace={"may_end_early": True, "evaluate_every": 2})
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert go(9.0, 9.0, 9.0, 9.0, stops_at=2, pace={"may_end_early": True, "evaluate_every": 2}).reason == "tired"
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_an_interrupt_saves_and_is_no_end(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.training.loop.interruptible", _asked_at_once)
        assert go(3.0, 2.0, 1.0, pace={"evaluate_every": 9, "checkpoint_every": 9}) == LoopEnd(1, "interrupted")
    assert go(3.0, 2.0, 1.0, pace={"evaluate_every": 9, "checkpoint_every": 9}) == LoopEnd(3, "finished")
    assert [record["step"] for record in metrics(tmp_path)] == [1, 3]


@contextmanager
def _asked_at_once() -> Iterator[Callable[[], bool]]:
    yield lambda: True


# Going on.


def test_what_came_after_the_checkpoint_is_forgotten(go: Go, tmp_path: Path) -> None:
    sparse = {"evaluate_every": 4, "checkpoint_every": 2, "log_every": 1, "evaluate_start": True}
    with pytest.raises(Killed):
        go(*(4.0, 3.0, 2.0, 1.0), pace=sparse, dies_at=3)
    assert [record["step"] for record in metrics(tmp_path)] == [0, 1, 2, 3]
    reports: list[ProgressReport] = []
    go(*(4.0, 3.0, 2.0, 1.0), pace=sparse, reports=reports)
    assert [record["step"] for record in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert [(report.step, report.score) for report in reports] == [(3, None), (4, Score(LOSS, 1.0))]


def test_before_the_first_checkpoint_the_start_counts_for_nothing_either(go: Go, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        go(2.0, 1.0, pace={"evaluate_start": True}, dies_at=0)
    go(2.0, 1.0, pace={"evaluate_start": True})
    assert [record["step"] for record in metrics(tmp_path)] == [0, 1, 2]


def test_a_damaged_checkpoint_is_told_and_made_again(go: Go, tmp_path: Path) -> None:
    go(3.0, 1.0, 2.0)
    place = tmp_path / "run/checkpoints"
    newest = place / checkpoint.checkpoint_name(3) / "optimiser.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1])
    assert go(3.0, 1.0, 2.0) == LoopEnd(3, "finished")
    assert newest.read_bytes() == whole
    assert best(tmp_path) == 2
