"""Where a frame stands in its utterance: sinusoidal embeddings, plain or continuous and augmented (CAPE).

Plain positions count frames from zero. CAPE (Likhomanenko et al., 2021) measures seconds from the middle of the
utterance; in training it shifts the whole utterance at random, jitters every frame and stretches time. In evaluation it
is the plain sinusoid taken at centred seconds.

Shapes: B utterances, T frames after striding, D model width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sottovoce.base.errors import InputError

# CAPE counts seconds, and its fastest sinusoid turns 30 rad/s: 0.9 rad per 30 ms frame, where plain positions turn 1.
CAPE_FREQUENCY_SCALE = 30.0


@dataclass(frozen=True, slots=True)
class Cape:
    """How far training moves the positions. The defaults are those of the flagship's released code."""

    global_shift_seconds: float = 30.0

    def __post_init__(self) -> None:
        value = self.global_shift_seconds
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"CAPE: global_shift_seconds={value}, expected a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class PositionDraws:
    """One training step's random shifts (s) of each utterance, drawn on the host."""

    shift_B: Tensor

    def split(self, sizes: Sequence[int]) -> list["PositionDraws"]:
        """The draws of consecutive batches of so many utterances each."""
        return [PositionDraws(part) for part in torch.split(self.shift_B, list(sizes))]


def draw_positions(cape: Cape, *, batch_size: int, generator: torch.Generator) -> PositionDraws:
    """Draw the random shifts of one batch of `batch_size` utterances."""
    shift_B = (torch.rand(batch_size, generator=generator) * 2 - 1) * cape.global_shift_seconds
    torch.rand(batch_size, generator=generator)  # once for a stretch, which is not used: later draws stay the same
    return PositionDraws(shift_B)


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
    seconds_BT = positions_BT * seconds_per_frame
    if draws is not None:
        seconds_BT = seconds_BT + draws.shift_B.to(lengths_B.device, non_blocking=True)[:, None]
    return seconds_BT * CAPE_FREQUENCY_SCALE


def sinusoids(positions_BT: Tensor, *, width: int) -> Tensor:
    """sin and cos, interleaved, of wavelengths from 2π to 10,000·2π: [B, T] → [B, T, D]."""
    is_exporting = torch.compiler.is_exporting()
    frequencies_D, quarter_turns_D = exported_waves(width) if is_exporting else _waves(width, positions_BT.device)
    return torch.sin(positions_BT[..., None] * frequencies_D + quarter_turns_D)


def _waves(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequency and phase of each channel."""
    channels_D = torch.arange(width, device=device)
    pairs_D = channels_D.div(2, rounding_mode="floor")
    frequencies_D = torch.exp(pairs_D * (-2.0 * math.log(10_000.0) / width))
    return frequencies_D, (channels_D % 2) * (math.pi / 2)  # cos x = sin(x + π/2)


@cache
def exported_waves(width: int) -> tuple[Tensor, Tensor]:
    """The same for an exported graph, as constants; to be made once before the graph is traced.

    Another library's exp differs in its last bit, and hundreds of frames on, that was 1e-4 of log-probabilities.
    """
    return _waves(width, torch.device("cpu"))
