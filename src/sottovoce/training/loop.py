"""The training loop: a `Loop` says what a step is; everything between steps is here.

    open ─► step ─► commit ─► evaluate ─► records ─► checkpoint, best model ─► report ─► step …
                     └─────────────── where due ──────────────┘

Killed at any instant, a run resumes from its newest complete checkpoint. Records of later steps are dropped, since
those steps will be made again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.interrupts import interruptible
from sottovoce.base.processes import ALONE, Processes
from sottovoce.config import Patience, PatienceSettings
from sottovoce.evaluation.converged import judge_convergence
from sottovoce.evaluation.measures import Measure, Score
from sottovoce.evaluation.score import MANY_COLLAPSED, Evaluation, format_collapsed
from sottovoce.models.recogniser import Recogniser
from sottovoce.training import checkpoint
from sottovoce.training.agreement import digest_tensors, require_equal_across_ranks
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.records import MetricsWriter, StepRecord, open_metrics_writer
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.tracking import Tracking

INTERRUPTED = "interrupted"  # the reason of an end after which the same loop can go on

Say = Callable[[str], None]


@dataclass(frozen=True)
class Due:
    """What there is to do after a step."""

    record: bool
    evaluate: bool
    save: bool


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How many steps a loop makes at most, what it does how often, and how its best model is chosen.

    `recipe` is what the run is about, `tokens` the digest of its token set. Without `log_every` records are made for
    every step and written with its checkpoint. `patience` is how many evaluations in a row may bring no better model,
    or for what share of the steps. A loop that `may_end_early` remembers for how long it has not improved. Without
    `tracking` no tracker follows the loop.
    """

    recipe: str
    tokens: str
    measure: Measure
    steps: int
    evaluate_every: int
    checkpoint_every: int
    log_every: int | None = None
    evaluate_start: bool = False
    may_end_early: bool = False
    patience: Patience = None
    tracking: Tracking | None = None

    def due(self, step: int, *, stops: bool) -> Due:
        evaluates = step % self.evaluate_every == 0 or step == self.steps
        saves = evaluates or stops or step % self.checkpoint_every == 0
        records = saves if self.log_every is None else evaluates or stops or step % self.log_every == 0
        return Due(records, evaluates, saves)


@dataclass(frozen=True, kw_only=True)
class ProgressReport:
    """How far a loop has come, for display; nothing private. None is what it does not know, or not now."""

    unit: str
    step: int
    steps: int
    loss: float | None = None
    score: Score | None = None
    epsilon: float | None = None
    audio_seconds_per_second: float | None = None
    speech_used: float | None = None  # the share of it, where each utterance is used once


@dataclass(frozen=True)
class LoopEnd:
    """The steps that were made, and why no more: `finished`, `interrupted`, `patience`, or a loop's own reason."""

    step: int
    reason: str
    words: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `results.json`."""
        return {"step": self.step, "reason": self.reason} | ({"words": self.words} if self.words else {})


class StopLoop(Exception):
    """Raised by a loop that cannot make another step: a reason in one word, and in words."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason, self.words = reason, words


@dataclass(frozen=True)
class Snapshot:
    """What a loop saves in a checkpoint: its model with notes about it, other tensors, and plain data."""

    model: Recogniser
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)


class Loop(ABC):
    """What a training loop must define. Steps count from 0; `step` of anything else is how many were made."""

    @abstractmethod
    def open(self, found: Checkpoint | None) -> AbstractContextManager[None]:
        """Within, steps can be made, on from `found`, or from the start where that is None."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Make one step; `StopLoop` where there can be no more."""

    @abstractmethod
    def commit(self, step: int, due: Due) -> list[StepRecord]:
        """Check and commit the steps since the last call, before anything of them is written; the records to write."""

    @abstractmethod
    def evaluate(self) -> tuple[Score, StepRecord]:
        """The dev score of the present model, and other figures for the records."""

    @abstractmethod
    def snapshot(self, progress: Mapping[str, Any]) -> Snapshot:
        """All that `open` needs to resume. `progress` belongs to `run_loop`, and goes into the state."""

    @abstractmethod
    def report(self, step: int, due: Due) -> ProgressReport | None:
        """What may be displayed now, without the score; None for nothing."""

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """Whether to stop, asked once after each step; `interrupted` is whether this process was asked to."""
        return interrupted

    def paused(self) -> AbstractContextManager[None]:
        """Within, no step is made: for loops that time themselves."""
        return nullcontext()

    def end(self, ended: LoopEnd) -> None:  # noqa: B027 (most loops have nothing to do)
        """Called when all is saved, before `open` is left."""


