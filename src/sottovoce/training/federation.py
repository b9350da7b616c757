"""Federated training: round after round, evaluated on people who are no clients, with every release in the ledger.

Killed at any instant, a run goes on from its last checkpoint. A seeded run (a simulation) does the lost rounds again
with the same cohorts and the same noise and ends with the same bits, each step charged once. On a GPU, where bits do
not repeat, it makes new attempts as a release does, from its seed. A secure run (a release)
makes new attempts with new cohorts and new noise, and each attempt is charged.

Nothing of a step is written down before the commit that covers it: its records wait in memory until then.
"""

import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sottovoce.config import Federation, Recipe
from sottovoce.errors import InputError
from sottovoce.federated.cohort import Clients
from sottovoce.federated.private import Private
from sottovoce.federated.round import Round, ServerPass, run_round
from sottovoce.federated.server import Server
from sottovoce.flat.layout import Layout
from sottovoce.interrupts import interruptible
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.fingerprint import fingerprint
from sottovoce.privacy.ledger import BudgetSpent, Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode
from sottovoce.store import Store
from sottovoce.training import checkpoint
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.parts import trained_part
from sottovoce.training.run_folder import LEDGER, RunFolder
from sottovoce.training.step_log import Recorder, by_kind, recorder
from sottovoce.training.team import Team

Say = Callable[[str], None]


@dataclass(frozen=True)
class RoundReport:
    """How far a run has come, for whoever shows it; nothing private."""

    step: int
    steps: int
    epsilon: float | None
    dev_wer: float | None


@dataclass(frozen=True)
class Ended:
    """The rounds that were made, and why no more: `finished`, `interrupted`, `budget` or `patience`."""

    step: int
    reason: str
    words: str = ""


@dataclass(frozen=True)
class _Standing:
    """Where a run stands between two rounds. `since_best` counts evaluations."""

    step: int = 0
    best: str | None = None
    best_wer: float | None = None
    since_best: int = 0
    evaluated: int = 0  # the last step whose model was evaluated


