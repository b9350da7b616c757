"""Central training: the seed of every federated run, and the yardstick it is measured against.

A run killed at any instant goes on from its last checkpoint with the same bits: every batch and every random choice
is a function of (seed, step), and the place in the data is part of the checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, replace
from typing import Any, final

import torch
from torch import Tensor

from sottovoce.audio.augment import add_noise, perturb_speed
from sottovoce.audio.batches import Piece
from sottovoce.config import Augmentation, Central, Recipe
from sottovoce.evaluation.losses import compute_mean_figures, select_speech
from sottovoce.evaluation.measures import CTC_WER, LOSS, Measure, Score, score_from_figures
from sottovoce.evaluation.prefetch import ahead
from sottovoce.evaluation.score import evaluate_recogniser
from sottovoce.federated.client import gradients_of
from sottovoce.flat.layout import Layout
from sottovoce.models.decoding import greedy
from sottovoce.models.family import Family, Progress, draw_steps, find_family, recordings_heard, sped_up, step_loss
from sottovoce.models.saved import Recogniser, adapt, check_parameters, fresh
from sottovoce.models.speech import Loaded, Place, Speech, endless_steps
from sottovoce.models.trainable import NOTHING_FROZEN, Frozen
from sottovoce.models.utterances import Recordings
from sottovoce.optimisers import Annealed
from sottovoce.optimisers.weights import Weights
from sottovoce.processes import ALONE, Processes
from sottovoce.seeds import torch_stream
from sottovoce.store import Store
from sottovoce.text.tokens import Tokens
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.keeper import Due, Ended, Loop, Pace, Record, Report, Say, Snapshot, keep, note_collapsed
from sottovoce.training.precision import precision
from sottovoce.training.repeatable import repeatable
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.step_log import StepLog


def train(
    recipe: Recipe,
    run: RunFolder,
    *,
    speech: Speech,
    dev: tuple[Store, str],
    measure: Measure,
    start: Recogniser,
    device: torch.device,
    processes: Processes = ALONE,
    on_report: Callable[[Report], None] = lambda _: None,
    say: Say = lambda _: None,
) -> Ended:
    """Train from `start`, or from the run's last checkpoint, and choose the best model by `measure` on `dev`."""
    central = recipe.training
    around: dict[str, Any] = {"device": device, "processes": processes, "say": say}
    loop = CentralLoop(recipe, speech=speech, dev=dev, start=start, measure=measure, **around)
    pace = Pace(
        steps=central.steps,
        evaluate_every=central.evaluate_every,
        checkpoint_every=central.checkpoint_every,
        log_every=central.log_every,
    )
    with repeatable(bool(central.repeatable), device):
        return keep(
            loop,
            run,
            recipe=recipe.about,
            tokens=start.tokens.digest,
            pace=pace,
            measure=measure,
            processes=processes,
            on_report=on_report,
            say=say,
        )


