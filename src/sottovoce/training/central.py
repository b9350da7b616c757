"""Central training: the seed of every federated run, and the yardstick it is measured against.

A run killed at any instant goes on from its last checkpoint with the same bits: every batch and every random choice
is a function of (seed, step), and the place in the data is part of the checkpoint.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sottovoce.audio.augment import add_noise, perturb_speed
from sottovoce.config import Augmentation, Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.evaluate import evaluate
from sottovoce.evaluation.prefetch import ahead
from sottovoce.models.ctc_transformer import layer_index, parameter_kind
from sottovoce.models.recogniser import PLAIN, Compute, SpeechBatch, batch_loss, compiled, draw_step
from sottovoce.models.saved import Recogniser, adapt, fresh
from sottovoce.models.saved import load as load_recogniser
from sottovoce.seeds import torch_stream
from sottovoce.store import Store
from sottovoce.training.checkpoint import Checkpoint, load_latest, point, prune, save
from sottovoce.training.processes import ALONE, Processes
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.speech import Place, Speech, endless_batches
from sottovoce.training.weights import Weights


@dataclass(frozen=True)
class Report:
    """How far training has come, for whoever shows it."""

    step: int
    steps: int
    loss: float
    dev_wer: float | None
    audio_seconds_per_second: float


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
    central = recipe.central
    dtype, compute = _precision(recipe, device), _compute(recipe, device)
    weights = Weights(start.parameters, central.built_optimiser(), device=device, dtype=dtype)
    schedule, settings = central.built_schedule(), start.settings
    step, place, best_wer = 0, Place(), math.inf
    log = _Log(weights.norm_names)

    found, complaints = load_latest(run.checkpoints)
    for complaint in complaints:
        say(f"{complaint}; going back to the one before")
    if found is not None:
        step, place = found.step, Place(**found.state["place"])
        best_wer = found.state["best_wer"] if found.state["best_wer"] is not None else math.inf
        weights.load(found.recogniser.parameters)
        weights.restore_optimiser(found.optimiser)
        log.restore(found.state["log"])
    if processes.first:
        run.cut_metrics(after_step=step)
        prune(run.checkpoints, keep=_best_name(run))
    writer = _tensorboard(run, step) if processes.first else None

    batches = ahead(
        endless_batches(
            speech,
            start=place,
            max_seconds=central.batch_seconds,
            seed=recipe.seed,
            device=device,
            rank=processes.rank,
            world=processes.world,
        )
    )
    with _interruptible() as interrupted:
        while step < central.steps and not interrupted():
            place, batch = next(batches)
            generator = torch_stream(recipe.seed, "step", step, processes.rank)
            batch = _augmented(batch, central.augment, generator)
            spec_augment = central.augment.spec_augment
            draws = draw_step(batch, settings=settings, spec_augment=spec_augment, generator=generator)
            loss = batch_loss(
                weights.working, batch, settings=settings, spec_augment=spec_augment, draws=draws, compute=compute
            )
            weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
            processes.average(weights.gradients)
            norm, norms = weights.clip(central.clip_gradients)
            weights.step(lr=schedule(step))
            step += 1
            log.add(loss, norm, norms, audio_seconds=batch.audio_seconds * processes.world)

            record: dict[str, Any] = {}
            last = step == central.steps or interrupted()
            evaluates = step % central.evaluate_every == 0 or step == central.steps
            if step % central.log_every == 0 or evaluates or last:
                record |= log.summary(step, lr=schedule(step - 1), epoch=place.epoch)
            if evaluates and processes.first:
                model = replace(start, parameters=weights.masters)
                result = evaluate(model, dev[0], split=dev[1], device=device, compute=compute)
                record |= {"dev_wer": result.wer, "dev_cer": result.cer, "gradient_norms": log.by_layer()}
            if processes.first and record:
                record = {"step": step, **record}
                run.add_metrics(record)
                _to_tensorboard(writer, record)
                on_report(log.report(step, central.steps, record))
            if processes.first and (evaluates or last or step % central.checkpoint_every == 0):
                improved = record.get("dev_wer", math.inf) < best_wer
                best_wer = min(best_wer, record.get("dev_wer", math.inf))
                about = {"recipe": recipe.about, "step": step, "dev_wer": record.get("dev_wer")}
                state = {"place": asdict(place), "best_wer": best_wer if math.isfinite(best_wer) else None}
                state["log"] = log.state()
                model = replace(start, parameters=weights.masters, about=about)
                saved = save(run.checkpoints, Checkpoint(step, model, weights.optimiser_tensors(), state))
                if improved or not run.best.exists():
                    point(run.best, saved)
                prune(run.checkpoints, keep=_best_name(run))
    batches.close()  # type: ignore[attr-defined]  # a generator: its thread ends with it
    if writer is not None:
        writer.close()
    return step


def starting_point(recipe: Recipe, tokens: Any, *, language: str) -> Recogniser:
    """Fresh parameters, or those of another run's model; under another token set the output layer is new."""
    settings = recipe.model.settings(tokens=tokens.size + 1)
    generator = torch_stream(recipe.seed, "init")
    if recipe.central.start_from is None:
        return fresh(settings, tokens, language=language, generator=generator)
    seed = load_recogniser(recipe.central.start_from)
    return Recogniser(settings, tokens, adapt(seed, settings, tokens, generator=generator), language)


