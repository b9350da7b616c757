"""Trackers get what `metrics.jsonl` has and a checkpoint covers, each step once; what goes wrong there is only said."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tests.training.tracked import begin_folder, numbers

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.training import following, trackers
from sottovoce.training.following import Follower, Notes
from sottovoce.training.records import open_metrics_writer
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.run_folder import ONE_TIME, RunFolder
from sottovoce.training.trackers import StepValues, TrackedRun, Tracker, TrackerKind
from sottovoce.training.tracking import Tracking, choose_trackers

FAST = ["federation.steps=3", "federation.evaluate_every=2", "federation.privacy.adaptive=null"]
FAKE = Tracking(("fake",))


class Service:
    """A tracker's server: its runs by identity, the names they came with, and how often it is away yet."""

    def __init__(self) -> None:
        self.runs: dict[str, list[StepValues]] = {}
        self.opened: list[TrackedRun] = []
        self.ends: list[bool] = []
        self.away = 0

    def open(self, run: TrackedRun) -> Tracker:
        self._answer()
        self.opened.append(run)
        identity = run.known or f"run {len(self.runs)}"
        kept = self.runs.setdefault(identity, [])

        def log(records: Sequence[StepValues]) -> None:
            self._answer()
            kept.extend(records)

        return Tracker(log, self.ends.append, identity)

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise ConnectionError("nobody there\nand many more lines")

    @property
    def steps(self) -> list[int]:
        (only,) = self.runs.values()
        return [step for step, _ in only]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, services are waited for."""
    monkeypatch.setattr(following, "WAIT_SECONDS", None)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    kinds: Any = trackers.KINDS
    monkeypatch.setitem(kinds, "fake", TrackerKind(made.open, "json"))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return begin_folder(tmp_path / "runs" / "mine")


def write(folder: RunFolder, *steps: int, after: int = -1, covered: int, finished: bool = False) -> list[str]:
    """What is said while records of `steps` are written, each covered by a checkpoint up to `covered`."""
    said: list[str] = []
    with open_metrics_writer(folder, after_step=after, tracking=FAKE, say=said.append) as writer:
        for step in steps:
            writer.write({"step": step, "lr": 0.1 * step})
            if step <= covered:
                writer.cover(step)
        if finished:
            writer.finish()
    return said


# What is sent, and when.


def test_only_what_a_checkpoint_covers_is_sent_and_each_step_once(service: Service, folder: RunFolder) -> None:
    write(folder, 0, 1, 2, 3, covered=2)
    assert service.steps == [0, 1, 2]
    write(folder, 3, 4, after=2, covered=4, finished=True)
    assert service.steps == [0, 1, 2, 3, 4]
    assert [run.known for run in service.opened] == [None, "run 0"]
    assert service.ends == [False, True]
    ((step, values), *_) = service.runs["run 0"][1:]
    assert (step, values) == (1, {"step": 1, "lr": 0.1})


def test_what_an_earlier_process_could_not_send_is_sent_by_the_next(service: Service, folder: RunFolder) -> None:
    service.away = 10**9
    said = write(folder, 1, 2, covered=2)
    assert not service.runs
    service.away = 0
    write(folder, 3, after=2, covered=3)
    assert service.steps == [1, 2, 3]
    assert said[0].startswith("fake: ConnectionError: nobody there; the run goes on")
    assert said[-1].startswith("fake: 2 steps are not sent, after ")


def test_a_service_that_comes_back_gets_all_of_it_and_one_line_is_said(service: Service, folder: RunFolder) -> None:
    service.away = 2
    folder.metrics.add(*({"step": step, "lr": 0.1} for step in (1, 2, 3, 4)))
    run = TrackedRun(folder.path, "mine", {}, -1, is_release=False)
    follower = Follower("fake", run, Notes(folder.path), diagnostics=False)
    for step in (1, 2, 3, 4):
        follower.send(step)
        assert service.steps == [*range(1, step + 1)] if step > 2 else not service.runs
    assert len([*follower.lines()]) == 1
    assert follower.failures == 2


def test_a_service_that_never_answers_is_left_alone(
    service: Service, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says after the run has left its folder changes nothing there."""
    monkeypatch.setattr(following, "WAIT_SECONDS", 0.0)
    waits, answered = Event(), Event()
    kinds: Any = trackers.KINDS

    def hang(run: TrackedRun) -> Tracker:
        waits.wait()
        return Tracker(lambda _: answered.set(), lambda _: None, "late")

    monkeypatch.setitem(kinds, "fake", TrackerKind(hang, "json"))
    said = write(folder, 1, covered=1)
    assert said == ["fake: no answer for 0 s: the same command with --resume sends the rest"]
    waits.set()
    answered.wait()
    assert not (folder.path / "trackers.json").exists()


