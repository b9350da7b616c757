"""Central training: of the seed model of federated runs, and of what they are compared with.

A run killed at any instant resumes from its last checkpoint with the same bits: every batch and every random choice
is a function of (seed, step), and the place in the data is part of the checkpoint.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.processes import ALONE, Processes
from sottovoce.base.seeds import torch_stream
from sottovoce.config import Augmentation, CentralSettings, CentralSteps, Recipe
from sottovoce.data.audio.batches import BatchPiece
from sottovoce.data.audio.time_domain import augment_waveforms
from sottovoce.data.audio.waveforms import Waveforms
from sottovoce.data.loading import DataPosition, Speech, StepData, iterate_steps, prefetch
from sottovoce.evaluation.converged import judge_metrics
from sottovoce.evaluation.losses import compute_mean_figures, select_speech
from sottovoce.evaluation.measures import CTC_WER, LOSS, Measure, Score, score_from_figures
from sottovoce.evaluation.score import evaluate_recogniser
from sottovoce.federated.client import gradients_of
from sottovoce.flat.layout import Layout
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.family import (
    Family,
    TrainingProgress,
    accelerate_family,
    draw_steps,
    extract_float32_features,
    step_loss,
)
from sottovoce.models.precision import choose_dtype
from sottovoce.models.recogniser import Recogniser, TrainedPart, check_parameters, describe_inherited, save_frozen
from sottovoce.models.recogniser import load_recogniser as load_recogniser
from sottovoce.models.trainable import NOTHING_FROZEN, Frozen, Trainable
from sottovoce.optimisers import Annealed
from sottovoce.optimisers.weights import Weights
from sottovoce.training.agreement import HiddenDigest, digest_parts, digest_tensors, require_equal_across_ranks
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.loop import (
    INTERRUPTED,
    Due,
    Loop,
    LoopEnd,
    LoopSettings,
    ProgressReport,
    Snapshot,
    record_collapses,
    run_loop,
)
from sottovoce.training.parent_model import find_parent_model
from sottovoce.training.records import StepLog, StepRecord
from sottovoce.training.run_context import (
    Outcome,
    RunContext,
    RunTarget,
    deterministic_kernels,
    read_finished,
    write_results,
)
from sottovoce.training.run_data import RunData, count_central_steps, load_training_speech
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.start_model import (
    check_trained_part,
    describe_base_model,
    init_start_model,
    split_trained_part,
)
from sottovoce.training.testing import RankGroup, choose_measure, describe_decoding, score_models
from sottovoce.training.tokens import choose_tokens, load_taken_tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class CentralTraining:
    """What central training is made of, before its first step.

    `part` is what of `start` is trained; `measure` chooses the best model on the dev speakers.
    """

    recipe: Recipe
    data: RunData
    speech: Speech
    start: Recogniser
    part: Trainable
    measure: Measure
    steps: CentralSteps


@final
class CentralLoop(Loop):
    """One model on one pile of data."""

    def __init__(self, training: CentralTraining, *, context: RunContext, processes: Processes = ALONE) -> None:
        self._training, self._context, self._processes = training, context, processes
        self._recipe, self._start, device = training.recipe, training.start, context.device
        self._schedule = self._settings.built_schedule()
        self._part = training.part
        dtype = choose_dtype(self._settings.precision, device, family=self._start.family, settings=self._start.settings)
        self._frozen_digest: str | None = None
        self._weights = Weights(
            Layout.of(self._part.initial),
            self._settings.built_optimiser(),
            device=device,
            dtype=dtype,
            statistics=self._start.family.training.statistics(self._start.settings),
        )
        self._weights.load(self._part.initial)
        self._family = accelerate_family(
            self._start.family,
            None if self._part.frozen.tensors else self._weights.working,
            settings=self._start.settings,
            steps=training.steps.steps * self._settings.batches_a_step,
            batch_seconds=self._settings.batch_seconds,
            device=device,
        )
        self._step_settings = StepSettings(
            augment=self._settings.augment,
            max_norm=self._settings.clip_gradients,
            family=self._family,
            settings=self._start.settings,
            batches=self._settings.batches_a_step,
            frozen=self._part.frozen.to(device, dtype),
            processes=processes,
        )
        place = self._start.family.presentation.fine_place or self._start.family.place
        self._log = StepLog(self._weights.norm_names, place=place)
        self._recorded: StepRecord = {}
        self._annealed = Annealed()
        self._place = DataPosition()
        self._steps: Iterator[StepData] = iter(())

    @property
    def _settings(self) -> CentralSettings:
        return self._recipe.training

    @property
    def _model(self) -> Recogniser:
        masters, part = self._weights.masters, None
        if self._frozen_digest is not None:
            part = TrainedPart(masters, self._part.frozen.scale, self._frozen_digest)
        whole = self._part.frozen.merged(masters)
        return replace(self._start, family=self._family, parameters=whole, part=part)

    def keep_frozen(self, run: RunFolder) -> None:
        """Write what is not trained into the run's folder, once for all checkpoints."""
        if self._part.frozen.tensors:
            self._frozen_digest = save_frozen(self._part.frozen, run.path)

    @contextmanager
    def open(self, found: Checkpoint | None) -> Iterator[None]:
        if found is not None:
            held = found.recogniser.parameters if found.recogniser.part is None else found.recogniser.part.trained
            shapes = {name: tuple(tensor.shape) for name, tensor in self._part.initial.items()}
            check_parameters(held, shapes, where=f"the checkpoint of step {found.step}")
            self._weights.load(held)
            self._weights.restore_optimiser(found.optimiser)
            self._log.restore(found.state["log"])
            self._place = DataPosition(**found.state["place"])
            self._annealed = Annealed(**found.state.get("newbob", {}))
        steps = iterate_steps(
            self._training.speech,
            start=self._place,
            batches=self._settings.batches_a_step,
            max_seconds=self._settings.batch_seconds,
            max_utterances=self._settings.batch_utterances,
            ascending=self._settings.order == "ascending",
            seed=self._recipe.seed,
            device=self._context.device,
            rank=self._processes.rank,
            world=self._processes.world,
        )
        with closing(prefetch(steps)) as self._steps:
            yield

    def _lr(self, step: int) -> float:
        return self._schedule(step) * self._annealed.scale

    def step(self, step: int) -> None:
        if self._settings.newbob is not None and step % self._training.steps.evaluate_every == 0:
            self._annealed = self._processes.broadcast_object(self._annealed)  # the first process alone has evaluated
        epoch = self._place.epoch
        loaded = next(self._steps)
        self._place = loaded.following
        loss, norm, norms = train_step(
            self._weights,
            loaded.pieces,
            self._step_settings,
            lr=self._lr(step),
            chance=lambda piece: self._chance(step, piece),
            progress=TrainingProgress(step, epoch),
        )
        self._log.add(loss, norm, norms, audio_seconds=loaded.audio_seconds)

    def _chance(self, step: int, piece: BatchPiece) -> torch.Generator:
        """What is drawn for a whole batch is the same in whichever process it is trained on."""
        part = () if piece.part is None else ("part", piece.part)
        return torch_stream(self._recipe.seed, "step", step, piece.number, *part)

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        # Once a step and together: a process that stopped alone would leave the others waiting for its gradients.
        return lambda: self._processes.any(interrupted())

    def commit(self, step: int, due: Due) -> list[StepRecord]:
        self._log.check(step=step)
        if not due.record:
            return []
        self._recorded = self._log.summary(lr=self._lr(step - 1), epoch=self._place.epoch)
        return [{"step": step, **self._recorded}]

    def evaluate(self) -> tuple[Score, StepRecord]:
        (store, split), measure, device = self._training.data.dev, self._training.measure, self._context.device
        figures: StepRecord
        found: dict[str, float] = {}
        if measure is LOSS or self._settings.newbob is not None:
            speech = select_speech(self._model, store, split=split)
            found = compute_mean_figures(self._model, speech, device=device)
        if measure is LOSS:
            score, figures = score_from_figures(found)
        else:
            decode = decode_greedily if measure is CTC_WER else None
            result = evaluate_recogniser(self._model, store, split=split, device=device, decode=decode)
            own = {f"dev_{name}": value if math.isfinite(value) else None for name, value in found.items()}
            collapses = record_collapses(result, self._context.say)
            score, figures = Score(measure, result.wer), {"dev_cer": result.cer, **own, **collapses}
        if self._settings.newbob is not None:
            # By the loss, as SpeechBrain does, whatever the best model is chosen by.
            validated = found.get(self._start.family.inspection.validation, found["loss"])
            self._annealed = self._settings.newbob.after(self._annealed, validated)
        return score, {**figures, **self._log.norms_by_layer()}

    def paused(self) -> AbstractContextManager[None]:
        return self._log.paused()

    def snapshot(self, progress: Mapping[str, Any]) -> Snapshot:
        state = {"place": asdict(self._place), **progress, "log": self._log.state()}
        if self._settings.newbob is not None:
            state["newbob"] = asdict(self._annealed)
        return Snapshot(self._model, self._weights.optimiser_tensors(), state)

    def report(self, step: int, due: Due) -> ProgressReport | None:
        if not due.record:
            return None
        shown = {name: self._recorded[name] for name in ("loss", "audio_seconds_per_second")}
        return ProgressReport(unit="step", step=step, steps=self._training.steps.steps, **shown)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepSettings:
    """What all steps of a training have in common; a step is the mean of so many `batches`."""

    augment: Augmentation
    max_norm: float
    family: Family[Any, Any]
    settings: Any
    batches: int = 1
    frozen: Frozen = NOTHING_FROZEN
    processes: Processes = ALONE