def record_collapses(result: Evaluation, say: Say) -> StepRecord:
    """In how many dev utterances the attention collapsed, for the records; said where they are many."""
    if result.collapsed is None:
        return {}
    if result.collapsed >= MANY_COLLAPSED * result.utterances:
        say(f"dev: {format_collapsed(result.collapsed, result.utterances)}")
    return {"dev_collapsed": result.collapsed}


def run_loop(
    loop: Loop,
    run: RunFolder,
    settings: LoopSettings,
    *,
    processes: Processes = ALONE,
    on_report: Callable[[ProgressReport], None] = lambda _: None,
    say: Say = lambda _: None,
) -> LoopEnd:
    """Make the steps of `loop` that are left, in its folder; an interrupt ends it after the present one, saved.

    After each evaluation `run.best` links to the best checkpoint. Of several `processes` only the first evaluates,
    writes and reports.
    """
    found = _load_newest(run, tokens=settings.tokens, processes=processes, say=say)
    with loop.open(found), interruptible() as asked, ExitStack() as held:
        progress = _Progress() if found is None else _resume(found, run, measure=settings.measure, processes=processes)
        writer = None
        if processes.is_first:
            # Before the first checkpoint nothing counts, the start's score included.
            after_step = progress.step or -1
            opening = open_metrics_writer(run, after_step=after_step, tracking=settings.tracking, say=say)
            writer = held.enter_context(opening)
        ended = _Runner(loop, run, settings, writer, on_report, progress, processes).run(loop.watch(asked))
        if writer is not None and ended.reason != INTERRUPTED:
            writer.finish()
        loop.end(ended)
        return ended


@dataclass(frozen=True)
class _Progress:
    """How far a run is between two steps. `best` names the checkpoint that `run.best` links to."""

    step: int = 0
    best: str | None = None
    best_score: Score | None = None
    since_best: int = 0  # evaluations
    evaluated: int = 0  # the last step whose model was evaluated
    scores: tuple[tuple[int, float | None], ...] = ()  # by step, where patience is a share of the run

    def saved(self, score: Score | None) -> "_Progress":
        """With a checkpoint at this step, whose model has `score` if it was evaluated."""
        here = checkpoint.checkpoint_name(self.step)
        best = self.best or here
        if score is None:
            return replace(self, best=best)
        value = score.value if math.isfinite(score.value) else None
        known = replace(self, evaluated=self.step, scores=(*self.scores, (self.step, value)))
        if score.is_better_than(self.best_score):
            return replace(known, best=here, best_score=score, since_best=0)
        return replace(known, best=best, since_best=self.since_best + 1)


