"""The RNN transducer's loss (Graves, 2012) with its own backward pass; the joint never exists as a whole.

    f = encoded[t], g = predicted[u] ─► tanh(f + g) ─► weight, bias ─► log-softmax over the blank and the tokens

An alignment is a path through a lattice of T frames and U+1 places in the text: the blank goes to the next frame, the
next token to the next place, and the last blank leaves the lattice. Any number of tokens may share a frame.

Log-probabilities of the blank and the next token are read chunk by chunk (frames of one utterance); the lattice is
walked in float64 over its anti-diagonals; the backward pass computes each chunk again. Nothing is computed for padding,
so an utterance's loss and gradients are the same bits in any batch. Cost: 8·B·T·(U+1)·J·V operations.

Shapes: B utterances, T frames, U tokens of a text, W = U+1 places, J width of the joint, V outputs (the blank, then the
tokens), C frames of a chunk, D anti-diagonals, R rows of a walk.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sottovoce.base.errors import InputError
from sottovoce.flat.kernels import triton_kernels
from sottovoce.models.ctc import BLANK

# Logits that exist at a time: on a processor, few enough for its caches; on a GPU, enough to fill it.
CHUNK_LOGITS = {"cuda": 2**27}
CPU_CHUNK_LOGITS = 2**21
# Shares of alignments below this have no gradient: most nodes' are so small that, times a softmax, they would leave the
# range in which a processor multiplies at full speed, and no sum of float32 would notice them.
LEAST_SHARE = 1e-20
# Rows of 16-bit matrices should begin on 16 bytes, or a GPU's products take the long way.
ALIGNED = 8


def logit_losses(logits_BTWV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor) -> Tensor:
    """-log p(text | speech) of each utterance, not divided by any length: [B]; where all logits are there already.

    Both lengths are on the host. An empty text is a text. An utterance without a frame has no loss and no gradient.
    Refused: more frames or tokens than there are, and tokens that are the blank or no output.
    """
    texts = _checked(logits_BTWV.shape[1], logits_BTWV.shape[3], lengths_B, tokens_BU, token_lengths_B)
    return _OfLogits.apply(logits_BTWV, *texts)  # type: ignore[no-any-return, no-untyped-call]


def joint_losses(
    encoded_BTJ: Tensor,
    predicted_BWJ: Tensor,
    weight_VJ: Tensor,
    bias_V: Tensor,
    lengths_B: Tensor,
    tokens_BU: Tensor,
    token_lengths_B: Tensor,
) -> Tensor:
    """`logit_losses` of the logits tanh(encoded + predicted)·weightᵀ + bias, [B], with gradients for all four."""
    texts = _checked(encoded_BTJ.shape[1], len(bias_V), lengths_B, tokens_BU, token_lengths_B)
    return _OfJoint.apply(encoded_BTJ, predicted_BWJ, weight_VJ, bias_V, *texts)  # type: ignore[no-any-return, no-untyped-call]


def mean(losses_B: Tensor, lengths_B: Tensor) -> Tensor:
    """The mean over the utterances that have a frame; 0 where none has."""
    return losses_B.sum() / max(int((lengths_B > 0).sum()), 1)


class Chunk(NamedTuple):
    """Frames [first, last) of one utterance and `width` places: the nodes [C, W] that are worked on together."""

    utterance: int
    first: int
    last: int
    width: int

    @property
    def nodes(self) -> tuple[int, slice, slice]:
        return self.utterance, slice(self.first, self.last), slice(self.width)

    @property
    def frames(self) -> tuple[int, slice]:
        return self.nodes[:2]

    @property
    def places(self) -> tuple[int, slice]:
        return self.utterance, slice(self.width)


def _chunks(lengths_B: Tensor, token_lengths_B: Tensor, *, outputs: int, device: torch.device) -> Iterator[Chunk]:
    nodes = CHUNK_LOGITS.get(device.type, CPU_CHUNK_LOGITS) // outputs
    for utterance, (frames, tokens) in enumerate(zip(lengths_B.tolist(), token_lengths_B.tolist(), strict=True)):
        step = max(nodes // (tokens + 1), 1)
        for first in range(0, frames, step):
            yield Chunk(utterance, first, min(first + step, frames), tokens + 1)


def _checked(
    frames: int, outputs: int, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Both lengths, on the host, and each place's next token [B, W], zero behind the last."""
    lengths_B, token_lengths_B = lengths_B.cpu(), token_lengths_B.cpu()
    for name, found_B, most in (("frames", lengths_B, frames), ("tokens", token_lengths_B, tokens_BU.shape[1])):
        if len(found_B) and not 0 <= int(found_B.min()) <= int(found_B.max()) <= most:
            raise InputError(f"transducer: an utterance of {int(found_B.max())} {name}, expected at most {most}")
    inside_BU = torch.arange(tokens_BU.shape[1]) < token_lengths_B[:, None]
    if not tokens_BU.is_cuda:  # a GPU would have to be waited for
        wrong = tokens_BU[inside_BU & ~((tokens_BU > BLANK) & (tokens_BU < outputs))]
        if len(wrong):
            raise InputError(f"transducer: token {int(wrong[0])} in a text, expected 1 to {outputs - 1}")
    next_BW = F.pad(torch.where(inside_BU.to(tokens_BU.device), tokens_BU, 0).long(), (0, 1))
    return lengths_B, token_lengths_B, next_BW


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTWV: Tensor, lengths_B: Tensor, token_lengths_B: Tensor, next_BW: Tensor) -> Tensor:
        next_BW = next_BW.to(logits_BTWV.device, non_blocking=True)
        ctx.chunks = list(_chunks(lengths_B, token_lengths_B, outputs=logits_BTWV.shape[3], device=logits_BTWV.device))
        walked = _walked(lambda c: logits_BTWV[c.nodes], ctx.chunks, next_BW, lengths_B, token_lengths_B)
        ctx.save_for_backward(logits_BTWV, next_BW, walked.blank_BTW, walked.label_BTW)
        return walked.losses_B.to(_precision(logits_BTWV))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        logits_BTWV, next_BW, *occupied = ctx.saved_tensors
        blank_BTW, label_BTW = _scaled(occupied, grad_B)
        gradient_BTWV = torch.zeros_like(logits_BTWV)
        for c in ctx.chunks:
            gradient_BTWV[c.nodes] = _pull(
                logits_BTWV[c.nodes].clone(), next_BW[c.places], blank_BTW[c.nodes], label_BTW[c.nodes]
            )
        return gradient_BTWV, None, None, None


