"""Central training: the seed of every federated run, and the yardstick it is measured against.

A run killed at any instant goes on from its last checkpoint with the same bits: every batch and every random choice
is a function of (seed, step), and the place in the data is part of the checkpoint.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sottovoce.audio.augment import add_noise, perturb_speed
from sottovoce.config import Augmentation, Central, Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import evaluate
from sottovoce.evaluation.prefetch import ahead
from sottovoce.federated.client import gradients_of
from sottovoce.flat.layout import Layout
from sottovoce.interrupts import interruptible
from sottovoce.models.family import Family, draw_steps, find_family, recordings_heard, sped_up, step_loss
from sottovoce.models.saved import Recogniser, adapt, check_parameters, fresh
from sottovoce.models.speech import Place, Speech, endless_batches
from sottovoce.models.trainable import NOTHING_FROZEN, Frozen
from sottovoce.models.utterances import Recordings
from sottovoce.optimisers.weights import Weights
from sottovoce.processes import ALONE, Processes
from sottovoce.seeds import torch_stream
from sottovoce.store import Store
from sottovoce.text.tokens import Tokens
from sottovoce.training import checkpoint
from sottovoce.training.agreement import Sealed, agreeing, sealed_tensors
from sottovoce.training.checkpoint import Checkpoint
from sottovoce.training.precision import precision
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.step_log import Recorder, StepLog, recorder


@dataclass(frozen=True)
class Report:
    """How far training has come, for whoever shows it."""

    step: int
    steps: int
    loss: float
    dev_wer: float | None
    audio_seconds_per_second: float


@dataclass(frozen=True)
class _Standing:
    """Where a run stands between two steps. `best` names the checkpoint that `run.best` leads to."""

    step: int
    place: Place
    best: str | None
    best_wer: float | None


def train(
    recipe: Recipe,
    run: RunFolder,
    *,
    speech: Speech,
    dev: tuple[Store, str],
    start: Recogniser,
    device: torch.device,
    processes: Processes = ALONE,
    on_report: Callable[[Report], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Train from `start`, or from the run's last checkpoint; returns the step it stopped at (an interrupt stops early).

    After each evaluation `run.best` leads to the checkpoint with the lowest WER on `dev`.
    """
    central, schedule = recipe.training, recipe.training.built_schedule()
    weights = Weights(
        Layout.of(start.parameters),
        central.built_optimiser(),
        device=device,
        dtype=precision(central.precision, device),
    )
    weights.load(start.parameters)
    family = sped_up(
        start.family,
        weights.working,
        settings=start.settings,
        steps=central.steps,
        batch_seconds=central.batch_seconds,
        device=device,
    )
    log = StepLog(weights.norm_names, place=start.family.place)
    standing = _resumed(run, weights, log, start=start, processes=processes, say=say)
    batches = ahead(
        endless_batches(
            speech,
            start=standing.place,
            max_seconds=central.batch_seconds,
            seed=recipe.seed,
            device=device,
            rank=processes.rank,
            world=processes.world,
        )
    )
    # The first process alone evaluates and writes.
    writing: AbstractContextManager[Recorder | None] = nullcontext()
    if processes.first:
        writing = recorder(run, after_step=standing.step)
    with interruptible() as interrupted, closing(batches), writing as records:
        stops = False
        while standing.step < central.steps and not stops:
            place, batch = next(batches)
            loss, norm, norms = train_step(
                weights,
                batch,
                augment=central.augment,
                lr=schedule(standing.step),
                max_norm=central.clip_gradients,
                family=family,
                settings=start.settings,
                generator=torch_stream(recipe.seed, "step", standing.step, processes.rank),
                processes=processes,
            )
            log.add(loss, norm, norms, audio_seconds=batch.audio_seconds * processes.world)
            standing = replace(standing, step=standing.step + 1, place=place)
            # Once a step and together: a process that stopped alone would leave the others waiting for its gradients.
            stops = processes.any(interrupted())
            due = _due(central, step=standing.step, stops=stops)
            if due.record or due.save:
                log.check(step=standing.step)
            record: dict[str, Any] = {}
            if due.record:
                record = log.summary(lr=schedule(standing.step - 1), epoch=place.epoch)
            if records is None:
                continue
            model = replace(start, family=family, parameters=weights.masters)
            with log.paused():
                if due.evaluate:
                    result = evaluate(model, dev[0], split=dev[1], device=device)
                    record |= {"dev_wer": result.wer, "dev_cer": result.cer, "gradient_norms": log.norms_by_layer()}
                if record:
                    records.write({"step": standing.step, **record})
                    on_report(_report(standing.step, central.steps, record))
                if due.save:
                    standing = _saved(run, standing, model, weights, log, recipe=recipe, dev_wer=record.get("dev_wer"))
    return standing.step


@dataclass(frozen=True)
class _Due:
    """What there is to do after a step."""

    record: bool
    evaluate: bool
    save: bool


def _due(central: Central, *, step: int, stops: bool) -> _Due:
    last = step == central.steps or stops
    evaluates = step % central.evaluate_every == 0 or step == central.steps
    return _Due(
        record=evaluates or last or step % central.log_every == 0,
        evaluate=evaluates,
        save=evaluates or last or step % central.checkpoint_every == 0,
    )


