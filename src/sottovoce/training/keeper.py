"""The keeper of long loops. A loop says what a step is; all that lies between steps is written once, here.

    begun ─► step ─► settle ─► evaluate ─► records ─► checkpoint, best ─► report ─► step …
                      └──────────── where due ─────────────────────┘

Killed at any instant, a run goes on from its newest whole checkpoint. What was recorded after it is forgotten, as those
steps will be made again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.evaluation.measures import Measure, Score
from sottovoce.evaluation.score import MANY_COLLAPSED, Evaluation, format_collapsed
from sottovoce.interrupts import interruptible
from sottovoce.models.saved import Recogniser
from sottovoce.processes import ALONE, Processes
from sottovoce.training import checkpoint
from sottovoce.training.agreement import Sealed, agreeing, sealed_tensors
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.step_log import Recorder, recorder

INTERRUPTED = "interrupted"  # the reason of an end after which the same loop can go on

Record = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Due:
    """What there is to do after a step."""

    record: bool
    evaluate: bool
    save: bool


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many steps a loop makes at most, and what it does how often.

    Without `log_every` records are made for every step and written with its checkpoint. `patience` is how many
    evaluations in a row may bring no better model. A loop that `may_end_early`, by patience or otherwise, remembers
    how long it has got no better.
    """

    steps: int
    evaluate_every: int
    checkpoint_every: int
    log_every: int | None = None
    evaluate_start: bool = False
    may_end_early: bool = False
    patience: int | None = None

    def due(self, step: int, *, stops: bool) -> Due:
        evaluates = step % self.evaluate_every == 0 or step == self.steps
        saves = evaluates or stops or step % self.checkpoint_every == 0
        records = saves if self.log_every is None else evaluates or stops or step % self.log_every == 0
        return Due(records, evaluates, saves)


@dataclass(frozen=True, kw_only=True)
class Report:
    """How far a loop has come, for whoever shows it; nothing private. None is what it does not know, or not now."""

    unit: str
    step: int
    steps: int
    loss: float | None = None
    score: Score | None = None
    epsilon: float | None = None
    audio_seconds_per_second: float | None = None
    speech_used: float | None = None  # the share of it, where each utterance is used once


@dataclass(frozen=True)
class Ended:
    """The steps that were made, and why no more: `finished`, `interrupted`, `patience`, or what a loop calls it."""

    step: int
    reason: str
    words: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `results.json`."""
        return {"step": self.step, "reason": self.reason} | ({"words": self.words} if self.words else {})


class Stop(Exception):
    """Raised by a loop that cannot make another step, and why: a reason in one word, and in words."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason, self.words = reason, words


@dataclass(frozen=True)
class Snapshot:
    """What a loop keeps in a checkpoint: its model and what is to be said of that, other tensors, and plain data."""

    model: Recogniser
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)


class Loop(ABC):
    """A long loop, as its keeper knows it. Steps count from 0; `step` of anything else is how many were made."""

    @abstractmethod
    def begun(self, found: Checkpoint | None) -> AbstractContextManager[None]:
        """Within, steps can be made, on from `found`, or from the start where that is None."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Make one step; `Stop` where there can be no more."""

    @abstractmethod
    def settle(self, step: int, due: Due) -> list[Record]:
        """Make sure of what was done since it was last asked, before any of it is seen; the records to write now."""

    @abstractmethod
    def evaluate(self) -> tuple[Score, Record]:
        """The dev score of the present model, and what else is worth recording then."""

    @abstractmethod
    def snapshot(self, standing: Mapping[str, Any]) -> Snapshot:
        """All that `begun` needs. `standing` is the keeper's own, and goes into the state."""

    @abstractmethod
    def report(self, step: int, due: Due) -> Report | None:
        """What may be shown of it now, but for the score; None where nothing is to be shown."""

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """Whether to stop, asked once after each step, where `interrupted` is whether this process was told to."""
        return interrupted

    def paused(self) -> AbstractContextManager[None]:
        """Within, no step is made: for loops that time themselves."""
        return nullcontext()


def note_collapsed(result: Evaluation, say: Say) -> Record:
    """In how many dev utterances an attention collapsed, for the records, and said where they are many."""
    if result.collapsed is None:
        return {}
    if result.collapsed >= MANY_COLLAPSED * result.utterances:
        say(f"dev: {format_collapsed(result.collapsed, result.utterances)}")
    return {"dev_collapsed": result.collapsed}


def keep(
    loop: Loop,
    run: RunFolder,
    *,
    recipe: str,
    tokens: str,
    pace: Pace,
    measure: Measure,
    processes: Processes = ALONE,
    events: bool = True,
    on_report: Callable[[Report], None] = lambda _: None,
    on_end: Callable[[Ended], None] = lambda _: None,
    say: Say = lambda _: None,
) -> Ended:
    """Make the steps of `loop` that are left, in its folder; an interrupt ends it after the present one, saved.

    After each evaluation `run.best` leads to the checkpoint with the best score by `measure`. `recipe` is what the run
    is about, `tokens` the digest of its token set. Where several `processes` make the loop together, the first one
    alone evaluates, writes and reports. Without `events` nothing goes to TensorBoard. `on_end` hears when all is saved,
    within what the loop has begun.
    """
    found = _newest(run, tokens=tokens, processes=processes, say=say)
    with loop.begun(found), interruptible() as asked, ExitStack() as held:
        standing = _Standing() if found is None else _take_up(found, run, measure=measure, processes=processes)
        records = None
        if processes.first:
            # Before the first checkpoint nothing counts, the start's score included.
            records = held.enter_context(recorder(run, after_step=standing.step or -1, events=events))
        ended = _Keeper(loop, run, recipe, pace, measure, records, on_report, standing).steps(loop.watch(asked))
        on_end(ended)
        return ended


