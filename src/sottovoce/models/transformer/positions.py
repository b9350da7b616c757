"""Where a frame stands in its utterance: sinusoidal embeddings, plain or continuous and augmented (CAPE).

Plain positions count frames from zero. CAPE (Likhomanenko et al., 2021) measures seconds from the middle of the
utterance; in training it shifts the whole utterance at random, jitters every frame and stretches time. In evaluation it
is the plain sinusoid taken at centred seconds.

Shapes: B utterances, T frames after striding, D model width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sottovoce.errors import InputError

# CAPE counts seconds, and its fastest sinusoid turns 30 rad/s: 0.9 rad per 30 ms frame, where plain positions turn 1.
CAPE_FREQUENCY_SCALE = 30.0


@dataclass(frozen=True, slots=True)
class Cape:
    """How far training moves the positions. The defaults are those of the flagship's released code."""

    global_shift_seconds: float = 30.0
    local_shift_frames: float = 0.0
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, lowest in (("global_shift_seconds", 0), ("local_shift_frames", 0), ("global_scale", 1)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= lowest):
                raise InputError(f"CAPE: {name}={value}, expected a finite number of at least {lowest}")


@dataclass(frozen=True, slots=True)
class PositionDraws:
    """One training step's random moves, drawn on the host: shift (s), stretch and, where used, jitter (frames)."""

    shift_B: Tensor
    scale_B: Tensor
    jitter_BT: Tensor | None

    def split(self, sizes: Sequence[int], *, frames: Sequence[int]) -> list["PositionDraws"]:
        """The draws of consecutive batches: so many utterances and (at most) so many frames each."""
        shifts, scales = torch.split(self.shift_B, list(sizes)), torch.split(self.scale_B, list(sizes))
        jitters: Sequence[Tensor | None] = [None] * len(sizes)
        if self.jitter_BT is not None:
            parts = torch.split(self.jitter_BT, list(sizes))
            jitters = [part[:, :count] for part, count in zip(parts, frames, strict=True)]
        return [PositionDraws(*own) for own in zip(shifts, scales, jitters, strict=True)]


def draw_positions(cape: Cape, *, batch_size: int, frames: int, generator: torch.Generator) -> PositionDraws:
    """Draw the random moves of one batch of `batch_size` utterances padded to `frames` (after striding)."""

    def symmetric(*shape: int, limit: float) -> Tensor:
        return (torch.rand(shape, generator=generator) * 2 - 1) * limit

    return PositionDraws(
        shift_B=symmetric(batch_size, limit=cape.global_shift_seconds),
        scale_B=symmetric(batch_size, limit=math.log(cape.global_scale)).exp(),
        jitter_BT=symmetric(batch_size, frames, limit=cape.local_shift_frames) if cape.local_shift_frames else None,
    )


def plain_positions(frames: int, *, device: torch.device) -> Tensor:
    """Frame numbers 0, 1, 2, … as one row for every utterance: [1, T]."""
    return torch.arange(frames, device=device, dtype=torch.float32)[None]


def cape_positions(
    lengths_B: Tensor, *, frames: int, seconds_per_frame: float, draws: PositionDraws | None = None
) -> Tensor:
    """Positions in radians of the fastest sinusoid, centred on each utterance's own frames: [B, T].

    Padding does not count towards the centre, so an utterance has the same positions in any batch.
    """
    positions_BT = plain_positions(frames, device=lengths_B.device) - (lengths_B[:, None] - 1) / 2
    if draws is not None and draws.jitter_BT is not None:
        positions_BT = positions_BT + draws.jitter_BT.to(lengths_B.device, non_blocking=True)
    seconds_BT = positions_BT * seconds_per_frame
    if draws is not None:
        shift_B = draws.shift_B.to(lengths_B.device, non_blocking=True)
        scale_B = draws.scale_B.to(lengths_B.device, non_blocking=True)
        seconds_BT = (seconds_BT + shift_B[:, None]) * scale_B[:, None]
    return seconds_BT * CAPE_FREQUENCY_SCALE


def sinusoids(positions_BT: Tensor, *, width: int) -> Tensor:
    """sin and cos, interleaved, of wavelengths from 2π to 10,000·2π: [B, T] → [B, T, D]."""
    channels_D = torch.arange(width, device=positions_BT.device)
    pairs_D = channels_D.div(2, rounding_mode="floor")
    frequencies_D = torch.exp(pairs_D * (-2.0 * math.log(10_000.0) / width))
    quarter_turns_D = (channels_D % 2) * (math.pi / 2)  # cos x = sin(x + π/2)
    return torch.sin(positions_BT[..., None] * frequencies_D + quarter_turns_D)
