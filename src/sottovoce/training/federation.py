"""Federated training: round after round, evaluated on people who are no clients, with every release in the ledger.

Killed at any instant, a run goes on from its last checkpoint. A seeded run (a simulation) does the lost rounds again
with the same cohorts and the same noise and ends with the same bits, each step charged once. On a GPU, where bits do
not repeat, it makes new attempts as a release does, from its seed. A secure run (a release)
makes new attempts with new cohorts and new noise, and each attempt is charged.

Nothing of a step is written down before the commit that covers it: its records wait in memory until then.
"""

import hashlib
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, final

import torch

from sottovoce.config import Federation, Recipe, as_yaml
from sottovoce.digests import safetensors_digest
from sottovoce.errors import InputError
from sottovoce.evaluation.measures import CTC_WER, LOSS, Measure, Score, scored
from sottovoce.federated.client_wer import Listeners, measure_wer
from sottovoce.federated.cohort import Clients, as_sent
from sottovoce.federated.private import Private
from sottovoce.federated.round import Round, ServerPass, run_round
from sottovoce.federated.server import Server
from sottovoce.federated.time_line import NOTHING_LEFT
from sottovoce.federated.turns import Turns
from sottovoce.flat.layout import Layout
from sottovoce.models.saved import FROZEN, Recogniser, TrainedPart, digests, save_frozen
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.fingerprint import fingerprint
from sottovoce.privacy.ledger import BudgetSpent, Ledger
from sottovoce.privacy.ledger_records import AttemptsUsed
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode
from sottovoce.signatures import PrivateKey
from sottovoce.store import Store
from sottovoce.training.checkpoint import NOISE, PARAMETERS, TURNS, Checkpoint, name
from sottovoce.training.elsewhere import TooFewClients
from sottovoce.training.keeper import (
    INTERRUPTED,
    Due,
    Ended,
    Loop,
    Pace,
    Record,
    Report,
    Say,
    Snapshot,
    Stop,
    keep,
    note_collapsed,
)
from sottovoce.training.run_folder import LEDGER, RunFolder
from sottovoce.training.step_log import by_kind
from sottovoce.training.team import Team
from sottovoce.training.trained_part import trained_part

# Wait until clients can be asked, before a round is paid for; False where the function given says to stop meanwhile,
# TooFewClients where they never will be enough.
Ready = Callable[[Callable[[], bool]], bool]

# Why a run ended early: clients accepted no more attempts; too few clients are left.
ATTEMPTS, TOO_FEW = "attempts", "too few clients"