class _OfJoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        encoded_BTJ: Tensor,
        predicted_BWJ: Tensor,
        weight_VJ: Tensor,
        bias_V: Tensor,
        lengths_B: Tensor,
        token_lengths_B: Tensor,
        next_BW: Tensor,
    ) -> Tensor:
        next_BW = next_BW.to(encoded_BTJ.device, non_blocking=True)
        ctx.chunks = list(_chunks(lengths_B, token_lengths_B, outputs=len(bias_V), device=encoded_BTJ.device))
        output = _aligned(weight_VJ, bias_V)
        walked = _walked(
            lambda c: F.linear(_joined(encoded_BTJ, predicted_BWJ, c), *output),
            ctx.chunks,
            next_BW,
            lengths_B,
            token_lengths_B,
        )
        saved = (encoded_BTJ, predicted_BWJ, weight_VJ, bias_V, next_BW, walked.blank_BTW, walked.label_BTW)
        ctx.save_for_backward(*saved)
        return walked.losses_B.to(_precision(encoded_BTJ))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        encoded_BTJ, predicted_BWJ, weight_VJ, bias_V, next_BW, *occupied = ctx.saved_tensors
        blank_BTW, label_BTW = _scaled(occupied, grad_B)
        inputs = (encoded_BTJ, predicted_BWJ, *_aligned(weight_VJ, bias_V))
        of_encoded, of_predicted, of_weight, of_bias = (
            torch.zeros_like(given, dtype=_precision(given)) for given in inputs
        )
        weight, bias = inputs[2:]
        for c in ctx.chunks:
            joined_CWJ = _joined(encoded_BTJ, predicted_BWJ, c)
            pulled_CWV = _pull(
                F.linear(joined_CWJ, weight, bias), next_BW[c.places], blank_BTW[c.nodes], label_BTW[c.nodes]
            )
            pulled, joined = pulled_CWV.flatten(0, 1), joined_CWJ.flatten(0, 1)
            if ctx.needs_input_grad[2]:
                _add_product(of_weight, pulled.T, joined)
            of_bias += pulled.sum(dim=0, dtype=of_bias.dtype)
            of_frames, of_places = _parted((pulled @ weight).view_as(joined_CWJ), joined_CWJ)
            of_encoded[c.frames] = of_frames
            of_predicted[c.places] += of_places
        outputs = len(bias_V)
        found = (of_encoded, of_predicted, of_weight[:outputs], of_bias[:outputs])
        return *(gradient.to(encoded_BTJ.dtype) for gradient in found), None, None, None


