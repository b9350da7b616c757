"""From waveforms to a loss: features, augmentation, the acoustic model and CTC, in one place for all who train.

    waveforms ─► log-mel ─► normalise ─► SpecAugment ─► ctc_transformer.forward ─► ctc.loss
                 └──────── inputs ─────────────────┘
                 └──── hear (once) ──┘                                             for speech that is trained on often

Shapes: B utterances, N samples, T frames, F mel features, U tokens, V tokens with the blank.

Central training, clients and evaluation all go through here, so they cannot drift apart. Lengths and tokens stay on
the host: nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.audio.augment import SpecAugmentSettings, apply_masks, draw_masks
from sottovoce.audio.batches import collate
from sottovoce.audio.features import frame_count, frame_lengths, log_mel, normalise
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.models import ctc
from sottovoce.models.ctc_transformer import Draws, Parameters, Settings, Stacking, draw_several, forward, run_blocks
from sottovoce.models.heard import Heard, HeardBatch, hear, padded_tokens
from sottovoce.models.packing import ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class SpeechBatch:
    """Padded utterances and their texts. `waveforms_BN` is on the compute device, everything else on the host."""

    waveforms_BN: Tensor
    lengths_B: Tensor
    tokens_BU: Tensor
    token_lengths_B: Tensor

    @property
    def audio_seconds(self) -> float:
        return float(self.lengths_B.sum()) / SAMPLE_RATE


def make_batch(
    samples: Sequence[NDArray[np.int16]],
    tokens: Sequence[Sequence[int]],
    *,
    padded_samples: int | None = None,
    device: torch.device | str = "cpu",
) -> SpeechBatch:
    """Collate utterances and their tokens, and send the waveforms on their way to `device`."""
    pin = torch.device(device).type == "cuda"
    waveforms_BN, lengths_B = collate(samples, padded_samples=padded_samples, pin_memory=pin)
    tokens_BU, token_lengths_B = padded_tokens(tokens)
    return SpeechBatch(waveforms_BN.to(device, non_blocking=True), lengths_B, tokens_BU, token_lengths_B)


@dataclass(frozen=True, slots=True)
class StepDraws:
    """All that chance decides in one training step: SpecAugment's masks and the model's own draws."""

    masks: Tensor | None
    model: Draws


def draw_step(
    batch: SpeechBatch,
    *,
    settings: Settings,
    spec_augment: SpecAugmentSettings | None,
    generator: torch.Generator,
) -> StepDraws:
    """Draw one step for `batch` from a generator on the host."""
    utterances, samples = batch.waveforms_BN.shape
    (drawn,) = draw_steps(
        [utterances], samples=[samples], settings=settings, spec_augment=spec_augment, generator=generator
    )
    return drawn


def draw_steps(
    utterances: Sequence[int],
    *,
    samples: Sequence[int],
    settings: Settings,
    spec_augment: SpecAugmentSettings | None,
    generator: torch.Generator,
) -> list[StepDraws]:
    """Draw several steps at once: of so many `utterances` each, padded to so many `samples`."""
    masks: Sequence[Tensor | None] = [None] * len(utterances)
    if spec_augment is not None:
        masks = torch.split(draw_masks(sum(utterances), settings=spec_augment, generator=generator), list(utterances))
    frames = [frame_count(count) for count in samples]
    models = draw_several(settings, batch_sizes=utterances, frames=frames, generator=generator)
    return [StepDraws(masks=own, model=model) for own, model in zip(masks, models, strict=True)]


def inputs(
    waveforms_BN: Tensor, lengths_B: Tensor, masks: Tensor | None, spec_augment: SpecAugmentSettings | None
) -> Tensor:
    """Normalised features, masked where `masks` (from `draw_step`) says so. All arguments are on the device."""
    features_BTF, frame_lengths_B = log_mel(waveforms_BN, lengths_B)
    features_BTF = normalise(features_BTF, frame_lengths_B)
    if masks is None or spec_augment is None:
        return features_BTF
    return apply_masks(features_BTF, frame_lengths_B, draws=masks, settings=spec_augment)


@dataclass(frozen=True, slots=True)
class Compute:
    """How the arithmetic runs: the functions that carry it, plain or otherwise, and what packed rows end on.

    `full_stacks`: every stack of clients is as high as the engine's size, with idle rows, so that few shapes occur.
    """

    inputs: Callable[..., Tensor] = inputs
    hear: Callable[..., Heard] = hear
    blocks: Callable[..., Tensor] = run_blocks
    row_multiple: int = ROW_MULTIPLE
    full_stacks: bool = False


PLAIN = Compute()


def log_probabilities(
    parameters: Parameters,
    batch: SpeechBatch | HeardBatch,
    *,
    settings: Settings,
    spec_augment: SpecAugmentSettings | None = None,
    draws: StepDraws | None = None,
    compute: Compute = PLAIN,
    stacking: Stacking | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T, V] and their lengths [B]: training with `draws`, evaluation without."""
    masks = None if draws is None else draws.masks
    with torch.no_grad():
        features_BTF = _features(batch, masks, spec_augment, compute)
    return forward(
        parameters,
        features_BTF,
        frame_lengths(batch.lengths_B),
        settings=settings,
        draws=None if draws is None else draws.model,
        blocks=compute.blocks,
        row_multiple=compute.row_multiple,
        stacking=stacking,
    )


