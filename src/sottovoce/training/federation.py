"""The loop of federated training: rounds, evaluated on people who are not clients, with every release in the ledger.

Killed at any instant, a run resumes from its last checkpoint. A simulation makes the lost rounds again with the same
cohorts, noise and bits, each step charged once; on a GPU, where bits do not repeat, it makes new attempts from its
seed. A release makes new attempts with new cohorts and new noise, and each attempt is charged.

Nothing of a step is written before the commit that covers it: its records wait in memory until then.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, final

from sottovoce.base.digests import safetensors_digest
from sottovoce.base.errors import InputError
from sottovoce.base.signatures import SigningKey
from sottovoce.config import FederationSettings, as_yaml
from sottovoce.evaluation.decoder import DecodingOptions
from sottovoce.evaluation.measures import CTC_WER, LOSS, Score, score_from_figures
from sottovoce.federated.bound_estimates import multiplier_deviations
from sottovoce.federated.client_stream import EXHAUSTED
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.ranks import ClientsOverRanks
from sottovoce.federated.round import Round, RoundState, run_round
from sottovoce.flat.layout import Layout
from sottovoce.models.model_files import FROZEN
from sottovoce.models.recogniser import Recogniser, TrainedPart, digest_recogniser, save_frozen
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.ledger import BudgetSpent, Ledger
from sottovoce.privacy.ledger_records import AttemptsUsed
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.training.assemble import Federation
from sottovoce.training.begun_rounds import BegunRounds
from sottovoce.training.checkpoint import NOISE, PARAMETERS, RECENT, TURNS, Checkpoint, checkpoint_name
from sottovoce.training.client_wer import ClientWerRounds
from sottovoce.training.engines import build_bound_estimator, build_turns
from sottovoce.training.loop import (
    INTERRUPTED,
    Due,
    Loop,
    LoopEnd,
    LoopSettings,
    ProgressReport,
    Snapshot,
    StopLoop,
    record_collapses,
    run_loop,
)
from sottovoce.training.records import PendingRecords, StepRecord, build_round_diagnostics, build_round_metrics
from sottovoce.training.remote_clients import ConnectedClients, TooFewClients
from sottovoce.training.run_folder import LEDGER, RunFolder
from sottovoce.training.testing import RankGroup

# Why a run ended early: clients accepted no more attempts; too few clients are left.
ATTEMPTS, TOO_FEW = "attempts", "too few clients"


@final
class FederatedLoop(Loop):
    """One federated run in its folder; `run` makes the rounds that are left."""

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        *,
        clients: LocalClients | ClientsOverRanks | ConnectedClients,
        ranks: RankGroup,
        inputs: Mapping[str, str],
        key: SigningKey | None = None,
    ) -> None:
        """`inputs` are digests of what the run reads, which the ledger binds it to; `key` signs that."""
        self._federation, self._folder, self._clients, self._ranks = federation, folder, clients, ranks
        self._recipe, self._start, self._key = federation.recipe, federation.start, key
        self._say = federation.context.say
        self._inputs = hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=16).hexdigest()
        plan, device = federation.plan, federation.context.device
        self._remote = None if isinstance(clients, LocalClients | ClientsOverRanks) else clients
        self._wers = ClientWerRounds(federation, self._remote)
        self._turns = build_turns(federation)
        self._bound = build_bound_estimator(federation)
        self._guarantee = self._settings.guarantee(plan)
        self._interrupted: Callable[[], bool] = lambda: False
        self._layout: Layout = plan.layout
        self._frozen = federation.part.frozen
        self._frozen_digest: str | None = None
        self._frozen_sha256: str | None = None
        self._plan, self._server = plan, federation.server()
        self._after_step = federation.after_step(self._server)
        secrets = folder.path / SECRETS if self._secure else None
        self._correlated = plan.correlated_noise(device=device, secret_folder=secrets)
        self._recent = federation.recent_models()
        self._begun: BegunRounds | None = None
        if self._remote is not None and (staleness := self._settings.staleness) is not None:
            steps, bits = self._settings.steps, self._settings.model_bits
            self._begun = BegunRounds(self._remote, staleness=staleness, steps=steps, model_bits=bits)
        self._pending = PendingRecords()
        self._epsilon: float | None = None
        self._rank_interrupted = False
        self._state: RoundState
        self._mark: Mark

    @property
    def _settings(self) -> FederationSettings:
        return self._recipe.federated

    @property
    def _repeatable(self) -> bool:
        """Attention on a GPU adds gradients in no fixed order, so that a lost round cannot be made again to the bit."""
        return self._server.parameters_P.device.type == "cpu"

    @property
    def _secure(self) -> bool:
        return self._federation.is_release

    def run(self) -> LoopEnd:
        """Make the rounds that are left."""
        settings = self._settings
        if self._frozen.tensors:  # before any checkpoint is read: they are parts of it
            self._frozen_digest = save_frozen(self._frozen, self._folder.path)
            self._frozen_sha256 = safetensors_digest(self._folder.path / FROZEN)
        loop_settings = LoopSettings(
            recipe=self._recipe.about,
            tokens=self._start.tokens.digest,
            measure=self._federation.measure,
            steps=settings.steps,
            evaluate_every=settings.evaluate_every,
            checkpoint_every=settings.checkpoint_every,
            evaluate_start=True,
            may_end_early=True,
            patience=settings.patience,
            tracking=None if self._secure else self._federation.context.tracking,
        )
        on_report = self._federation.context.on_report
        return run_loop(self, self._folder, loop_settings, on_report=on_report, say=self._say)

    @contextmanager
    def open(self, found: Checkpoint | None) -> Iterator[None]:
        with closing(self._clients):
            mark = None if found is None else self._restore(found)
            header = self._plan.ledger_header(
                run=self._recipe.about,
                inputs=self._inputs,
                repeatable=self._repeatable,
                central_steps=self._settings.steps,
                client_wer=self._wers.in_ledger,
                accepted=self._accepted,
                begun_ahead=None if self._begun is None else self._begun.staleness,
                recipe=hashlib.sha256(as_yaml(self._recipe).encode()).hexdigest(),
            )
            opened = Ledger(self._folder.path / LEDGER, header=header, checkpoint=mark, key=self._key)
            with closing(opened) as ledger:
                if ledger.repaired:
                    self._say(ledger.repaired)
                self._state = RoundState(self._server, self._plan, ledger, self._turns, self._correlated, self._recent)
                if found is not None:
                    self._check_restored(found)
                yield

    def _check_restored(self, found: Checkpoint) -> None:
        """A release that goes on from another model than it has released would pass it off as its own."""
        weights = digest_recogniser(self._model())["weights"]
        try:
            self._state.ledger.check_restored(
                step=found.step - 1, result=self._state.digest, model={"weights": weights}
            )
            # Over a network a step is charged when it begins, with the digest of the model that its cohort is sent.
            ahead = 0 if self._begun is None else self._begun.staleness
            for step, model_P in ({} if self._recent is None else self._recent.models(step=found.step)).items():
                self._state.ledger.check_parameters(step=step + ahead, parameters=fingerprint_tensor(model_P))
        except InputError as why:
            place = self._folder.checkpoints / checkpoint_name(found.step)
            raise InputError(f"{place} is not what the ledger knows of it: {why}") from None

    def _restore(self, found: Checkpoint) -> Mark:
        tensors = dict(found.optimiser)
        if self._turns is not None:
            if TURNS not in tensors:
                raise InputError("the checkpoint does not say how often clients were drawn: saved without a time line")
            self._turns.restore(tensors.pop(TURNS))
        if self._correlated is not None and not self._secure:
            self._correlated.restore(tensors.pop(NOISE), rows=found.state["noise_rows"])
        if self._recent is not None:
            if RECENT not in tensors:
                raise InputError("the checkpoint has no earlier models: it was saved without staleness")
            self._recent.restore(tensors.pop(RECENT), step=found.step, device=self._server.parameters_P.device)
        # Where the checkpoint's model is an average, the server's own parameters lie beside it.
        parameters_P = tensors.pop(PARAMETERS, None)
        if parameters_P is None:
            model = found.recogniser
            trained = model.parameters if model.part is None else model.part.trained
            parameters_P = self._layout.flatten(
                {checkpoint_name: trained[checkpoint_name] for checkpoint_name in self._layout.names}
            )
        self._server.restore(parameters_P, tensors)
        if self._plan.settings.adaptive is not None:
            self._plan = self._plan.with_clip_bound(found.state["clip_bound"])
        return Mark(**found.state["ledger"])

    def end(self, ended: LoopEnd) -> None:
        if ended.reason != INTERRUPTED and self._remote is not None:
            self._remote.end(ended.step)

    # One round.

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        self._interrupted = interrupted
        return lambda: interrupted() or self._rank_interrupted

    def step(self, step: int) -> None:
        if self._turns is not None and self._turns.all_exhausted:
            raise StopLoop("dry", "every client's time line is used up: all of their speech was used, once")
        try:
            if not self._ready(step):
                raise StopLoop(INTERRUPTED, "")
            self._make_round(step)
        except TooFewClients as too_few:
            if step == 0:
                raise InputError(str(too_few)) from None
            raise StopLoop(TOO_FEW, str(too_few)) from None
        except BudgetSpent as spent:
            if step == 0:
                raise InputError(f"federation.privacy: not one round can be paid for: {spent}") from None
            raise StopLoop("budget", f"the privacy budget is spent: {spent}") from None
        except AttemptsUsed as used:
            if step == 0:
                raise InputError(f"not one round was finished: {used}; a new run asks them again") from None
            words = f"the run ends after {step:,} rounds: {used}; more rounds are a new run, with a new yes"
            raise StopLoop(ATTEMPTS, words) from None
        if (found := self._wers.measure(self._state, step + 1, interrupted=self._interrupted)) is not None:
            self._epsilon = found.epsilon
            self._pending.add_to_last({"epsilon": found.epsilon, **found.estimate.as_record()})

    def _ready(self, step: int) -> bool:
        """Wait for clients over a network; where rounds overlap they have begun then. False: interrupted meanwhile."""
        if self._begun is not None:
            return self._begun.begin(self._state, step=step, interrupted=self._interrupted)
        row = None if self._correlated is None else self._state.ledger.next_row(step)
        return self._remote is None or self._remote.ready(self._interrupted, row=row)

    def _make_round(self, step: int) -> None:
        bound = None if self._bound is None else self._bound.measure(self._server.parameters_P, step=step)
        begun, plan = time.perf_counter(), self._state.plan
        done = run_round(
            self._state,
            self._clients,
            step=step,
            after_step=self._after_step,
            model_bits=self._settings.model_bits,
            begun=None if self._begun is None else self._begun.next(),
        )
        metrics = build_round_metrics(done, step, plan=plan, place=self._start.family.place)
        if self._speech_used is not None:  # nothing is promised to anybody then
            metrics["speech_used"] = self._speech_used
        self._pending.add(metrics, None if self._secure else build_round_diagnostics(done, step, plan=plan))
        if bound is not None:
            multipliers = self._server.multipliers(done.server)
            assert multipliers is not None
            deviations = multiplier_deviations(multipliers, plan.clipper.layers)
            self._pending.add_to_diagnostics({"bound": {**bound, "trust_deviations": deviations}})
        self._check_clients(done, step)
        if not self._secure:
            self._pending.time(time.perf_counter() - begun, done.private)
        self._epsilon, self._rank_interrupted = done.epsilon, done.interrupted

    @property
    def _accepted(self) -> Mapping[str, int] | None:
        """How many attempts the people of a release over a network have accepted."""
        remote, measured = self._federation.remote, self._settings.measured
        spare = None if remote is None else remote.spare_attempts
        if spare is None or not self._secure:
            return None
        return {
            "attempts": self._settings.steps + spare,
            "client_wers": 0 if measured is None else measured.count + spare,
        }

    @property
    def _speech_used(self) -> float | None:
        return None if self._turns is None else self._turns.share_used

    def _check_clients(self, done: Round, step: int) -> None:
        """A round in which everybody failed is no one client's accident: stop before noise wears the model down.

        Not in a release, where stopping would depend on who was in the cohort. There the dev score shows it.
        Nor where clients may be away, which says nothing of what they were to do.
        """
        private = done.private
        if self._secure or private is None or self._remote is not None:
            return
        diverged = private.diverged
        failed = Counter({reason: count for reason, count in private.dropped.items() if reason != EXHAUSTED})
        if private.cohort and failed.total() + diverged == private.cohort:
            reasons = failed + Counter({"its update was not finite": diverged})
            reason = reasons.most_common(1)[0][0]
            raise InputError(f"round {step + 1}: every client of the cohort failed; the first reason: {reason}")

    # After some rounds.

    def commit(self, step: int, due: Due) -> list[StepRecord]:
        """Commit to the ledger: from then on the rounds since the last commit may be written."""
        metrics, diagnostics = self._pending.take()
        # Without new rounds the last commit still stands, and only an evaluation is made up for.
        if metrics:
            self._mark = self._state.ledger.commit(step=step - 1, result=self._state.digest, model=self._digests(step))
        else:
            self._mark = self._state.ledger.mark
        if diagnostics:
            self._folder.diagnostics.add(*diagnostics)
        return metrics

    def _digests(self, step: int) -> dict[str, str]:
        """Of the model that the checkpoint after `step` rounds will hold."""
        model = replace(self._model(), about={"recipe": self._recipe.about, "step": step, **self._about})
        frozen = {} if self._frozen_sha256 is None else {"frozen": self._frozen_sha256}
        return {**digest_recogniser(model), **frozen}

    @property
    def _about(self) -> dict[str, Any]:
        return {"guarantee": self._guarantee}

    def evaluate(self) -> tuple[Score, StepRecord]:
        model, (store, split), measure = self._model(), self._federation.data.dev, self._federation.measure
        if measure is LOSS:
            score, figures = score_from_figures(self._ranks.mean_figures(model, store, split=split))
            return score, {**figures, **self._score_tests(model)}
        result = self._ranks.evaluate(model, store, split=split, decoding=DecodingOptions(by_ctc=measure is CTC_WER))
        figures = {**record_collapses(result, self._say), **self._score_tests(model)}
        return Score(measure, result.wer), figures

    def _score_tests(self, model: Recogniser) -> StepRecord:
        """The WER of whole test sets, where the recipe asks for it: to be looked at, never to choose by."""
        if not self._settings.test_along:
            return {}
        tests = self._federation.data.tests
        rates = {
            checkpoint_name: self._ranks.evaluate(model, s, split=split, decoding=self._recipe.decoding).wer
            for checkpoint_name, (s, split) in tests.items()
        }
        return {"test_wer": rates}

    def _model(self) -> Recogniser:
        trained = self._layout.views(self._server.result_P)
        part = None
        if self._frozen_digest is not None:
            part = TrainedPart(trained, self._frozen.scale, self._frozen_digest)
        return replace(self._start, parameters=self._frozen.merged(trained), part=part)

    def snapshot(self, progress: Mapping[str, Any]) -> Snapshot:
        state: dict[str, Any] = {
            "ledger": {"length": self._mark.length, "head": self._mark.head},
            **progress,
            "clip_bound": None if self._plan.settings.adaptive is None else self._state.plan.clip_bound,
        }
        tensors = self._server.tensors()
        if self._turns is not None:
            tensors[TURNS] = self._turns.tensor()
        if self._correlated is not None and not self._secure:
            tensors[NOISE], state["noise_rows"] = self._correlated.memory_MP, self._correlated.rows
        if self._recent is not None:
            tensors[RECENT] = self._recent.tensor()
        if self._server.result_P is not self._server.parameters_P:
            tensors[PARAMETERS] = self._server.parameters_P
        return Snapshot(self._model(), tensors, state, about=self._about)

    def report(self, step: int, due: Due) -> ProgressReport:
        return ProgressReport(
            unit="round",
            step=step,
            steps=self._settings.steps,
            epsilon=self._epsilon,
            speech_used=self._speech_used,
        )
