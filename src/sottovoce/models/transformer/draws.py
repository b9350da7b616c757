"""What chance decides in a training step of the CTC transformer, for one model and for stacked clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sottovoce.models.transformer.positions import PositionDraws, draw_positions
from sottovoce.models.transformer.settings import STRIDE, Settings


@dataclass(frozen=True, slots=True)
class Draws:
    """What chance decides in one training step: which blocks run, how positions move, the seed of the dropout.

    There is no one seed where a step of stacked clients is drawn: each has its own (`ClientRows`).
    """

    kept: tuple[int, ...]
    positions: PositionDraws | None
    dropout_seed: int | None


def draw_several(settings: Settings, *, batch_sizes: Sequence[int], generator: torch.Generator) -> list[Draws]:
    """Draw training steps of so many utterances each, on the host.

    Each block is left out of a step with probability `layer_drop`, for the whole batch. Nothing is rescaled for it.
    """
    steps = len(batch_sizes)
    kept = draw_kept(settings, steps=steps, generator=generator)
    positions: Sequence[PositionDraws | None] = [None] * steps
    if settings.positions == "cape":
        positions = draw_positions(settings.cape, batch_size=sum(batch_sizes), generator=generator).split(batch_sizes)
    seeds = torch.randint(2**62, (steps,), generator=generator).tolist()
    return [Draws(*own) for own in zip(kept, positions, seeds, strict=True)]


def draw_kept(settings: Settings, *, steps: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """The blocks that layer-drop leaves in each of some steps."""
    chances = torch.rand(steps, settings.layers, generator=generator).tolist()
    return [tuple(layer for layer, chance in enumerate(own) if chance >= settings.layer_drop) for own in chances]


def padded_output_frames(frames: int) -> int:
    return max(frames // STRIDE, 1)  # a batch of nothing but utterances under 30 ms still has one (padding) frame


def draw(settings: Settings, utterances: Sequence[int], *, generator: torch.Generator, **_: Any) -> list[Draws]:
    return draw_several(settings, batch_sizes=utterances, generator=generator)


# Stacked clients.


@dataclass(frozen=True, eq=False)
class StackDraws:
    """One step's draws of several clients: of all together, and each one's own, None where it has no batch."""

    of_all: Draws
    by_client: list[Draws | None]


def join_draws(drawn_N: Sequence[Draws | None]) -> StackDraws:
    """The draws of several clients as one batch's, but for dropout, whose seeds stay each client's own."""
    active = [drawn for drawn in drawn_N if drawn is not None]
    positions = [drawn.positions for drawn in active if drawn.positions is not None]
    of_all = Draws(
        kept=tuple(sorted({layer for drawn in active for layer in drawn.kept})),
        positions=PositionDraws(torch.cat([p.shift_B for p in positions])) if positions else None,
        dropout_seed=None,
    )
    return StackDraws(of_all, list(drawn_N))