def _joined(encoded_BTJ: Tensor, predicted_BWJ: Tensor, chunk: Chunk) -> Tensor:
    encoded_CJ, predicted_WJ = encoded_BTJ[chunk.frames], predicted_BWJ[chunk.places]
    if (kernels := _kernels(encoded_CJ)) is not None and kernels.joins(encoded_CJ):
        return kernels.joined(encoded_CJ, predicted_WJ)  # type: ignore[no-any-return]
    return (encoded_CJ[:, None] + predicted_WJ).tanh_()


def _parted(gradient_CWJ: Tensor, joined_CWJ: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients [C, J] and [W, J] of what was joined, given the joint's."""
    if (kernels := _kernels(joined_CWJ)) is not None and kernels.joins(joined_CWJ):
        return kernels.parted(gradient_CWJ, joined_CWJ)  # type: ignore[no-any-return]
    before_CWJ, precision = torch.ops.aten.tanh_backward(gradient_CWJ, joined_CWJ), _precision(joined_CWJ)
    return before_CWJ.sum(dim=1, dtype=precision), before_CWJ.sum(dim=0, dtype=precision)


def _precision(given: Tensor) -> torch.dtype:
    """Of what is added up: at least float32."""
    return torch.promote_types(given.dtype, torch.float32)


def _aligned(weight_VJ: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """In 16 bits, with outputs of probability zero to a multiple of `ALIGNED`."""
    missing = -len(bias_V) % ALIGNED if weight_VJ.element_size() == 2 else 0
    return F.pad(weight_VJ, (0, 0, 0, missing)), F.pad(bias_V, (0, missing), value=-torch.inf)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total += left @ right


def _scaled(occupied: list[Tensor], grad_B: Tensor) -> list[Tensor]:
    return [(one_BTW * grad_B.double()[:, None, None]).to(grad_B.dtype) for one_BTW in occupied]


# Nodes: what a lattice needs of their logits, and their gradients.


def _read(logits_CWV: Tensor, next_W: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [C, W] of the blank and of the next token."""
    if (kernels := _kernels(logits_CWV)) is not None and kernels.takes_logits(logits_CWV):
        return kernels.read_nodes(logits_CWV, next_W)  # type: ignore[no-any-return]
    log_probs_CWV = logits_CWV.log_softmax(dim=-1, dtype=_precision(logits_CWV))
    return log_probs_CWV[..., BLANK], log_probs_CWV.gather(2, _index(logits_CWV, next_W))[..., 0]


def _pull(logits_CWV: Tensor, next_W: Tensor, blank_CW: Tensor, label_CW: Tensor) -> Tensor:
    """The gradient by the logits, in their place: all that passes a node times its softmax, less what is read there."""
    if (kernels := _kernels(logits_CWV)) is not None and kernels.takes_logits(logits_CWV):
        return kernels.pull(logits_CWV, next_W, blank_CW, label_CW)  # type: ignore[no-any-return]
    pulled_CWV = logits_CWV.softmax(dim=-1, dtype=_precision(logits_CWV))
    pulled_CWV *= (blank_CW + label_CW)[..., None]
    pulled_CWV[..., BLANK] -= blank_CW
    pulled_CWV.scatter_add_(2, _index(logits_CWV, next_W), -label_CW[..., None])
    return pulled_CWV.to(logits_CWV.dtype)


def _index(logits_CWV: Tensor, next_W: Tensor) -> Tensor:
    return next_W[:, None].expand(*logits_CWV.shape[:2], 1)


def _kernels(given: Tensor) -> ModuleType | None:
    return triton_kernels("sottovoce.models.rnnt_triton") if given.is_cuda else None


# The lattice.


class Walked(NamedTuple):
    """Each utterance's loss, and the shares of its alignments that read the blank and the next token at each node."""

    losses_B: Tensor
    blank_BTW: Tensor
    label_BTW: Tensor


def _walked(
    logits: Callable[[Chunk], Tensor], chunks: list[Chunk], next_BW: Tensor, lengths_B: Tensor, token_lengths_B: Tensor
) -> Walked:
    frames = int(lengths_B.max()) if len(lengths_B) else 0
    blank_BTW = torch.zeros(len(next_BW), frames, next_BW.shape[1], dtype=torch.float64, device=next_BW.device)
    label_BTW = torch.zeros_like(blank_BTW)
    for c in chunks:
        blank_BTW[c.nodes], label_BTW[c.nodes] = _read(logits(c), next_BW[c.places])
    on_device = (lengths.to(next_BW.device, non_blocking=True) for lengths in (lengths_B, token_lengths_B))
    return walk(blank_BTW, label_BTW, *on_device)


def walk(blank_BTW: Tensor, label_BTW: Tensor, lengths_B: Tensor, token_lengths_B: Tensor) -> Walked:
    """Walk the lattice both ways, given log-probabilities of the blank and the next token at each node, in float64.

    Values outside an utterance's frames and places are ignored. All is on one device.
    """
    if not blank_BTW.numel():
        return Walked(blank_BTW.new_zeros(len(lengths_B)), blank_BTW, label_BTW)
    kernels = _kernels(blank_BTW)
    both_ways = both_ways_over_diagonals if kernels is None or not kernels.walks(blank_BTW) else kernels.both_ways
    to_BTW, from_BTW = both_ways(blank_BTW, label_BTW, lengths_B, token_lengths_B)
    frames_B11, places_B11 = lengths_B[:, None, None], token_lengths_B[:, None, None]
    frame_T1 = torch.arange(blank_BTW.shape[1], device=blank_BTW.device)[:, None]
    place_W = torch.arange(blank_BTW.shape[2], device=blank_BTW.device)
    total_B = from_BTW[:, 0, 0]
    possible_B = (lengths_B > 0) & (total_B != -torch.inf)
    inside_BTW = possible_B[:, None, None] & (frame_T1 < frames_B11)
    out_BTW = torch.where(place_W == places_B11, 0.0, -torch.inf)  # the last blank leaves from the last place only
    next_frame_BTW = torch.where(frame_T1 + 1 < frames_B11, F.pad(from_BTW[:, 1:], (0, 0, 0, 1)), out_BTW)
    next_place_BTW = F.pad(from_BTW[:, :, 1:], (0, 1))
    before_BTW = to_BTW - total_B[:, None, None]
    of_blank_BTW = (before_BTW + blank_BTW + next_frame_BTW).exp_()
    of_label_BTW = (before_BTW + label_BTW + next_place_BTW).exp_()
    return Walked(
        torch.where(possible_B, -total_B, 0),
        torch.where(inside_BTW & (place_W <= places_B11) & ~(of_blank_BTW < LEAST_SHARE), of_blank_BTW, 0),
        torch.where(inside_BTW & (place_W < places_B11) & ~(of_label_BTW < LEAST_SHARE), of_label_BTW, 0),
    )


def both_ways_over_diagonals(
    blank_BTW: Tensor, label_BTW: Tensor, lengths_B: Tensor, token_lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T, W] of all paths to a node from the first, and from it out of the lattice.

    Nodes of one anti-diagonal depend on the one before alone. The way back is walked at the same time, as rows of its
    own.
    """
    frames, width = blank_BTW.shape[1:]
    place_W, device = torch.arange(width, device=blank_BTW.device), blank_BTW.device
    behind_BDW = torch.arange(frames + width - 1, device=device)[:, None] - place_W.expand(len(lengths_B), 1, width)
    frames_B11, tokens_B11 = lengths_B[:, None, None], token_lengths_B[:, None, None]
    # At which node stands what leads to a place of the next diagonal: by a token from the place before, or by a blank.
    places_BDW = place_W.expand_as(behind_BDW)
    back = (frames_B11 - 1 - behind_BDW, tokens_B11 - place_W)
    by_token = torch.cat([_at(label_BTW, behind_BDW + 1, places_BDW - 1, frames_B11, tokens_B11 - 1),
                          _at(label_BTW, *back, frames_B11, tokens_B11 - 1)])  # fmt: skip
    by_blank = torch.cat([_at(blank_BTW, behind_BDW, places_BDW, frames_B11, tokens_B11),
                          _at(blank_BTW, *back, frames_B11, tokens_B11)])  # fmt: skip
    edges_DR2W = torch.stack([by_token, by_blank], dim=2).transpose(0, 1).contiguous()
    # One place before the first, which is never reached.
    score_DRW = blank_BTW.new_full((frames + width, 2 * len(lengths_B), width + 1), -torch.inf)
    score_DRW[0, :, 1] = 0
    pairs_DR2W = score_DRW.unfold(2, width, 1)
    for step, edges_R2W in enumerate(edges_DR2W):
        by_token_RW, by_blank_RW = (pairs_DR2W[step] + edges_R2W).unbind(1)
        torch.logaddexp(by_token_RW, by_blank_RW, out=score_DRW[step + 1, :, 1:])
    to_DBW, from_DBW = score_DRW[:, :, 1:].transpose(0, 1).chunk(2)
    frame_T1 = torch.arange(frames, device=device)[:, None]
    left_BTW = frames_B11 - frame_T1 + tokens_B11 - place_W  # diagonals from a node to the end
    every = torch.arange(len(lengths_B), device=device)[:, None, None]
    to_BTW = to_DBW[every, frame_T1 + place_W, place_W]
    from_BTW = from_DBW[every, left_BTW.clamp(0), (tokens_B11 - place_W).clamp(0)]
    return to_BTW, from_BTW


def _at(values_BTW: Tensor, frame_BDW: Tensor, place_BDW: Tensor, frames_B11: Tensor, last_B11: Tensor) -> Tensor:
    """The values at these nodes; minus infinity outside of each utterance's frames and of places up to its last."""
    inside = (frame_BDW >= 0) & (frame_BDW < frames_B11) & (place_BDW >= 0) & (place_BDW <= last_B11)
    frame, place = torch.where(inside, frame_BDW, 0), torch.where(inside, place_BDW, 0)
    every = torch.arange(len(values_BTW), device=values_BTW.device)[:, None, None]
    return torch.where(inside, values_BTW[every, frame, place], -torch.inf)