def _features(
    batch: SpeechBatch | HeardBatch, masks: Tensor | None, spec_augment: SpecAugmentSettings | None, compute: Compute
) -> Tensor:
    if isinstance(batch, SpeechBatch):
        device = batch.waveforms_BN.device
        masks = None if masks is None else masks.to(device, non_blocking=True)
        return compute.inputs(batch.waveforms_BN, batch.lengths_B.to(device, non_blocking=True), masks, spec_augment)
    if masks is None or spec_augment is None:
        return batch.features_BTF
    lengths_B = frame_lengths(batch.lengths_B).to(batch.features_BTF.device, non_blocking=True)
    return apply_masks(batch.features_BTF, lengths_B, draws=masks, settings=spec_augment)


def batch_loss(
    parameters: Parameters,
    batch: SpeechBatch | HeardBatch,
    *,
    settings: Settings,
    spec_augment: SpecAugmentSettings | None = None,
    draws: StepDraws | None = None,
    compute: Compute = PLAIN,
) -> Tensor:
    """The mean CTC loss of `batch`."""
    log_probs_BTV, lengths_B = log_probabilities(
        parameters, batch, settings=settings, spec_augment=spec_augment, draws=draws, compute=compute
    )
    return ctc.loss(log_probs_BTV, lengths_B, batch.tokens_BU, batch.token_lengths_B)


def stacked_losses(
    parameters: Parameters,
    batch: SpeechBatch | HeardBatch,
    *,
    rows_U: Sequence[int],
    clients: int,
    settings: Settings,
    spec_augment: SpecAugmentSettings | None = None,
    draws: StepDraws | None = None,
    draws_by: Sequence[Draws | None] | None = None,
    compute: Compute = PLAIN,
) -> Tensor:
    """`batch_loss` of each of N `clients`, [N], from parameters with a leading client axis, or shared by all.

    `rows_U` is the client of each utterance, `draws_by` what each client has drawn for its model, where they train; a
    client without utterances has a loss of zero.
    """
    stacking = Stacking(rows_U, clients, draws_by)
    log_probs_UTV, lengths_U = log_probabilities(
        parameters, batch, settings=settings, spec_augment=spec_augment, draws=draws, compute=compute, stacking=stacking
    )
    return ctc.loss_by_row(
        log_probs_UTV, lengths_U, batch.tokens_BU, batch.token_lengths_B, rows_U=rows_U, rows=clients
    )
