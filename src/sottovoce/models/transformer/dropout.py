"""Dropout of stacked clients, from each client's own seed.

What is dropped of a client in a stack never hangs on who else is in it, nor on where among them it stands: one user's
presence moves nobody's update but their own.

    DrawnDropout   client after client, from a generator each, as each would draw alone    on a CPU, or without Triton
    KeyedDropout   one kernel for all, a Philox stream for each client and place           on a GPU

On a GPU the masks are those of the client alone in distribution only: how torch's own kernels deal out their random
numbers depends on the shape of the whole tensor.

Shapes: N clients, L frames of a packed row, U utterances, T frames of the longest, D channels, H heads, d channels of
a head.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.flat.kernels import has_triton
from sottovoce.models.transformer.keyed_attention import keyed_attention
from sottovoce.models.transformer.relu_dropout import keyed_dropout, keyed_relu_dropout
from sottovoce.models.transformer.rows import Packing


class ClientDropout(ABC):
    """The dropout of stacked clients at one place of the model: before the blocks, or in one of them."""

    @abstractmethod
    def drop(self, x_NLD: Tensor) -> Tensor:
        """x, with each element dropped by chance and the others scaled up for it."""

    @abstractmethod
    def relu_drop(self, x_NLD: Tensor) -> Tensor:
        """The same of max(x, 0)."""

    @abstractmethod
    def attend(self, qkv: Tensor, *, ends: Tensor, longest: int) -> Tensor:
        """Attention within segments, its weights dropped by chance: [N·L, 3, H, d] → [N·L, H, d]."""


@dataclass(frozen=True, eq=False)
class DropoutDraws:
    """What a client's masks are made of: its lines of the batch, their padded frames, its blocks and its seed."""

    lines: Sequence[int]
    frames: int
    kept: Sequence[int]
    seed: int


def client_dropout(
    rate: float, clients: Sequence[DropoutDraws | None], *, layers: Sequence[int], packing: Packing
) -> list[ClientDropout]:
    """Of N `clients` (None: it has no batch): before the blocks, and in each of `layers`, which are run in order."""
    device = packing.from_batch_NL.device
    if device.type == "cuda" and has_triton():
        # A key of its own for every place: seeds have 62 random bits, so that sums never meet.
        seeds_N = torch.tensor([0 if client is None else client.seed for client in clients])
        places_S = torch.tensor([0, *(layer + 1 for layer in layers)])
        keys_SN = (seeds_N + places_S[:, None]).pin_memory().to(device, non_blocking=True)
        return [KeyedDropout(rate, keys_N) for keys_N in keys_SN]
    own = [(client, torch.Generator(device).manual_seed(client.seed)) for client in clients if client is not None]
    in_block = [[(client, drawn) for client, drawn in own if layer in client.kept] for layer in layers]
    return [DrawnDropout(rate, packing, present) for present in (own, *in_block)]


@dataclass(frozen=True, eq=False)
class KeyedDropout(ClientDropout):
    """A mask follows from its client's key and from the frame and channel within that client's row."""

    rate: float
    keys_N: Tensor

    def drop(self, x_NLD: Tensor) -> Tensor:
        return keyed_dropout(x_NLD, self.keys_N, self.rate)

    def relu_drop(self, x_NLD: Tensor) -> Tensor:
        return keyed_relu_dropout(x_NLD, self.keys_N, self.rate)

    def attend(self, qkv: Tensor, *, ends: Tensor, longest: int) -> Tensor:
        return keyed_attention(qkv, self.keys_N, ends=ends, longest=longest, dropout=self.rate)


@dataclass(frozen=True, eq=False)
class DrawnDropout(ClientDropout):
    """Masks of the shapes that each client has alone, padded, drawn in the order of the forward pass.

    Who leaves a block out draws nothing there: what the block gives is not used.
    """

    rate: float
    packing: Packing
    own: Sequence[tuple[DropoutDraws, torch.Generator]]

    def drop(self, x_NLD: Tensor) -> Tensor:
        masks_UTD = x_NLD.new_zeros(*self.packing.to_batch_UT.shape, x_NLD.shape[-1])
        for client, generator in self.own:
            shape = len(client.lines), client.frames, x_NLD.shape[-1]
            masks_UTD[client.lines, : client.frames] = self._drawn(masks_UTD.new_empty(shape), generator)
        return x_NLD * self.packing.pack(masks_UTD)

    def relu_drop(self, x_NLD: Tensor) -> Tensor:
        return self.drop(F.relu(x_NLD))

    def attend(self, qkv: Tensor, *, ends: Tensor, longest: int) -> Tensor:
        """Utterance by utterance, like `network.attention` of a padded batch; `ends` say nothing new."""
        heads, channels = qkv.shape[2:]
        batch_UT = self.packing.unpack(qkv.view(*self.packing.from_batch_NL.shape, -1))
        q, k, v = batch_UT.view(*batch_UT.shape[:2], 3, heads, channels).permute(2, 0, 3, 1, 4)
        inside_UT = self.packing.to_batch_UT >= 0
        inside_UT[:, 0] = True  # a softmax over nothing would be NaN
        scores_UHTT = (q @ k.mT / math.sqrt(channels)).masked_fill(~inside_UT[:, None, None], -math.inf)
        masks_UHTT = torch.zeros_like(scores_UHTT)
        for client, generator in self.own:
            shape = len(client.lines), heads, client.frames, client.frames
            drawn = self._drawn(masks_UHTT.new_empty(shape), generator)
            masks_UHTT[client.lines, :, : client.frames, : client.frames] = drawn
        mixed_UTHd = (scores_UHTT.softmax(dim=-1) * masks_UHTT @ v).transpose(1, 2)
        return self.packing.pack(mixed_UTHd.flatten(2)).view(-1, heads, channels)

    def _drawn(self, mask: Tensor, generator: torch.Generator) -> Tensor:
        """As `F.dropout` draws it on a CPU."""
        return mask.bernoulli_(1 - self.rate, generator=generator).div_(1 - self.rate)