class Federating:
    """One federated run in its folder; `run` makes the rounds that are left."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        start: Recogniser,
        plan: Plan,
        clients: Clients,
        team: Team,
        dev: tuple[Store, str],
        inputs: str,
        device: torch.device,
        server_pass: ServerPass | None = None,
        on_report: Callable[[RoundReport], None] = lambda _: None,
        say: Say = lambda _: None,
    ) -> None:
        self._recipe, self._folder, self._start, self._dev = recipe, folder, start, dev
        self._plan, self._clients, self._team = plan, clients, team
        self._server_pass, self._on_report, self._say = server_pass, on_report, say
        self._layout: Layout = plan.layout
        self._standing = _Standing()
        part = trained_part(recipe, start)
        self._frozen = part.frozen
        parameters_P = self._layout.flatten(part.initial).to(device)
        self._server = Server(self._settings.server, self._layout, parameters_P)
        mark = self._restore()
        header = plan.ledger_header(
            run=recipe.about, inputs=inputs, repeatable=self._repeatable, central_steps=self._settings.steps
        )
        self._ledger = Ledger(folder.path / LEDGER, header=header, checkpoint=mark)
        if self._ledger.repaired:
            say(self._ledger.repaired)

    @property
    def _settings(self) -> Federation:
        return self._recipe.federated

    @property
    def _repeatable(self) -> bool:
        """Attention on a GPU adds gradients in no fixed order, so that a lost round cannot be made again to the bit."""
        return self._server.parameters_P.device.type == "cpu"

    @property
    def _secure(self) -> bool:
        return self._plan.settings.mode is Mode.SECURE

    def run(self) -> Ended:
        """Make the rounds that are left."""
        known = self._standing.step or -1  # before the first checkpoint nothing counts, the start's WER included
        try:
            with (
                interruptible() as interrupted,
                recorder(self._folder, after_step=known, events=not self._secure) as records,
            ):
                self._folder.diagnostics.cut(after_step=known)
                return self._rounds(records, interrupted)
        finally:
            self._clients.close()
            self._ledger.close()

    def _rounds(self, records: Recorder, interrupted: Callable[[], bool]) -> Ended:
        if self._standing.step == 0:
            self._evaluate_start(records)
        pending = _Pending()
        digest = fingerprint(self._server.parameters_P)
        while self._standing.step < self._settings.steps:
            step, begun = self._standing.step, time.perf_counter()
            patience = self._settings.patience
            if patience is not None and self._standing.since_best >= patience:
                return Ended(step, "patience", f"no better model on the dev speakers in {patience} evaluations")
            try:
                done = run_round(
                    self._server,
                    plan=self._plan,
                    clients=self._clients,
                    ledger=self._ledger,
                    step=step,
                    digest=digest,
                    server_pass=self._server_pass,
                )
            except BudgetSpent as spent:
                if step == 0:
                    raise InputError(f"federation.privacy: not one round can be paid for: {spent}") from None
                # What was made since is paid for: it may be the best model, and must at least be looked at.
                if self._standing.evaluated < step:
                    self._save(records, pending, digest=digest, evaluates=True)
                return Ended(step, "budget", f"the privacy budget is spent: {spent}")
            digest = fingerprint(self._server.parameters_P)
            pending.add(self._metrics(done, step), self._diagnostics(done, step))
            self._check_clients(done, step)
            if not self._secure:
                pending.time(time.perf_counter() - begun, done.private)
            self._plan = done.plan
            self._standing = replace(self._standing, step=step + 1)
            stops = interrupted() or done.interrupted
            due = _due(self._settings, step=step + 1, stops=stops)
            wer = None
            if due.save:
                wer = self._save(records, pending, digest=digest, evaluates=due.evaluate)
            self._on_report(RoundReport(step + 1, self._settings.steps, done.epsilon, wer))
            if stops and step + 1 < self._settings.steps:
                return Ended(step + 1, "interrupted")
        return Ended(self._standing.step, "finished")

    # Before the first round, and after an interruption.

    def _restore(self) -> Mark | None:
        found, complaints = checkpoint.load_latest(self._folder.checkpoints)
        for complaint in complaints:
            self._say(complaint)
        if complaints:
            self._say("going on from the one before" if found is not None else "no checkpoint is whole: starting anew")
        if found is None:
            return None
        if found.recogniser.tokens.digest != self._start.tokens.digest:
            raise InputError(f"{self._folder.checkpoints}: a checkpoint of another token set")
        state = found.state
        tensors = dict(found.optimiser)
        # Where the checkpoint's model is an average, or merged, the server's own parameters lie beside it.
        parameters_P = tensors.pop(checkpoint.PARAMETERS, None)
        if parameters_P is None:
            whole = found.recogniser.parameters
            parameters_P = self._layout.flatten({name: whole[name] for name in self._layout.names})
        self._server.restore(parameters_P, tensors)
        if self._plan.settings.adaptive is not None:
            self._plan = self._plan.with_clip_bound(state["clip_bound"])
        checkpoint.point(
            self._folder.checkpoints / checkpoint.LATEST, self._folder.checkpoints / checkpoint.name(found.step)
        )
        checkpoint.point(self._folder.best, self._folder.checkpoints / found.best)
        checkpoint.prune(self._folder.checkpoints, up_to=found.step)
        self._standing = _Standing(
            found.step, found.best, state["best_wer"], state["since_best"], evaluated=state["evaluated"]
        )
        return Mark(**state["ledger"])

    def _evaluate_start(self, records: Recorder) -> None:
        wer = self._dev_wer()
        records.write({"step": 0, "dev_wer": wer})
        self._on_report(RoundReport(0, self._settings.steps, None, wer))

    def _dev_wer(self) -> float:
        store, split = self._dev
        return self._team.evaluate(self._model(), store, split=split).wer

    def _model(self) -> Recogniser:
        return replace(self._start, parameters=self._frozen.merged(self._layout.views(self._server.result_P)))

    # After a round.

    def _metrics(self, done: Round, step: int) -> dict[str, Any]:
        """All of it came after the noise, or was known before the run."""
        names, server, place = self._layout.names, done.server, self._start.family.place
        record: dict[str, Any] = {
            "step": step + 1,
            "lr": server.lr,
            "epsilon": done.epsilon,
            "noise_std": done.noise_std,
            "clip_bound": None if math.isinf(self._plan.clip_bound) else self._plan.clip_bound,
            "server_norms": by_kind(names, server.norms_H.tolist(), place=place, join=math.hypot),
        }
        if server.trust_ratios_H is not None:
            ratios = server.trust_ratios_H.tolist()
            record["trust_ratios"] = by_kind(names, ratios, place=place, join=lambda a, b: (a + b) / 2)
        if done.server_pass_loss is not None:
            record["server_pass_loss"] = done.server_pass_loss
        return record

    def _diagnostics(self, done: Round, step: int) -> dict[str, Any] | None:
        if self._secure or done.private is None:
            return None
        return {"step": step + 1, "accounted": False, **done.private.as_json(self._plan)}

    def _check_clients(self, done: Round, step: int) -> None:
        """A round in which everybody failed is no one client's accident: stop before noise wears the model down.

        Not in a release: whether it stops would tell something of who was in the cohort. There the dev WER shows it.
        """
        private = done.private
        if self._secure or private is None:
            return
        diverged = private.diverged
        if private.cohort and private.dropped.total() + diverged == private.cohort:
            reasons = private.dropped + Counter({"its update was not finite": diverged})
            reason = reasons.most_common(1)[0][0]
            raise InputError(f"round {step + 1}: every client of the cohort failed; the first reason: {reason}")

    def _save(self, records: Recorder, pending: "_Pending", *, digest: str, evaluates: bool) -> float | None:
        """Commit to the ledger, evaluate, write what was waiting, and keep a checkpoint. Returns the dev WER."""
        standing = self._standing
        # Without new rounds the last commit still stands, and only the evaluation is made up for.
        mark = self._ledger.commit(step=standing.step - 1, result=digest) if pending.metrics else self._ledger.mark
        wer = self._dev_wer() if evaluates else None
        here = checkpoint.name(standing.step)
        best, best_wer, since_best = standing.best or here, standing.best_wer, standing.since_best
        if wer is not None:
            better = best_wer is None or wer < best_wer
            since_best = 0 if better else since_best + 1
            best, best_wer = (here, wer) if better else (best, best_wer)
            pending.metrics = pending.metrics or [{"step": standing.step}]
        evaluated = standing.evaluated if wer is None else standing.step
        self._standing = replace(standing, best=best, best_wer=best_wer, since_best=since_best, evaluated=evaluated)
        self._write(records, pending, wer=wer)
        about = {"recipe": self._recipe.about, "step": standing.step, "dev_wer": wer, "guarantee": self._plan.guarantee}
        state = {
            "ledger": {"length": mark.length, "head": mark.head},
            "best_wer": best_wer,
            "since_best": since_best,
            "evaluated": evaluated,
            "clip_bound": self._plan.clip_bound if self._plan.settings.adaptive is not None else None,
        }
        tensors = self._server.tensors()
        if self._server.result_P is not self._server.parameters_P or self._frozen.tensors:
            tensors[checkpoint.PARAMETERS] = self._server.parameters_P
        checkpoint.save(
            self._folder.checkpoints,
            Checkpoint(standing.step, replace(self._model(), about=about), tensors, best=best, state=state),
        )
        checkpoint.point(self._folder.best, self._folder.checkpoints / best)
        checkpoint.prune(self._folder.checkpoints, up_to=standing.step)
        return wer

    def _write(self, records: Recorder, pending: "_Pending", *, wer: float | None) -> None:
        metrics, diagnostics = pending.taken()
        if metrics and wer is not None:
            metrics[-1]["dev_wer"] = wer
        for record in metrics:
            records.write(record)
        if diagnostics:
            self._folder.diagnostics.add(*diagnostics)


class _Pending:
    """Records of rounds that no commit covers yet."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._diagnostics: list[dict[str, Any]] = []

    def add(self, metrics: dict[str, Any], diagnostics: dict[str, Any] | None) -> None:
        self.metrics.append(metrics)
        if diagnostics is not None:
            self._diagnostics.append(diagnostics)

    def time(self, seconds: float, private: Private | None) -> None:
        """How long the last round took. How long depends on who was in it: a simulation's only."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.metrics[-1]["seconds"] = round(seconds, 4)
        if private is not None:
            self.metrics[-1] |= {
                "audio_seconds_per_second": round(private.audio_seconds / max(seconds, 1e-9), 1),
                "waited_for_data_seconds": round(private.waited_seconds, 4),
            }
        self.metrics[-1]["memory_mib"] = round(memory, 1)
        if torch.cuda.is_available():
            self.metrics[-1]["device_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def taken(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        taken = self.metrics, self._diagnostics
        self.metrics, self._diagnostics = [], []
        return taken


@dataclass(frozen=True)
class _Due:
    evaluate: bool
    save: bool


def _due(settings: Federation, *, step: int, stops: bool) -> _Due:
    evaluates = step % settings.evaluate_every == 0 or step == settings.steps
    return _Due(evaluates, evaluates or stops or step % settings.checkpoint_every == 0)


def describe_end(ended: Ended) -> Mapping[str, Any]:
    """For `results.json`."""
    return {"step": ended.step, "reason": ended.reason} | ({"words": ended.words} if ended.words else {})