def train_step(
    weights: Weights,
    batch: Recordings,
    *,
    augment: Augmentation,
    lr: float,
    max_norm: float,
    family: Family[Any, Any],
    settings: Any,
    generator: torch.Generator,
    frozen: Frozen = NOTHING_FROZEN,
    processes: Processes = ALONE,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `weights` on `batch`: the loss, the gradients' norm before clipping, and the norms by tensor."""
    batch = _augmented(batch, augment, generator)
    (draws,) = draw_steps(
        family,
        [len(batch)],
        samples=[batch.lines_UN.shape[1]],
        settings=settings,
        spec_augment=augment.spec_augment,
        generator=generator,
    )
    features = recordings_heard(family, batch, settings=settings)
    loss = step_loss(family, frozen.joined(weights.working), features, settings=settings, draws=draws)
    weights.set_gradients(gradients_of(loss, list(weights.working.values())))
    processes.average([weights.gradient])
    norm, norms = weights.step(lr=lr, max_norm=max_norm)
    return loss, norm, norms


def _resumed(
    run: RunFolder,
    weights: Weights,
    log: StepLog,
    *,
    start: Recogniser,
    processes: Processes,
    say: Callable[[str], None],
) -> _Standing:
    """Take over the run's newest whole checkpoint, if there is one, and put the folder's links in order."""
    with agreeing(processes) as facts:  # so all have read before the first one changes anything
        found, complaints = checkpoint.load_latest(run.checkpoints)
        if processes.several:
            facts["checkpoint"] = {"step": 0} if found is None else {"step": found.step, "content": _sealed(found)}
    if processes.first:
        for complaint in complaints:
            say(complaint)
        if complaints:
            say("going on from the one before" if found is not None else "no checkpoint is whole: starting anew")
    if found is None:
        return _Standing(step=0, place=Place(), best=None, best_wer=None)
    _check_same_model(found, start, where=str(run.checkpoints / checkpoint.name(found.step)))
    weights.load(found.recogniser.parameters)
    weights.restore_optimiser(found.optimiser)
    log.restore(found.state["log"])
    if processes.first:
        # A kill may have come between a checkpoint and the links to it.
        checkpoint.point(run.checkpoints / checkpoint.LATEST, run.checkpoints / checkpoint.name(found.step))
        checkpoint.point(run.best, run.checkpoints / found.best)
        checkpoint.prune(run.checkpoints, up_to=found.step)
    place = Place(**found.state["place"])
    return _Standing(found.step, place, best=found.best, best_wer=found.state["best_wer"])


def _sealed(found: Checkpoint) -> Sealed:
    return sealed_tensors({**found.recogniser.parameters, **{f"slot {name}": t for name, t in found.optimiser.items()}})


def _check_same_model(found: Checkpoint, start: Recogniser, *, where: str) -> None:
    if found.recogniser.tokens.digest != start.tokens.digest:
        raise InputError(f"{where}: a checkpoint of another token set")
    check_parameters(found.recogniser.parameters, start.family.shapes(start.settings), where=where)


def _saved(
    run: RunFolder,
    standing: _Standing,
    model: Recogniser,
    weights: Weights,
    log: StepLog,
    *,
    recipe: Recipe,
    dev_wer: float | None,
) -> _Standing:
    """Write a checkpoint, lead `run.best` to it if it is the best so far, and clear away what nobody needs."""
    best, best_wer = standing.best or checkpoint.name(standing.step), standing.best_wer
    if dev_wer is not None and (best_wer is None or dev_wer < best_wer):
        best, best_wer = checkpoint.name(standing.step), dev_wer
    model = replace(model, about={"recipe": recipe.about, "step": standing.step, "dev_wer": dev_wer})
    state = {"place": asdict(standing.place), "best_wer": best_wer, "log": log.state()}
    checkpoint.save(
        run.checkpoints, Checkpoint(standing.step, model, weights.optimiser_tensors(), best=best, state=state)
    )
    checkpoint.point(run.best, run.checkpoints / best)
    checkpoint.prune(run.checkpoints, up_to=standing.step)
    return replace(standing, best=best, best_wer=best_wer)


def _report(step: int, steps: int, record: Mapping[str, Any]) -> Report:
    return Report(step, steps, record["loss"], record.get("dev_wer"), record["audio_seconds_per_second"])


def starting_point(recipe: Recipe, tokens: Tokens, seed: Recogniser | None, *, language: str) -> Recogniser:
    """Fresh parameters, or those of the model `seed`; under another token set the output layer is new."""
    family, settings = find_family(recipe.model.family), recipe.model.settings(tokens=tokens.size + 1)
    generator = torch_stream(recipe.seed, "init")
    if seed is None:
        return fresh(family, settings, tokens, language=language, generator=generator)
    if seed.family.name != family.name:
        raise InputError(f"the model to start from is of family={seed.family.name}, expected {family.name}")
    return Recogniser(family, settings, tokens, adapt(seed, settings, tokens, generator=generator), language)


def _augmented(batch: Recordings, augment: Augmentation, generator: torch.Generator) -> Recordings:
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