@dataclass
class _Runner:
    loop: Loop
    folder: RunFolder
    settings: LoopSettings
    writer: MetricsWriter | None
    on_report: Callable[[ProgressReport], None]
    progress: _Progress
    processes: Processes = ALONE

    def run(self, interrupted: Callable[[], bool]) -> LoopEnd:
        settings = self.settings
        if self.progress.step == 0 and settings.evaluate_start:
            due = Due(record=True, evaluate=True, save=False)
            self._report(due, self._carry_out(due))
        while (step := self.progress.step) < settings.steps:
            if settings.patience is not None and (words := self._impatience(settings.patience)) is not None:
                return LoopEnd(step, "patience", words)
            try:
                self.loop.step(step)
            except StopLoop as stop:
                # The present model may be the best, and must at least be evaluated if it was not.
                if self.progress.evaluated < step:
                    self._carry_out(Due(record=True, evaluate=stop.reason != INTERRUPTED, save=True))
                return LoopEnd(step, stop.reason, stop.words)
            self.progress = replace(self.progress, step=step + 1)
            stops = interrupted()
            due = settings.due(step + 1, stops=stops)
            self._report(due, self._carry_out(due))
            if stops and step + 1 < settings.steps:
                return LoopEnd(step + 1, INTERRUPTED)
        return LoopEnd(step, "finished")

    def _impatience(self, patience: int | PatienceSettings) -> str | None:
        """Why the loop has waited long enough for a better model; None where it has not. The first process knows."""
        progress = self.progress
        if isinstance(patience, int):
            is_over = progress.since_best >= patience
            words = f"no better model on the dev speakers in {patience} evaluations"
        else:
            is_due = progress.evaluated == progress.step >= patience.least_steps
            share = patience.share
            is_over = is_due and judge_convergence(progress.scores, last_step=progress.step, share=share) == "yes"
            words = f"no better model on the dev speakers in the last {100 * share:g} % of the steps"
        return words if self.processes.any(is_over) else None

    def _carry_out(self, due: Due) -> Score | None:
        """All that is due between two steps; the dev score, where the model was evaluated."""
        records = self.loop.commit(self.progress.step, due) if due.record or due.save else []
        if self.writer is None:
            return None
        score = None
        with self.loop.paused():
            if due.evaluate:
                score, figures = self.loop.evaluate()
                records = records or [{"step": self.progress.step}]
                records[-1] |= {**self.settings.measure.entry("dev", score), **figures}
            for record in records:
                self.writer.write(record)
            if due.save:
                self._save(score)
                self.writer.cover(self.progress.step)
        return score

    def _save(self, score: Score | None) -> None:
        """Write a checkpoint, link `run.best` to it if it is the best so far, and remove those not needed."""
        progress = self.progress = self.progress.saved(score)
        assert progress.best is not None
        measure = self.settings.measure
        own: dict[str, Any] = measure.entry("best", progress.best_score)
        if self.settings.may_end_early:
            own |= {"since_best": progress.since_best, "evaluated": progress.evaluated}
        if isinstance(self.settings.patience, PatienceSettings):
            own["scores"] = [list(one) for one in progress.scores]
        kept = self.loop.snapshot(own)
        about = {"recipe": self.settings.recipe, "step": progress.step, **measure.entry("dev", score), **kept.about}
        model = replace(kept.model, about=about)
        folder = self.folder.checkpoints
        saved = Checkpoint(progress.step, model, kept.tensors, best=progress.best, state=kept.state)
        checkpoint.save_checkpoint(folder, saved)
        checkpoint.point_link(self.folder.best, folder / progress.best)
        checkpoint.prune_checkpoints(folder, up_to=progress.step)

    def _report(self, due: Due, score: Score | None) -> None:
        if self.writer is not None and (report := self.loop.report(self.progress.step, due)) is not None:
            self.on_report(replace(report, score=score))


def _load_newest(run: RunFolder, *, tokens: str, processes: Processes, say: Say) -> Checkpoint | None:
    """The run's newest complete checkpoint, the same for all `processes`; None where there is none."""
    with require_equal_across_ranks(processes) as facts:  # so all have read before the first one changes anything
        found, complaints = checkpoint.load_latest_checkpoint(run.checkpoints)
        if processes.is_distributed and found is not None:
            slots = {f"slot {name}": tensor for name, tensor in found.optimiser.items()}
            content = digest_tensors({**found.recogniser.parameters, **slots})
            facts["checkpoint"] = {"step": found.step, "content": content}
        elif processes.is_distributed:
            facts["checkpoint"] = {"step": 0}
    if processes.is_first:
        for complaint in complaints:
            say(complaint)
        if complaints:
            say("going on from the one before" if found is not None else "no checkpoint is whole: starting anew")
    if found is not None and found.recogniser.tokens.digest != tokens:
        place = run.checkpoints / checkpoint.checkpoint_name(found.step)
        raise InputError(f"{place}: a checkpoint of another token set")
    return found


def _resume(found: Checkpoint, run: RunFolder, *, measure: Measure, processes: Processes) -> _Progress:
    """The progress of `found`, with the folder's links in order: a kill may have come between a checkpoint and them."""
    if processes.is_first:
        place = run.checkpoints / checkpoint.checkpoint_name(found.step)
        checkpoint.point_link(run.checkpoints / checkpoint.LATEST, place)
        checkpoint.point_link(run.best, run.checkpoints / found.best)
        checkpoint.prune_checkpoints(run.checkpoints, up_to=found.step)
    state, best = found.state, measure.read("best", found.state)
    scores = tuple((step, score) for step, score in state.get("scores", ()))
    return _Progress(found.step, found.best, best, state.get("since_best", 0), state.get("evaluated", 0), scores)