@final
class CentralLoop(Loop):
    """One model on one pile of data."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        speech: Speech,
        dev: tuple[Store, str],
        start: Recogniser,
        measure: Measure,
        device: torch.device,
        processes: Processes,
        say: Say,
    ) -> None:
        self._recipe, self._speech, self._dev, self._start, self._measure = recipe, speech, dev, start, measure
        self._device, self._processes, self._say = device, processes, say
        self._schedule = self._settings.built_schedule()
        self._weights = Weights(
            Layout.of(start.parameters),
            self._settings.built_optimiser(),
            device=device,
            dtype=precision(self._settings.precision, device),
            statistics=start.family.statistics(start.settings),
        )
        self._weights.load(start.parameters)
        self._family = sped_up(
            start.family,
            self._weights.working,
            settings=start.settings,
            steps=self._settings.steps * self._settings.batches_a_step,
            batch_seconds=self._settings.batch_seconds,
            device=device,
        )
        self._log = StepLog(self._weights.norm_names, place=start.family.place_apart or start.family.place)
        self._recorded: Record = {}
        self._annealed = Annealed()
        self._place = Place()
        self._steps: Iterator[Loaded] = iter(())

    @property
    def _settings(self) -> Central:
        return self._recipe.training

    @property
    def _model(self) -> Recogniser:
        return replace(self._start, family=self._family, parameters=self._weights.masters)

    @contextmanager
    def begun(self, found: Checkpoint | None) -> Iterator[None]:
        if found is not None:
            shapes = self._start.family.shapes(self._start.settings)
            check_parameters(found.recogniser.parameters, shapes, where=f"the checkpoint of step {found.step}")
            self._weights.load(found.recogniser.parameters)
            self._weights.restore_optimiser(found.optimiser)
            self._log.restore(found.state["log"])
            self._place = Place(**found.state["place"])
            self._annealed = Annealed(**found.state.get("newbob", {}))
        steps = endless_steps(
            self._speech,
            start=self._place,
            batches=self._settings.batches_a_step,
            max_seconds=self._settings.batch_seconds,
            max_utterances=self._settings.batch_utterances,
            ascending=self._settings.order == "ascending",
            seed=self._recipe.seed,
            device=self._device,
            rank=self._processes.rank,
            world=self._processes.world,
        )
        with closing(ahead(steps)) as self._steps:
            yield

    def _lr(self, step: int) -> float:
        return self._schedule(step) * self._annealed.scale

    def step(self, step: int) -> None:
        if self._settings.newbob is not None and step % self._settings.evaluate_every == 0:
            self._annealed = self._processes.share(self._annealed)  # the first process alone has evaluated
        epoch = self._place.epoch
        loaded = next(self._steps)
        self._place = loaded.following
        loss, norm, norms = train_step(
            self._weights,
            loaded.pieces,
            batches=self._settings.batches_a_step,
            augment=self._settings.augment,
            lr=self._lr(step),
            max_norm=self._settings.clip_gradients,
            family=self._family,
            settings=self._start.settings,
            chance=lambda piece: self._chance(step, piece),
            processes=self._processes,
            progress=Progress(step, epoch),
        )
        self._log.add(loss, norm, norms, audio_seconds=loaded.audio_seconds)

    def _chance(self, step: int, piece: Piece) -> torch.Generator:
        """What is drawn for a whole batch is the same in whichever process it is trained on."""
        part = () if piece.part is None else ("part", piece.part)
        return torch_stream(self._recipe.seed, "step", step, piece.number, *part)

    def watch(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        # Once a step and together: a process that stopped alone would leave the others waiting for its gradients.
        return lambda: self._processes.any(interrupted())

    def settle(self, step: int, due: Due) -> list[Record]:
        self._log.check(step=step)
        if not due.record:
            return []
        self._recorded = self._log.summary(lr=self._lr(step - 1), epoch=self._place.epoch)
        return [{"step": step, **self._recorded}]

    def evaluate(self) -> tuple[Score, Record]:
        score, besides = self._evaluate()
        if self._settings.newbob is not None:
            self._annealed = self._settings.newbob.after(self._annealed, score.value)
        return score, besides

    def _evaluate(self) -> tuple[Score, Record]:
        store, split = self._dev
        besides = self._log.norms_by_layer()
        if self._measure is LOSS:
            score, figures = score_from_figures(
                compute_mean_figures(self._model, select_speech(self._model, store, split=split), device=self._device)
            )
            return score, {**figures, **besides}
        decode = greedy if self._measure is CTC_WER else None
        result = evaluate_recogniser(self._model, store, split=split, device=self._device, decode=decode)
        return Score(self._measure, result.wer), {"dev_cer": result.cer, **note_collapsed(result, self._say), **besides}

    def paused(self) -> AbstractContextManager[None]:
        return self._log.paused()

    def snapshot(self, standing: Mapping[str, Any]) -> Snapshot:
        state = {"place": asdict(self._place), **standing, "log": self._log.state()}
        if self._settings.newbob is not None:
            state["newbob"] = asdict(self._annealed)
        return Snapshot(self._model, self._weights.optimiser_tensors(), state)

    def report(self, step: int, due: Due) -> Report | None:
        if not due.record:
            return None
        shown = {name: self._recorded[name] for name in ("loss", "audio_seconds_per_second")}
        return Report(unit="step", step=step, steps=self._settings.steps, **shown)


def train_step(
    weights: Weights,
    pieces: Sequence[tuple[Piece, Recordings]],
    *,
    augment: Augmentation,
    lr: float,
    max_norm: float,
    family: Family[Any, Any],
    settings: Any,
    chance: Callable[[Piece], torch.Generator],
    batches: int = 1,
    frozen: Frozen = NOTHING_FROZEN,
    processes: Processes = ALONE,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `weights` on the mean of so many `batches`, of which `pieces` are done here: the loss, the gradients'
    norm before clipping, and the norms by tensor."""

    def gradients(piece: Piece, recordings: Recordings) -> tuple[Tensor, Sequence[Tensor | None]]:
        generator = chance(piece)
        batch = _augment(recordings, augment, generator)
        (draws,) = draw_steps(
            family,
            [len(batch)],
            samples=[batch.lines_UN.shape[1]],
            settings=settings,
            spec_augment=augment.spec_augment,
            generator=generator,
            progress=None if progress is None else [progress],
            narrow_band=augment.narrow_band,
        )
        features = recordings_heard(family, batch, settings=settings)
        loss = step_loss(family, frozen.with_trained(weights.working), features, settings=settings, draws=draws)
        return loss.detach(), gradients_of(loss, list(weights.working.values()))

    if batches == 1 and not processes.several:
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
        processes.total(weights.gradient, loss)
        for tensor in (weights.gradient, loss):
            tensor.div_(batches)
    norm, norms = weights.step(lr=lr, max_norm=max_norm)
    return loss, norm, norms


def starting_point(recipe: Recipe, tokens: Tokens, seed: Recogniser | None, *, language: str) -> Recogniser:
    """Fresh parameters, or those of the model `seed` as far as they fit (`saved.adapt`)."""
    family, settings = find_family(recipe.model.family), recipe.model.settings(tokens=tokens.size + 1)
    generator = torch_stream(recipe.seed, "init")
    if seed is None:
        return fresh(family, settings, tokens, language=language, generator=generator)
    return Recogniser(
        family, settings, tokens, adapt(seed, settings, tokens, family=family, generator=generator), language
    )


def _augment(batch: Recordings, augment: Augmentation, generator: torch.Generator) -> Recordings:
    """Speed and noise, where the recipe asks for them."""
    device = batch.samples_N.device
    if augment.speeds:
        lengths_U = batch.lengths_U.to(device)
        lines_UN, lengths_U = perturb_speed(batch.lines_UN, lengths_U, generator=generator, speeds=augment.speeds)
        batch = batch.with_lines(lines_UN, lengths_U.cpu())
    if augment.noise is not None:
        lengths_U = batch.lengths_U.to(device)
        noisy_UN = add_noise(batch.lines_UN, lengths_U, settings=augment.noise, generator=generator)
        batch = batch.with_lines(noisy_UN, batch.lengths_U)
    return batch