def train_step(
    weights: Weights,
    pieces: Sequence[tuple[BatchPiece, Waveforms]],
    common: StepSettings,
    *,
    lr: float,
    chance: Callable[[BatchPiece], torch.Generator],
    progress: TrainingProgress | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `weights`, of whose batches `pieces` are computed here.

    Returns the loss, the gradient's norm before clipping, and the norms by tensor.
    """
    augment, family, settings, processes = common.augment, common.family, common.settings, common.processes

    def gradients(piece: BatchPiece, recordings: Waveforms) -> tuple[Tensor, Sequence[Tensor | None]]:
        generator = chance(piece)
        batch = augment_waveforms(
            recordings,
            speeds=augment.speeds,
            noise=augment.noise,
            dropped_frequencies=augment.dropped_frequencies,
            dropped_chunks=augment.dropped_chunks,
            generator=generator,
        )
        (draws,) = draw_steps(
            family,
            [len(batch)],
            samples=[batch.padded_UN.shape[1]],
            settings=settings,
            spec_augment=augment.spec_augment,
            generator=generator,
            progress=None if progress is None else [progress],
            narrow_band=augment.narrow_band,
        )
        parameters = common.frozen.with_trained(weights.working)
        features = extract_float32_features(family, batch, settings=settings)
        loss = step_loss(family, parameters, features, settings=settings, draws=draws)
        return loss.detach(), gradients_of(loss, list(weights.working.values()))

    if common.batches == 1 and not processes.is_distributed:
        ((piece, recordings),) = pieces
        loss, found = gradients(piece, recordings)
        weights.set_gradients(found)
    else:
        loss = weights.master.new_zeros(())

        def weighted() -> Iterator[tuple[float, Sequence[Tensor | None]]]:
            for piece, recordings in pieces:
                own, found = gradients(piece, recordings)
                loss.add_(own, alpha=piece.weight)
                yield piece.weight, found

        weights.sum_gradients(weighted())
        processes.all_reduce(weights.gradient, loss)
        for tensor in (weights.gradient, loss):
            tensor.div_(common.batches)
    norm, norms = weights.step(lr=lr, max_norm=common.max_norm)
    return loss, norm, norms


def run_central(recipe: Recipe, target: RunTarget, *, context: RunContext, processes: Processes) -> Outcome:
    """Train centrally, from its parent where it has one, and test the best model."""
    with require_equal_across_ranks(processes) as facts:
        data = RunData.of(recipe, context.stores)
        facts |= data.facts()
        training = _assemble_central(recipe, data, context)
        speech, start = training.speech, training.start
        facts |= {
            "tokens": HiddenDigest(start.tokens.digest),
            "training set": digest_parts(speech.rows.tobytes(), speech.lengths.tobytes()),
            "start model": digest_tensors(start.parameters),
        }
    inputs = {**data.digests(), "tokens digest": start.tokens.digest, "number of processes": processes.world}
    inputs |= describe_base_model(start)
    if (steps := training.steps).epoch_steps is not None:  # they follow from the data; for whoever reads the run
        inputs |= {"steps": steps.steps, "steps in an epoch": steps.epoch_steps}
    with target.open(recipe, inputs=inputs, processes=processes) as run:
        if (known := read_finished(run, processes)) is not None:
            return known
        ended = _train(training, run, context, processes)
        if not processes.is_first:
            return Outcome(target.out)
        if ended.reason == INTERRUPTED:
            return Outcome(target.out, stopped_at=ended.step)
        if ended.words:
            context.say(ended.words)
        best = load_recogniser(run.best)
        ranks = RankGroup.of(ALONE, best, data, context.device)
        (tested,) = score_models([best], recipe, data.tests, ranks)
        about = dict(best.about)
        judged = judge_metrics(run.metrics.read(), about, last_step=ended.step)
        how = {"ended": ended.as_json(), "converged": judged}
        return write_results(run, {"model": about, **how, "test": tested, **describe_decoding(recipe)})


def _assemble_central(recipe: Recipe, data: RunData, context: RunContext) -> CentralTraining:
    """The training set, start model and measure of a recipe for central training."""
    parent = find_parent_model(recipe, runs=context.runs)
    found = None if parent is None else parent.load()
    tokens = choose_tokens(recipe, data.store, parent=found, taken=load_taken_tokens(recipe, runs=context.runs))
    start = init_start_model(recipe, tokens, found, language=data.store.language)
    if found is not None and found.family is not start.family:
        context.say(describe_inherited(start, found))
    speech = load_training_speech(recipe, data.store, start)
    context.say(f"training on {speech}")
    measure = choose_measure(recipe, start, data, say=context.say)
    part = split_trained_part(recipe, start)
    if part.held:
        raise InputError("LoRA's factors=alternate and project are about rounds of a federation; expected both or b")
    check_trained_part(start, part)
    return CentralTraining(
        recipe=recipe,
        data=data,
        speech=speech,
        start=start,
        part=part,
        measure=measure,
        steps=count_central_steps(recipe.training, speech),
    )


def _train(training: CentralTraining, run: RunFolder, context: RunContext, processes: Processes) -> LoopEnd:
    """Train from the start model, or from the run's last checkpoint."""
    central, steps = training.recipe.training, training.steps
    settings = LoopSettings(
        recipe=training.recipe.about,
        tokens=training.start.tokens.digest,
        measure=training.measure,
        steps=steps.steps,
        evaluate_every=steps.evaluate_every,
        checkpoint_every=steps.checkpoint_every,
        log_every=central.log_every,
        may_end_early=central.patience is not None,
        patience=central.patience,
        tracking=context.tracking,
    )
    loop = CentralLoop(training, context=context, processes=processes)
    if processes.is_first:
        loop.keep_frozen(run)
    with deterministic_kernels(bool(central.repeatable), context.device):
        return run_loop(loop, run, settings, processes=processes, on_report=context.on_report, say=context.say)