@final
class Federating(Loop):
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
        measure: Measure,
        tests: Mapping[str, tuple[Store, str]],
        inputs: str,
        device: torch.device,
        server_pass: ServerPass | None = None,
        turns: Turns | None = None,
        ready: Ready | None = None,
        spare_attempts: int | None = None,
        end: Callable[[int], None] = lambda _: None,
        listeners: Listeners | None = None,
        key: PrivateKey | None = None,
        on_report: Callable[[Report], None] = lambda _: None,
        say: Say = lambda _: None,
    ) -> None:
        self._recipe, self._folder, self._start, self._dev, self._measure = recipe, folder, start, dev, measure
        self._tests = tests
        self._plan, self._clients, self._team, self._inputs = plan, clients, team, inputs
        self._server_pass, self._turns, self._on_report, self._say = server_pass, turns, on_report, say
        self._ready, self._end, self._listeners = ready, end, listeners
        self._spare_attempts = spare_attempts
        self._key = key
        asked = recipe.federated.client_wer
        self._wer_plan = None if asked is None else asked.plan(plan)
        self._guarantee = recipe.federated.guarantee(plan)
        self._interrupted: Callable[[], bool] = lambda: False
        self._layout: Layout = plan.layout
        part = trained_part(recipe, start)
        self._frozen = part.frozen
        self._frozen_digest: str | None = None
        self._frozen_sha256: str | None = None
        parameters_P = self._layout.flatten(part.initial).to(device)
        self._server = Server(self._settings.server, self._layout, parameters_P)
        vault = folder.path / SECRETS if self._secure else None
        self._correlated = plan.correlated_noise(device=device, vault=vault)
        self._pending = _Pending()
        self._epsilon: float | None = None
        self._stopped_elsewhere = False
        self._ledger: Ledger
        self._mark: Mark
        self._digest: str

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
        settings = self._settings
        if self._frozen.tensors:  # before any checkpoint is read: they are parts of it
            self._frozen_digest = save_frozen(self._frozen, self._folder.path)
            self._frozen_sha256 = safetensors_digest(self._folder.path / FROZEN)
        pace = Pace(
            steps=settings.steps,
            evaluate_every=settings.evaluate_every,
            checkpoint_every=settings.checkpoint_every,
            evaluate_start=True,
            may_end_early=True,
            patience=settings.patience,
        )
        return keep(
            self,
            self._folder,
            recipe=self._recipe.about,
            tokens=self._start.tokens.digest,
            pace=pace,
            measure=self._measure,
            events=not self._secure,
            on_report=self._on_report,
            on_end=self._over,
            say=self._say,
        )

    @contextmanager
    def begun(self, found: Checkpoint | None) -> Iterator[None]:
        with closing(self._clients):
            mark = None if found is None else self._restore(found)
            header = self._plan.ledger_header(
                run=self._recipe.about,
                inputs=self._inputs,
                repeatable=self._repeatable,
                central_steps=self._settings.steps,
                client_wer=self._told_client_wer,
                accepted=self._accepted,
                recipe=hashlib.sha256(as_yaml(self._recipe).encode()).hexdigest(),
            )
            opened = Ledger(self._folder.path / LEDGER, header=header, checkpoint=mark, key=self._key)
            with closing(opened) as self._ledger:
                if self._ledger.repaired:
                    self._say(self._ledger.repaired)
                self._digest = fingerprint(self._server.parameters_P)
                if found is not None:
                    self._check_restored(found)
                yield

    def _check_restored(self, found: Checkpoint) -> None:
        """A release that goes on from another model than it has released would pass it off as its own."""
        weights = digests(self._model())["weights"]
        try:
            self._ledger.check_restored(step=found.step - 1, result=self._digest, model={"weights": weights})
        except InputError as why:
            place = self._folder.checkpoints / name(found.step)
            raise InputError(f"{place} is not what the ledger knows of it: {why}") from None

    def _restore(self, found: Checkpoint) -> Mark:
        tensors = dict(found.optimiser)
        if self._turns is not None:
            if TURNS not in tensors:
                raise InputError("the checkpoint does not say how often clients were drawn: saved without a time line")
            self._turns.restore(tensors.pop(TURNS))
        if self._correlated is not None and not self._secure:
            self._correlated.restore(tensors.pop(NOISE), rows=found.state["noise_rows"])
        # Where the checkpoint's model is an average, the server's own parameters lie beside it.
        parameters_P = tensors.pop(PARAMETERS, None)
        if parameters_P is None:
            model = found.recogniser
            trained = model.parameters if model.part is None else model.part.trained
            parameters_P = self._layout.flatten({name: trained[name] for name in self._layout.names})
        self._server.restore(parameters_P, tensors)
        if self._plan.settings.adaptive is not None:
            self._plan = self._plan.with_clip_bound(found.state["clip_bound"])
        return Mark(**found.state["ledger"])

    def _over(self, ended: Ended) -> None:
        """Those who went on waiting need not."""
        if ended.reason != INTERRUPTED:
            self._end(ended.step)

    # One round.

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        self._interrupted = interrupted
        return lambda: interrupted() or self._stopped_elsewhere

    def step(self, step: int) -> None:
        if self._turns is not None and self._turns.all_dry:
            raise Stop("dry", "every client's time line is used up: all of their speech was used, once")
        try:
            is_ready = self._ready is None or self._ready(self._interrupted)
        except TooFewClients as too_few:
            if step == 0:
                raise InputError(str(too_few)) from None
            raise Stop(TOO_FEW, str(too_few)) from None
        if not is_ready:
            raise Stop(INTERRUPTED, "")
        begun = time.perf_counter()
        try:
            done = run_round(
                self._server,
                plan=self._plan,
                clients=self._clients,
                ledger=self._ledger,
                step=step,
                digest=self._digest,
                server_pass=self._server_pass,
                turns=self._turns,
                model_bits=self._settings.model_bits,
                correlated=self._correlated,
            )
        except BudgetSpent as spent:
            if step == 0:
                raise InputError(f"federation.privacy: not one round can be paid for: {spent}") from None
            raise Stop("budget", f"the privacy budget is spent: {spent}") from None
        except AttemptsUsed as used:
            if step == 0:
                raise InputError(f"not one round was finished: {used}; a new run asks them again") from None
            words = f"the run ends after {step:,} rounds: {used}; more rounds are a new run, with a new yes"
            raise Stop(ATTEMPTS, words) from None
        self._digest = fingerprint(self._server.parameters_P)
        self._pending.add(self._metrics(done, step), self._diagnostics(done, step))
        self._check_clients(done, step)
        if not self._secure:
            self._pending.time(time.perf_counter() - begun, done.private)
        self._plan, self._epsilon, self._stopped_elsewhere = done.plan, done.epsilon, done.interrupted
        self._measure_clients(step + 1)

    @property
    def _accepted(self) -> Mapping[str, int] | None:
        """How many attempts the people of a release over a network have accepted."""
        spare, measured = self._spare_attempts, self._settings.measured
        if spare is None or not self._secure:
            return None
        return {
            "attempts": self._settings.steps + spare,
            "client_wers": 0 if measured is None else measured.count + spare,
        }

    @property
    def _told_client_wer(self) -> Mapping[str, Any] | None:
        asked = self._settings.client_wer
        return None if asked is None or self._wer_plan is None else asked.in_ledger(self._wer_plan)

    def _measure_clients(self, rounds: int) -> None:
        """Where it is due: of the model as it stands now. What cannot be paid for is left out, and so is one that
        somebody does not want to wait for; ε of all of them is promised in any case."""
        asked, plan = self._settings.client_wer, self._wer_plan
        if asked is None or plan is None or not asked.is_due(rounds, steps=self._settings.steps):
            return
        assert self._listeners is not None
        try:
            is_ready = self._ready is None or self._ready(self._interrupted)
        except TooFewClients as too_few:
            self._say(f"round {rounds}: clients' WER is not measured: {too_few}")
            return
        if not is_ready:
            self._say(f"round {rounds}: stopped before clients' WER was measured; it is left out")
            return
        model_P = as_sent(self._server.result_P, self._settings.model_bits)
        try:
            found = measure_wer(
                model_P,
                layout=self._layout,
                plan=plan,
                listeners=self._listeners,
                ledger=self._ledger,
                step=rounds,
                digest=fingerprint(model_P),
            )
        except BudgetSpent as spent:
            self._say(f"round {rounds}: clients' WER is not measured, the privacy budget does not allow it: {spent}")
            return
        except AttemptsUsed as used:
            self._say(f"round {rounds}: clients' WER is not measured: {used}")
            return
        self._epsilon = found.epsilon
        self._pending.add_to_last({"epsilon": found.epsilon, **found.estimate.as_record()})

    def _metrics(self, done: Round, step: int) -> Record:
        """All of it came after the noise, or was known before the run."""
        names, server, place = self._layout.names, done.server, self._start.family.place
        record: Record = {
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
        if self._speech_used is not None:  # nothing is promised to anybody then
            record["speech_used"] = self._speech_used
        return record

    @property
    def _speech_used(self) -> float | None:
        return None if self._turns is None else self._turns.share_used

    def _diagnostics(self, done: Round, step: int) -> Record | None:
        if self._secure or done.private is None:
            return None
        return {"step": step + 1, "accounted": False, **done.private.as_json(self._plan)}

    def _check_clients(self, done: Round, step: int) -> None:
        """A round in which everybody failed is no one client's accident: stop before noise wears the model down.

        Not in a release: whether it stops would tell something of who was in the cohort. There the dev score shows it.
        Nor where clients may be away, which says nothing of what they were to do.
        """
        private = done.private
        if self._secure or private is None or self._ready is not None:
            return
        diverged = private.diverged
        failed = Counter({reason: count for reason, count in private.dropped.items() if reason != NOTHING_LEFT})
        if private.cohort and failed.total() + diverged == private.cohort:
            reasons = failed + Counter({"its update was not finite": diverged})
            reason = reasons.most_common(1)[0][0]
            raise InputError(f"round {step + 1}: every client of the cohort failed; the first reason: {reason}")

    # After some rounds.

    def settle(self, step: int, due: Due) -> list[Record]:
        """Commit to the ledger: from then on the rounds since the last commit may be told of."""
        metrics, diagnostics = self._pending.take()
        # Without new rounds the last commit still stands, and only an evaluation is made up for.
        if metrics:
            self._mark = self._ledger.commit(step=step - 1, result=self._digest, model=self._digests(step))
        else:
            self._mark = self._ledger.mark
        if diagnostics:
            self._folder.diagnostics.add(*diagnostics)
        return metrics

    def _digests(self, step: int) -> dict[str, str]:
        """Of the model that the checkpoint after `step` rounds will hold."""
        model = replace(self._model(), about={"recipe": self._recipe.about, "step": step, **self._about})
        frozen = {} if self._frozen_sha256 is None else {"frozen": self._frozen_sha256}
        return {**digests(model), **frozen}

    @property
    def _about(self) -> dict[str, Any]:
        return {"guarantee": self._guarantee}

    def evaluate(self) -> tuple[Score, Record]:
        model, (store, split) = self._model(), self._dev
        if self._measure is LOSS:
            score, besides = scored(self._team.mean_figures(model, store, split=split))
            return score, {**besides, **self._tested_along(model)}
        result = self._team.evaluate(model, store, split=split, by_ctc=self._measure is CTC_WER)
        besides = {**note_collapsed(result, self._say), **self._tested_along(model)}
        return Score(self._measure, result.wer), besides

    def _tested_along(self, model: Recogniser) -> Record:
        """The WER of whole test sets, where the recipe asks for it: to be looked at, never to choose by."""
        if not self._settings.test_along:
            return {}
        rates = {name: self._team.evaluate(model, s, split=split).wer for name, (s, split) in self._tests.items()}
        return {"test_wer": rates}

    def _model(self) -> Recogniser:
        trained = self._layout.views(self._server.result_P)
        part = None
        if self._frozen_digest is not None:
            part = TrainedPart(trained, self._frozen.scale, self._frozen_digest)
        return replace(self._start, parameters=self._frozen.merged(trained), part=part)

    def snapshot(self, standing: Mapping[str, Any]) -> Snapshot:
        state: dict[str, Any] = {
            "ledger": {"length": self._mark.length, "head": self._mark.head},
            **standing,
            "clip_bound": self._plan.clip_bound if self._plan.settings.adaptive is not None else None,
        }
        tensors = self._server.tensors()
        if self._turns is not None:
            tensors[TURNS] = self._turns.tensor()
        if self._correlated is not None and not self._secure:
            tensors[NOISE], state["noise_rows"] = self._correlated.memory_MP, self._correlated.rows
        if self._server.result_P is not self._server.parameters_P:
            tensors[PARAMETERS] = self._server.parameters_P
        return Snapshot(self._model(), tensors, state, about=self._about)

    def report(self, step: int, due: Due) -> Report:
        return Report(
            unit="round",
            step=step,
            steps=self._settings.steps,
            epsilon=self._epsilon,
            speech_used=self._speech_used,
        )


class _Pending:
    """Records of rounds that no commit covers yet."""

    def __init__(self) -> None:
        self._metrics: list[Record] = []
        self._diagnostics: list[Record] = []

    def add(self, metrics: Record, diagnostics: Record | None) -> None:
        self._metrics.append(metrics)
        if diagnostics is not None:
            self._diagnostics.append(diagnostics)

    def add_to_last(self, found: Record) -> None:
        """What else is known of the last round."""
        self._metrics[-1] |= found

    def time(self, seconds: float, private: Private | None) -> None:
        """How long the last round took. How long depends on who was in it: a simulation's only."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._metrics[-1]["seconds"] = round(seconds, 4)
        if private is not None:
            self._metrics[-1] |= {
                "audio_seconds_per_second": round(private.audio_seconds / max(seconds, 1e-9), 1),
                "waited_for_data_seconds": round(private.waited_seconds, 4),
            }
        self._metrics[-1]["memory_mib"] = round(memory, 1)
        if torch.cuda.is_available():
            self._metrics[-1]["device_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def take(self) -> tuple[list[Record], list[Record]]:
        taken = self._metrics, self._diagnostics
        self._metrics, self._diagnostics = [], []
        return taken