def test_a_service_without_a_note_of_the_last_batch_says_itself_what_it_has(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between sending and noting it."""
    got: list[int] = []
    kinds: Any = trackers.KINDS

    def open_counting(run: TrackedRun) -> Tracker:
        return Tracker(lambda records: got.extend(step for step, _ in records), lambda _: None, "one", sent=2)

    monkeypatch.setitem(kinds, "fake", TrackerKind(open_counting, "json"))
    write(folder, 1, 2, 3, covered=3)
    assert got == [3]


def test_runs_are_called_by_their_places(tmp_path: Path) -> None:
    tracking = Tracking(root=tmp_path / "runs")
    assert tracking.name(tmp_path / "runs/demo/private") == "demo/private"
    assert tracking.name(tmp_path / "elsewhere/mine") == "mine"


# Runs.

Run = Callable[..., Outcome]


@pytest.fixture
def run(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Run:
    def go(*changes: str, tracking: Tracking = FAKE, resume: bool = False) -> Outcome:
        said.clear()
        runs = tmp_path / "runs"
        around = RunContext(runs, short_stores, torch.device("cpu"), say=said.append, tracking=tracking)
        recipe = load_recipe(str(federated_recipe), [*FAST, *changes])
        return run_recipe(recipe, out=runs / "mine", resume=resume, context=around)

    said: list[str] = []
    go.said = said  # type: ignore[attr-defined]
    return go


@pytest.mark.parametrize("diagnostics", [False, True])
def test_a_simulation_sends_its_metrics_and_diagnostics_where_they_are_asked_for(
    service: Service, run: Run, diagnostics: bool
) -> None:
    outcome = run(tracking=Tracking(("fake",), diagnostics))
    assert dict(service.runs["run 0"]) == numbers(outcome.folder, diagnostics=diagnostics)
    assert any(name.startswith("diagnostics/") for name in service.runs["run 0"][-1][1]) == diagnostics
    assert service.opened[0].settings["federation"]["steps"] == 3
    assert service.ends == [True]
    assert not (outcome.folder / "tensorboard").exists(), "it was not asked for"


def test_central_training_is_followed_at_its_checkpoints(
    service: Service, recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    around = RunContext(tmp_path, stores, torch.device("cpu"), tracking=FAKE)
    outcome = run_recipe(load_recipe(str(recipe_file)), out=tmp_path / "run", resume=False, context=around)
    assert dict(service.runs["run 0"]) == numbers(outcome.folder)


def test_a_finished_run_is_sent_to_a_tracker_that_is_named_later(service: Service, run: Run) -> None:
    outcome = run(tracking=Tracking())
    assert not service.runs
    for _ in range(2):
        run(resume=True)
        assert dict(service.runs["run 0"]) == numbers(outcome.folder)
    assert service.steps == sorted(numbers(outcome.folder))


def test_a_run_ends_well_though_its_service_is_away(service: Service, run: Run) -> None:
    service.away = 10**9
    outcome = run()
    assert outcome.results is not None
    said = [line for line in run.said if line.startswith("fake: ")]  # type: ignore[attr-defined]
    assert len(said) == 2
    assert "tries again" in said[0]
    assert "are not sent" in said[1]


# Releases.


@pytest.mark.parametrize(
    ("tracking", "words"),
    [
        (Tracking(("tensorboard",)), "--track tensorboard: its files carry the time of each round"),
        (Tracking(("mlflow", "wandb")), "--track wandb: it records times, the host's name"),
        (Tracking(None, diagnostics=True), "--track-diagnostics: they are by-products of people's data"),
        (Tracking(("mlflow",), diagnostics=True), "--track-diagnostics: they are by-products of people's data"),
    ],
)
def test_a_release_is_refused_what_records_times_and_diagnostics(
    run: Run, tmp_path: Path, tracking: Tracking, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        run("federation.privacy.mode=secure", tracking=tracking)
    assert not (tmp_path / "runs/mine").exists()


def test_a_release_is_sent_when_it_has_ended_and_without_its_recipe(
    service: Service, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_before_end: list[bool] = []

    def opened(tracked: TrackedRun) -> Tracker:
        opened_before_end.append(not (tracked.folder / "results.json").exists())
        return service.open(tracked)

    kinds: Any = trackers.KINDS
    monkeypatch.setitem(kinds, "fake", TrackerKind(opened, "json"))
    outcome = run("federation.privacy.mode=secure")
    assert opened_before_end == [False]
    (tracked,) = service.opened
    assert (tracked.is_release, tracked.settings) == (True, {})
    assert dict(service.runs["run 0"]) == numbers(outcome.folder)
    assert {path.lstat().st_mtime for path in outcome.folder.rglob("*")} == {ONE_TIME}
    assert (outcome.folder / "trackers.json").exists()


# What is asked for.


def test_what_is_asked_for_must_be_known_and_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose_trackers(None, diagnostics=False, root=tmp_path).chosen(is_service=False) == ["tensorboard"]
    with pytest.raises(InputError, match=r"--track mlfow: no such tracker, did you mean 'mlflow'\?"):
        choose_trackers("tensorboard, mlfow", diagnostics=False, root=tmp_path)
    kinds: Any = trackers.KINDS
    monkeypatch.setitem(kinds, "mlflow", TrackerKind(trackers.open_mlflow, "not_there_at_all"))
    with pytest.raises(InputError, match=r"--track mlflow needs not_there_at_all: pip install 'sottovoce\[mlflow\]'"):
        choose_trackers("mlflow", diagnostics=False, root=tmp_path)