@dataclass(frozen=True)
class _Standing:
    """Where a run stands between two steps. `best` names the checkpoint that `run.best` leads to."""

    step: int = 0
    best: str | None = None
    best_score: Score | None = None
    since_best: int = 0  # evaluations
    evaluated: int = 0  # the last step whose model was evaluated

    def saved(self, score: Score | None) -> "_Standing":
        """With a checkpoint at this step, whose model has `score` if it was evaluated."""
        here = checkpoint.name(self.step)
        best = self.best or here
        if score is None:
            return replace(self, best=best)
        if score.is_better_than(self.best_score):
            return replace(self, best=here, best_score=score, since_best=0, evaluated=self.step)
        return replace(self, best=best, since_best=self.since_best + 1, evaluated=self.step)


@dataclass
class _Keeper:
    loop: Loop
    run: RunFolder
    recipe: str
    pace: Pace
    measure: Measure
    records: Recorder | None
    on_report: Callable[[Report], None]
    standing: _Standing

    def steps(self, interrupted: Callable[[], bool]) -> Ended:
        pace = self.pace
        if self.standing.step == 0 and pace.evaluate_start:
            due = Due(record=True, evaluate=True, save=False)
            self._report(due, self._carry_out(due))
        while (step := self.standing.step) < pace.steps:
            if pace.patience is not None and self.standing.since_best >= pace.patience:
                return Ended(step, "patience", f"no better model on the dev speakers in {pace.patience} evaluations")
            try:
                self.loop.step(step)
            except Stop as stop:
                # What was made since may be the best model, and must at least be looked at, unless there is a later.
                if self.standing.evaluated < step:
                    self._carry_out(Due(record=True, evaluate=stop.reason != INTERRUPTED, save=True))
                return Ended(step, stop.reason, stop.words)
            self.standing = replace(self.standing, step=step + 1)
            stops = interrupted()
            due = pace.due(step + 1, stops=stops)
            self._report(due, self._carry_out(due))
            if stops and step + 1 < pace.steps:
                return Ended(step + 1, INTERRUPTED)
        return Ended(step, "finished")

    def _carry_out(self, due: Due) -> Score | None:
        """All that is due between two steps; the dev score, where the model was evaluated."""
        records = self.loop.settle(self.standing.step, due) if due.record or due.save else []
        if self.records is None:
            return None
        score = None
        with self.loop.paused():
            if due.evaluate:
                score, besides = self.loop.evaluate()
                records = records or [{"step": self.standing.step}]
                records[-1] |= {**self.measure.entry("dev", score), **besides}
            for record in records:
                self.records.write(record)
            if due.save:
                self._save(score)
        return score

    def _save(self, score: Score | None) -> None:
        """Write a checkpoint, lead `run.best` to it if it is the best so far, and clear away what nobody needs."""
        standing = self.standing = self.standing.saved(score)
        assert standing.best is not None
        own: dict[str, Any] = self.measure.entry("best", standing.best_score)
        if self.pace.may_end_early:
            own |= {"since_best": standing.since_best, "evaluated": standing.evaluated}
        kept = self.loop.snapshot(own)
        about = {"recipe": self.recipe, "step": standing.step, **self.measure.entry("dev", score), **kept.about}
        model = replace(kept.model, about=about)
        folder = self.run.checkpoints
        checkpoint.save(folder, Checkpoint(standing.step, model, kept.tensors, best=standing.best, state=kept.state))
        checkpoint.point(self.run.best, folder / standing.best)
        checkpoint.prune(folder, up_to=standing.step)

    def _report(self, due: Due, score: Score | None) -> None:
        if self.records is not None and (report := self.loop.report(self.standing.step, due)) is not None:
            self.on_report(replace(report, score=score))


def _newest(run: RunFolder, *, tokens: str, processes: Processes, say: Say) -> Checkpoint | None:
    """The run's newest whole checkpoint, the same for all `processes`; None where there is none."""
    with agreeing(processes) as facts:  # so all have read before the first one changes anything
        found, complaints = checkpoint.load_latest(run.checkpoints)
        if processes.several:
            facts["checkpoint"] = {"step": 0} if found is None else {"step": found.step, "content": _sealed(found)}
    if processes.first:
        for complaint in complaints:
            say(complaint)
        if complaints:
            say("going on from the one before" if found is not None else "no checkpoint is whole: starting anew")
    if found is not None and found.recogniser.tokens.digest != tokens:
        raise InputError(f"{run.checkpoints / checkpoint.name(found.step)}: a checkpoint of another token set")
    return found


def _take_up(found: Checkpoint, run: RunFolder, *, measure: Measure, processes: Processes) -> _Standing:
    """Where `found` stands, with the folder's links in order: a kill may have come between a checkpoint and them."""
    if processes.first:
        checkpoint.point(run.checkpoints / checkpoint.LATEST, run.checkpoints / checkpoint.name(found.step))
        checkpoint.point(run.best, run.checkpoints / found.best)
        checkpoint.prune(run.checkpoints, up_to=found.step)
    state, best = found.state, measure.read("best", found.state)
    return _Standing(found.step, found.best, best, state.get("since_best", 0), state.get("evaluated", 0))


def _sealed(found: Checkpoint) -> Sealed:
    return sealed_tensors({**found.recogniser.parameters, **{f"slot {name}": t for name, t in found.optimiser.items()}})
