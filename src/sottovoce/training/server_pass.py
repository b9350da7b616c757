"""Training on the server's own data after every round (Gao et al. 2022): after the noise, so that it costs nothing.

    noised mean ─► server's step ─► some steps on public speech ─► average, next round

The first process alone does it, with the steps of central training. Its batches and draws follow from (seed, step), and
nothing survives a pass but the model: a resumed run repeats it to the bit.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, torch_stream
from sottovoce.config import Recipe, ServerPassSettings
from sottovoce.data.audio.batches import BatchPiece
from sottovoce.data.loading import (
    DataPosition,
    Speech,
    StepData,
    count_epoch_steps,
    iterate_steps,
    load_speech,
    prefetch,
)
from sottovoce.data.population import Population
from sottovoce.federated.round import AfterStep
from sottovoce.models.family import TrainingProgress, accelerate_family
from sottovoce.models.precision import choose_dtype
from sottovoce.models.recogniser import Recogniser
from sottovoce.optimisers.weights import Weights
from sottovoce.training.central import StepSettings, train_step
from sottovoce.training.disjointness import check_disjoint_recordings, check_disjoint_speakers
from sottovoce.training.run_data import SERVER_PASS, People
from sottovoce.training.start_model import split_trained_part


def build_server_pass(recipe: Recipe, start: Recogniser, speech: Speech, *, device: torch.device) -> AfterStep:
    """What the recipe's `server_pass` asks for, on public speech."""
    settings = recipe.federated.server_pass
    assert settings is not None
    part = split_trained_part(recipe, start)
    dtype = choose_dtype(recipe.federated.precision, device, family=start.family, settings=start.settings)
    frozen = part.frozen.to(device, dtype)
    weights = Weights(
        part.layout,
        settings.built_optimiser(),
        device=device,
        dtype=dtype,
        statistics=start.family.training.statistics(start.settings),
    )
    family = accelerate_family(
        start.family,
        None if frozen.tensors else weights.working,
        settings=start.settings,
        steps=recipe.federated.steps * _count_steps(speech, settings),
        batch_seconds=settings.batch_seconds,
        device=device,
    )

    common = StepSettings(
        augment=settings.augment,
        max_norm=settings.clip_gradients,
        family=family,
        settings=start.settings,
        frozen=frozen,
    )

    def train(server_P: Tensor, step: int) -> dict[str, float]:
        weights.reset(server_P)
        weights.hold(part.layout.held_at(step))
        figures, epoch = [], 0
        with closing(prefetch(_batches(speech, settings, seed=recipe.seed, step=step, device=device))) as batches:
            for number, loaded in enumerate(batches):
                chance = partial(_chance, recipe.seed, step, number)
                progress = TrainingProgress(number, epoch)  # of this pass, as a client counts its own
                loss, norm, _ = train_step(
                    weights, loaded.pieces, common, lr=settings.lr, chance=chance, progress=progress
                )
                epoch = loaded.following.epoch
                figures.append(torch.stack([loss.detach(), norm]))
        found = torch.stack(figures)
        if not bool(found.isfinite().all()):
            raise InputError(f"federation.server_pass diverged after round {step + 1}; try a lower learning rate")
        with torch.no_grad():
            server_P.copy_(weights.master)
        return {"server_pass_loss": float(found[:, 0].mean())}

    return train


def _chance(seed: int, step: int, number: int, _: BatchPiece) -> torch.Generator:
    return torch_stream(seed, "server pass", step, number)


def _batching(settings: ServerPassSettings) -> dict[str, Any]:
    return {
        "max_seconds": settings.batch_seconds,
        "max_utterances": settings.batch_utterances,
        "ascending": settings.order == "ascending",
    }


def _count_steps(speech: Speech, settings: ServerPassSettings) -> int:
    """Of one pass."""
    if settings.epochs is None:
        assert settings.steps is not None
        return settings.steps
    return settings.epochs * count_epoch_steps(speech.lengths, **_batching(settings))


def _batches(
    speech: Speech, settings: ServerPassSettings, *, seed: int, step: int, device: torch.device
) -> Iterator[StepData]:
    """So many steps, or epochs; where they are shuffled, the shuffle belongs to round `step`."""
    own = derive(seed, "server pass batches", step)
    endless = iterate_steps(speech, start=DataPosition(), seed=own, device=device, **_batching(settings))
    for number, loaded in enumerate(endless, start=1):
        yield loaded
        if number == settings.steps or loaded.following.epoch == settings.epochs:
            return


def load_public_speech(recipe: Recipe, start: Recogniser, population: Population, people: People) -> Speech:
    """What the pass trains on; InputError where any of the `population` is among its `people`, or it is empty."""
    settings = recipe.federated.server_pass
    assert settings is not None
    where = f"{SERVER_PASS}={settings.data}"
    check_disjoint_speakers(where, people.keys, population, instead="the server trains on people who are not")
    check_disjoint_recordings(where, people.store, people.rows, clients=population)
    longest = min(recipe.data.longest_seconds, settings.batch_seconds)
    return load_speech(
        people.store, people.rows, start.tokens, family=start.family, settings=start.settings, longest_seconds=longest
    )
