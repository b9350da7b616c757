"""Utterances as tensors: waveforms on their way to a model, and the features that a family makes of them.

    Waveforms   samples, packed end to end or padded to equal length ─► extract_features ─► Features [U, T, F]

Both carry the texts as tokens; speech without text has none. A client's local steps use the same few utterances again
and again: their samples go to the device once and without padding, and features are kept. Central training and
recognition use an utterance once, padded.

Shapes: U utterances, N samples of all of them, T frames of the longest, F features, L tokens of the longest text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.data.audio.features import HOP_SAMPLES, WINDOW_SAMPLES
from sottovoce.data.corpora.corpus import SAMPLE_RATE

Texts = Sequence[Sequence[int] | NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class Waveforms:
    """Utterances and their texts. Samples are on the compute device, everything else is on the host.

    Packed, each utterance starts on a whole hop, so that its frames are some of those of all samples together. Padded,
    each takes `padded_samples`.
    """

    samples_N: Tensor  # int16, or float where they were augmented
    starts_U: Tensor
    lengths_U: Tensor
    tokens_UL: Tensor
    token_lengths_U: Tensor
    padded_samples: int | None = None

    def __len__(self) -> int:
        return len(self.lengths_U)

    @property
    def audio_seconds(self) -> float:
        return float(self.lengths_U.sum()) / SAMPLE_RATE

    @property
    def padded_UN(self) -> Tensor:
        """The samples, one row for each utterance. Where they are packed, its neighbour's follow it."""
        if self.padded_samples is not None:
            return self.samples_N.view(len(self), self.padded_samples)
        device = self.samples_N.device
        offsets_N = torch.arange(int(self.lengths_U.max()), device=device)
        index_UN = self.starts_U.to(device, non_blocking=True)[:, None] + offsets_N
        return self.samples_N[index_UN.clamp_(max=len(self.samples_N) - 1)]

    def with_samples(self, padded_UN: Tensor, lengths_U: Tensor) -> "Waveforms":
        """The same texts with other samples, as augmentation makes them."""
        width = padded_UN.shape[1]
        starts_U = torch.arange(len(self)) * width
        return replace(
            self, samples_N=padded_UN.reshape(-1), starts_U=starts_U, lengths_U=lengths_U, padded_samples=width
        )


def pack_waveforms(
    samples: Sequence[NDArray[np.int16]], tokens: Texts | None = None, *, device: torch.device | str = "cpu"
) -> Waveforms:
    """Put utterances end to end, and start sending them to `device`."""
    lengths = np.array([len(own) for own in samples], dtype=np.int64)
    # A clip that is shorter than a window is followed by silence, as it would be alone.
    slots = -(-np.maximum(lengths, WINDOW_SAMPLES) // HOP_SAMPLES) * HOP_SAMPLES
    starts = np.cumsum(slots) - slots
    samples_N = torch.empty(int(slots.sum()), dtype=torch.int16, pin_memory=torch.device(device).type == "cuda")
    target = samples_N.numpy()
    for own, start, slot in zip(samples, starts.tolist(), slots.tolist(), strict=True):
        target[start : start + len(own)] = own
        target[start + len(own) : start + slot] = 0
    return Waveforms(
        samples_N.to(device, non_blocking=True),
        torch.from_numpy(starts),
        torch.from_numpy(lengths),
        *pad_tokens([()] * len(samples) if tokens is None else tokens),
    )


def pad_waveforms(
    samples: Sequence[NDArray[np.int16]],
    tokens: Texts | None = None,
    *,
    padded_samples: int | None = None,
    device: torch.device | str = "cpu",
) -> Waveforms:
    """Pad utterances with zeros to `padded_samples`, or to the longest of them, and start sending them to `device`."""
    pins = torch.device(device).type == "cuda"
    lengths = [len(utterance) for utterance in samples]
    width = max(lengths, default=0) if padded_samples is None else padded_samples
    assert width >= max(lengths, default=0), f"padded_samples={padded_samples} is less than an utterance's length"
    padded_UN = torch.empty(len(samples), width, dtype=torch.int16, pin_memory=pins)
    for row, utterance in zip(padded_UN.numpy(), samples, strict=True):
        row[: len(utterance)] = utterance
        row[len(utterance) :] = 0
    return Waveforms(
        padded_UN.to(device, non_blocking=True).view(-1),
        torch.arange(len(samples)) * width,
        torch.tensor(lengths, dtype=torch.int64, pin_memory=pins),
        *pad_tokens([()] * len(samples) if tokens is None else tokens),
        padded_samples=width,
    )


def join_waveforms(parts: Sequence[Waveforms]) -> Waveforms:
    """All utterances of padded `parts`, in order, packed as `pack_waveforms` does."""
    lines, starts, begin = [], [], 0
    for part in parts:
        padded_UN = part.padded_UN
        slot = -(-max(padded_UN.shape[1], WINDOW_SAMPLES) // HOP_SAMPLES) * HOP_SAMPLES
        lines.append(torch.nn.functional.pad(padded_UN, (0, slot - padded_UN.shape[1])).reshape(-1))
        starts.append(begin + torch.arange(len(part)) * slot)
        begin += len(part) * slot
    return Waveforms(
        torch.cat(lines),
        torch.cat(starts),
        torch.cat([part.lengths_U for part in parts]),
        _concatenate_padded([part.tokens_UL for part in parts]),
        torch.cat([part.token_lengths_U for part in parts]),
    )


def pad_tokens(tokens: Texts) -> tuple[Tensor, Tensor]:
    """Texts as one tensor [U, L], zero behind each, and their lengths [U]."""
    lengths = np.array([len(own) for own in tokens], dtype=np.int64)
    tokens_UL = np.zeros((len(tokens), int(lengths.max(initial=0))), dtype=np.int64)
    for row, own in zip(tokens_UL, tokens, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(tokens_UL), torch.from_numpy(lengths)


@dataclass(frozen=True, eq=False)
class Features:
    """Utterances as features, which are on the compute device; their frames and texts are on the host."""

    features_UTF: Tensor
    frames_U: Tensor
    tokens_UL: Tensor
    token_lengths_U: Tensor

    def __len__(self) -> int:
        return len(self.frames_U)

    def take(self, indices: Tensor) -> "Features":
        """The utterances at `indices` (on the host), as long as the longest of them."""
        frames_U, token_lengths_U = self.frames_U[indices], self.token_lengths_U[indices]
        chosen = (indices.pin_memory() if self.features_UTF.is_cuda else indices).to(
            self.features_UTF.device, non_blocking=True
        )
        return Features(
            self.features_UTF[:, : int(frames_U.max())].index_select(0, chosen),
            frames_U,
            self.tokens_UL[indices, : int(token_lengths_U.max())],
            token_lengths_U,
        )


def concatenate_features(parts: Sequence[Features]) -> Features:
    """All utterances of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    return Features(
        _concatenate_padded([part.features_UTF for part in parts]),
        torch.cat([part.frames_U for part in parts]),
        _concatenate_padded([part.tokens_UL for part in parts]),
        torch.cat([part.token_lengths_U for part in parts]),
    )


def _concatenate_padded(parts: Sequence[Tensor]) -> Tensor:
    """[U, T, …] of several, zero behind the shorter ones."""
    if len({part.shape[1] for part in parts}) == 1:
        return torch.cat(list(parts))
    whole = parts[0].new_zeros(sum(map(len, parts)), max(part.shape[1] for part in parts), *parts[0].shape[2:])
    first = 0
    for part in parts:
        whole[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return whole