def _precision(recipe: Recipe, device: torch.device) -> torch.dtype:
    chosen = recipe.central.precision
    return torch.bfloat16 if chosen == "bfloat16" or (chosen == "auto" and device.type == "cuda") else torch.float32


def _compute(recipe: Recipe, device: torch.device) -> Compute:
    # Compiling takes some seconds: worth it for long runs on a GPU only.
    return compiled() if device.type == "cuda" and recipe.central.steps >= 2000 else PLAIN


def _augmented(batch: SpeechBatch, augment: Augmentation, generator: torch.Generator) -> SpeechBatch:
    """Speed and noise, where the recipe asks for them."""
    waveforms_BN, device = batch.waveforms_BN, batch.waveforms_BN.device
    if augment.speeds:
        lengths_B = batch.lengths_B.to(device)
        waveforms_BN, lengths_B = perturb_speed(waveforms_BN, lengths_B, generator=generator, speeds=augment.speeds)
        batch = replace(batch, waveforms_BN=waveforms_BN, lengths_B=lengths_B.cpu())
    if augment.noise is not None:
        lengths_B = batch.lengths_B.to(device)
        noisy_BN = add_noise(batch.waveforms_BN, lengths_B, settings=augment.noise, generator=generator)
        batch = replace(batch, waveforms_BN=noisy_BN)
    return batch


class _Log:
    """What happened since the last record; tensors stay on the device until a record is made."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._norms: Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._audio_seconds = 0.0
        self._since = time.monotonic()
        self._rate = 0.0

    def add(self, loss: Tensor, norm: Tensor, norms: Tensor, *, audio_seconds: float) -> None:
        self._losses.append(loss.detach())
        self._gradients.append(norm)
        self._norms = norms
        self._audio_seconds += audio_seconds

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps, so that the next record after a resume covers the same steps."""
        return {
            "losses": [float(loss) for loss in self._losses],
            "gradients": [float(norm) for norm in self._gradients],
        }

    def restore(self, state: Mapping[str, list[float]]) -> None:
        self._losses = [torch.tensor(loss) for loss in state["losses"]]
        self._gradients = [torch.tensor(norm) for norm in state["gradients"]]

    def summary(self, step: int, *, lr: float, epoch: int) -> dict[str, Any]:
        # On the host, where restored values lie too.
        loss = float(torch.tensor([float(loss) for loss in self._losses]).mean())
        norm = float(torch.tensor([float(norm) for norm in self._gradients]).mean())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise InputError(
                f"training diverged before step {step}: loss={loss}, gradient_norm={norm}; "
                "the last checkpoint is untouched; try a lower learning rate"
            )
        rate = self._audio_seconds / max(time.monotonic() - self._since, 1e-9)
        self._reset()
        self._rate = rate
        return {"loss": loss, "gradient_norm": norm, "lr": lr, "epoch": epoch, "audio_seconds_per_second": rate}

    def by_layer(self) -> dict[str, Any]:
        """The last step's gradient norms: per kind of parameter, a list over the layers where it has one."""
        assert self._norms is not None
        grouped: dict[str, dict[int | None, float]] = {}
        for name, norm in zip(self._names, self._norms.tolist(), strict=True):
            of_kind = grouped.setdefault(parameter_kind(name), {})
            layer = layer_index(name)
            of_kind[layer] = math.hypot(of_kind.get(layer, 0.0), norm)
        return {
            kind: [norms[layer] for layer in sorted(k for k in norms if k is not None)] or norms[None]
            for kind, norms in grouped.items()
        }

    def report(self, step: int, steps: int, record: Mapping[str, Any]) -> Report:
        return Report(step, steps, record.get("loss", math.nan), record.get("dev_wer"), self._rate)


def _best_name(run: RunFolder) -> set[str]:
    return {run.best.resolve().name} if run.best.exists() else set()


def _tensorboard(run: RunFolder, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)


def _to_tensorboard(writer: Any, record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        if name == "gradient_norms":
            for kind, norms in value.items():
                for layer, norm in enumerate(norms if isinstance(norms, list) else [norms]):
                    writer.add_scalar(f"gradient_norms/{kind}/{layer:02d}", norm, record["step"])
        elif name != "step":
            writer.add_scalar(name, value, record["step"])
    writer.flush()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within this scope SIGINT and SIGTERM only ask to stop: the step is finished and saved first."""
    asked = []
    old = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        old[number] = signal.signal(number, lambda *_: asked.append(True))
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
