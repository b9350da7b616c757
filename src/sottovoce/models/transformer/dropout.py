"""Dropout: of one model, and of stacked clients, each from its own seed.

What is dropped of a client in a stack depends neither on who else is in it nor on its place among them: one user's
presence moves nobody's update but their own.

    DrawnDropout   client after client, from a generator each, as each would draw alone    on a CPU, or without Triton
    KeyedDropout   one kernel for all, a Philox stream for each client and place           on a GPU

On a GPU the masks are those of the client alone in distribution only: torch's own kernels derive their random numbers
from the shape of the whole tensor, and FlashAttention's from the number of segments. Keyed kernels (Triton's only)
derive them from the client's key and the place within its own row. p is rounded to a 65,536th.

Shapes: N clients or rows, L frames of a packed row, F = N·L, U utterances, T frames of the longest, D channels, H
heads, d channels of a head, S segments.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.flat.kernels import has_triton
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


# ReLU and dropout in one pass over memory, for the widest tensor of the model. y = max(x, 0)·keep/(1 − p) is all that
# the gradient needs: it flows where y > 0. On a CUDA device with Triton one kernel does it, with sixteen random bits an
# element (the general one spends a whole Philox round of 128 on each); elsewhere it is torch's.


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """max(x, 0), with each element dropped with probability `dropout` and the others scaled up for it."""
    if not dropout:
        return F.relu(x)
    if x.is_cuda and has_triton():
        seed = torch.randint(2**31 - 1, (1,), device=x.device)  # from the device's generator, also under a CUDA graph
        dropped: Tensor = _relu_dropout_op(x, seed, dropout)
        return dropped
    return F.dropout(F.relu(x), dropout)


def keyed_relu_dropout(x_NLD: Tensor, keys_N: Tensor, dropout: float) -> Tensor:
    """`relu_dropout` of each row, from its own key."""
    dropped: Tensor = _relu_dropout_op(x_NLD, keys_N, dropout)
    return dropped


def keyed_dropout(x_NLD: Tensor, keys_N: Tensor, dropout: float) -> Tensor:
    """Each row's elements dropped with probability `dropout`, from its own key, and the others scaled up for it."""
    dropped: Tensor = _dropout_op(x_NLD, keys_N, dropout)
    return dropped


# Rows are as many as keys: one for the whole tensor, or one for each client.


@torch.library.custom_op("sottovoce::relu_dropout", mutates_args=())
def _relu_dropout_op(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    from sottovoce.models.transformer import relu_dropout_triton

    return relu_dropout_triton.dropout_forward(x, keys, dropout, relu=True)


@_relu_dropout_op.register_fake
def _(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("sottovoce::relu_dropout_backward", mutates_args=())
def _relu_dropout_backward(gradient: Tensor, y: Tensor, dropout: float) -> Tensor:
    from sottovoce.models.transformer import relu_dropout_triton

    return relu_dropout_triton.dropout_backward(gradient, y, dropout)


@_relu_dropout_backward.register_fake
def _(gradient: Tensor, y: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(y)


def _remember_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dropout = inputs[2]


def _relu_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (y,) = ctx.saved_tensors
    return _relu_dropout_backward(gradient, y, ctx.dropout), None, None


_relu_dropout_op.register_autograd(_relu_gradient, setup_context=_remember_output)


@torch.library.custom_op("sottovoce::dropout", mutates_args=())
def _dropout_op(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    from sottovoce.models.transformer import relu_dropout_triton

    return relu_dropout_triton.dropout_forward(x, keys, dropout, relu=False)


@_dropout_op.register_fake
def _(x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember_keys(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dropout = inputs[2]


def _same_mask(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    """Dropout is linear: the gradient loses what x has lost."""
    (keys,) = ctx.saved_tensors
    return _dropout_op(gradient, keys, ctx.dropout), None, None


_dropout_op.register_autograd(_same_mask, setup_context=_remember_keys)


# Attention within segments, its weights dropped from a key for each client. Gradients are added in a fixed order, so
# that they repeat to the bit.


def keyed_attention(qkv_F3Hd: Tensor, keys_N: Tensor, *, ends: Tensor, longest: int, dropout: float) -> Tensor:
    """[F, 3, H, d] → [F, H, d]. `ends` [S + 1] are 0 and the segments' ends, of which none is longer than `longest`.

    The segments cover all frames, and none spans two rows. p is rounded to a 65,536th.
    """
    mixed_FHd: Tensor = _attend(qkv_F3Hd, keys_N, ends, longest, dropout)[0]
    return mixed_FHd


@torch.library.custom_op("sottovoce::keyed_attention", mutates_args=())
def _attend(qkv: Tensor, keys: Tensor, ends: Tensor, longest: int, dropout: float) -> tuple[Tensor, Tensor]:
    from sottovoce.models.transformer import keyed_attention_triton

    return keyed_attention_triton.attention_forward(qkv, keys, ends, longest, dropout)


@_attend.register_fake
def _(qkv: Tensor, keys: Tensor, ends: Tensor, longest: int, dropout: float) -> tuple[Tensor, Tensor]:
    frames, _, heads, channels = qkv.shape
    return qkv.new_empty(frames, heads, channels), qkv.new_empty(frames, heads, dtype=torch.float32)


@torch.library.custom_op("sottovoce::keyed_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    levels: Tensor,
    keys: Tensor,
    ends: Tensor,
    longest: int,
    dropout: float,
) -> Tensor:
    from sottovoce.models.transformer import keyed_attention_triton

    return keyed_attention_triton.attention_backward(gradient, qkv, mixed, levels, keys, ends, longest, dropout)


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    levels: Tensor,
    keys: Tensor,
    ends: Tensor,
    longest: int,
    dropout: float,
) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _remember_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, keys, ends, ctx.longest, ctx.dropout = inputs
    ctx.save_for_backward(qkv, *output, keys, ends)


def _attention_gradient(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _attend_backward(gradient, *ctx.saved_tensors, ctx.longest, ctx.dropout), None, None, None, None


_attend.register_autograd(_attention_gradient, setup_context=_remember_attention)
