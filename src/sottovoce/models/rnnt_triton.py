"""Triton kernels of `rnnt`: the same bits on every call, no waiting for the host.

Each node's logits are read once, by a program that holds a whole row. Two programs walk each utterance's lattice in one
launch: one from its first node, one back from behind its last frame with places counted from the text's end, which
makes it the same walk. Threads exchange scores through memory.

Shapes: B utterances, T frames, W places, J width of the joint, C frames of a chunk, V outputs (the blank, then the
tokens), P parts of the frames.
"""

import torch
from torch import Tensor

from sottovoce.flat.triton import tl, triton

MOST_OUTPUTS = 16_384  # that one program holds
MOST_PLACES = 1024

NEVER = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN
# Else every new length of a batch that happens to be odd, or to divide by 16, would be compiled anew.
_SIZES = ("frames", "width", "walk_stride", "places", "outputs", "share_stride", "frame_stride", "place_stride")
# Of the joint's gradient, what one program adds up at a time: frames, places, numbers of each node.
_TILE = (8, 4, 128)


def takes_logits(logits_CWV: Tensor) -> bool:
    """Whether the kernels read these nodes; any others are torch's."""
    return logits_CWV.dtype in (torch.float32, torch.bfloat16, torch.float16) and logits_CWV.shape[2] <= MOST_OUTPUTS


def walks(blank_BTW: Tensor) -> bool:
    return blank_BTW.shape[2] <= MOST_PLACES


def read_nodes(logits_CWV: Tensor, next_W: Tensor) -> tuple[Tensor, Tensor]:
    """See `rnnt._read`."""
    logits_CWV = logits_CWV.contiguous()
    frames, places, outputs = logits_CWV.shape
    blank_CW, label_CW = logits_CWV.new_empty(2, frames, places, dtype=torch.float32)
    block = triton.next_power_of_2(outputs)
    _read[(frames * places,)](
        logits_CWV, next_W, blank_CW, label_CW, places, outputs, BLOCK=block, num_warps=_warps(block)
    )
    return blank_CW, label_CW


def pull(logits_CWV: Tensor, next_W: Tensor, blank_CW: Tensor, label_CW: Tensor) -> Tensor:
    """See `rnnt._pull`; the logits are overwritten."""
    assert blank_CW.stride() == label_CW.stride(), "cut out of equal tensors"
    assert blank_CW.stride(1) == 1, "places lie side by side"
    logits_CWV = logits_CWV.contiguous()
    frames, places, outputs = logits_CWV.shape
    block = triton.next_power_of_2(outputs)
    _pull[(frames * places,)](
        logits_CWV, next_W, blank_CW, label_CW, places, outputs, blank_CW.stride(0),
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return logits_CWV


def joins(joint: Tensor) -> bool:
    """Whether the kernels join and part these: in 16 bits, whose rounding hides that of a tanh made of exp."""
    return joint.element_size() == 2


def joined(encoded_CJ: Tensor, predicted_WJ: Tensor) -> Tensor:
    """See `rnnt._joined`."""
    frames, places, width = len(encoded_CJ), len(predicted_WJ), encoded_CJ.shape[1]
    assert encoded_CJ.stride(1) == predicted_WJ.stride(1) == 1, "numbers of a node lie side by side"
    joined_CWJ = encoded_CJ.new_empty(frames, places, width)
    block = triton.next_power_of_2(width)
    _join[(frames * places,)](
        encoded_CJ, predicted_WJ, joined_CWJ, places, width, encoded_CJ.stride(0), predicted_WJ.stride(0),
        BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return joined_CWJ


def parted(gradient_CWJ: Tensor, joined_CWJ: Tensor) -> tuple[Tensor, Tensor]:
    """See `rnnt._parted`. Sums over frames are added up in parts, always the same."""
    frames, places, width = joined_CWJ.shape
    parts = triton.cdiv(frames, _TILE[0])
    of_frames_CJ = joined_CWJ.new_empty(frames, width, dtype=torch.float32)
    of_places_PWJ = joined_CWJ.new_empty(parts, places, width, dtype=torch.float32)
    _part[(parts, triton.cdiv(width, _TILE[2]))](
        gradient_CWJ.contiguous(), joined_CWJ.contiguous(), of_frames_CJ, of_places_PWJ, frames, places, width,
        FRAMES=_TILE[0], PLACES=_TILE[1], BLOCK=_TILE[2], num_warps=4,
    )  # fmt: skip
    return of_frames_CJ, of_places_PWJ.sum(dim=0)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    encoded, predicted, joined, places, width, frame_stride, place_stride, BLOCK: tl.constexpr
):
    node = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    there = number < width
    of_frame = tl.load(encoded + node // places * frame_stride + number, mask=there, other=0.0).to(tl.float32)
    of_place = tl.load(predicted + node % places * place_stride + number, mask=there, other=0.0).to(tl.float32)
    total = of_frame + of_place
    odds = tl.exp(-2.0 * tl.abs(total))
    size = (1.0 - odds) / (1.0 + odds)
    found = tl.where(total < 0, -size, size)
    tl.store(joined + node * width + number, found.to(joined.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    gradient, joined, of_frames, of_places, frames, places, width,
    FRAMES: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    frame = part * FRAMES + tl.arange(0, FRAMES)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (frame < frames)[:, None] & (number < width)[None]
    sums = tl.zeros((FRAMES, BLOCK), dtype=tl.float32)
    for first in range(0, places, PLACES):
        place = first + tl.arange(0, PLACES)
        at = (frame[:, None] * places + place[None])[:, :, None] * width + number[None, None]
        there = inside[:, None] & (place < places)[None, :, None]
        value = tl.load(joined + at, mask=there, other=0.0).to(tl.float32)
        pulled = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32) * (1.0 - value * value)
        sums += tl.sum(pulled, axis=1)
        at_place = (part * places + place)[:, None] * width + number[None]
        tl.store(of_places + at_place, tl.sum(pulled, axis=0), mask=(place < places)[:, None] & (number < width)[None])
    tl.store(of_frames + frame[:, None] * width + number[None], sums, mask=inside)


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _read(logits, following, blank, label, places, outputs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    node = tl.program_id(0).to(tl.int64)
    row = logits + node * outputs
    output = tl.arange(0, BLOCK)
    logit = tl.load(row + output, mask=output < outputs, other=float("-inf")).to(tl.float32)
    top = tl.max(logit, axis=0)
    level = top + tl.log(tl.sum(tl.exp(logit - top), axis=0))
    token = tl.load(following + node % places)
    tl.store(blank + node, tl.load(row).to(tl.float32) - level)
    tl.store(label + node, tl.load(row + token).to(tl.float32) - level)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _pull(  # type: ignore[no-untyped-def]
    logits, following, blank, label, places, outputs, share_stride, BLOCK: tl.constexpr
):
    node = tl.program_id(0).to(tl.int64)
    row = logits + node * outputs
    output = tl.arange(0, BLOCK)
    logit = tl.load(row + output, mask=output < outputs, other=float("-inf")).to(tl.float32)
    token = tl.load(following + node % places)
    share_at = node // places * share_stride + node % places
    of_blank = tl.load(blank + share_at).to(tl.float32)
    of_label = tl.load(label + share_at).to(tl.float32)
    odds = tl.exp(logit - tl.max(logit, axis=0))
    pulled = odds * ((of_blank + of_label) / tl.sum(odds, axis=0))
    pulled -= tl.where(output == 0, of_blank, 0.0) + tl.where(output == token, of_label, 0.0)
    tl.store(row + output, pulled.to(logits.dtype.element_ty), mask=output < outputs)


def both_ways(
    blank_BTW: Tensor, label_BTW: Tensor, lengths_B: Tensor, token_lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """See `rnnt.both_ways_over_diagonals`; what is not a node of an utterance is left as it comes."""
    batch, frames, width = blank_BTW.shape
    scores = torch.empty(2, batch, frames, width, dtype=torch.float64, device=blank_BTW.device)
    block = max(32, triton.next_power_of_2(width))
    _walk[(batch, 2)](
        blank_BTW, label_BTW, lengths_B, token_lengths_B, scores, batch * frames * width, frames, width,
        BLOCK=block, num_warps=max(1, min(8, block // 64)), num_stages=1,
    )  # fmt: skip
    return scores[0], scores[1]


@triton.jit
def _either(a, b):  # type: ignore[no-untyped-def]
    """log(exp(a) + exp(b)), and NaN where either is; a maximum alone would drop it."""
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _finite(score):  # type: ignore[no-untyped-def]
    return tl.where(score < NEVER, NEVER, score)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    blank, label, lengths, token_lengths, scores, walk_stride, frames, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    backwards = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    count = tl.load(token_lengths + row).to(tl.int32)
    sound = (length > 0) & (length <= frames) & (count < width)
    length = tl.where(sound, length, 0)
    end = tl.where(sound, length + count, 0)
    first = row * frames * width
    blank += first
    label += first
    scores += backwards * walk_stride + first

    # `place` counts along the walk, `at` says where in the text that is.
    place = tl.arange(0, BLOCK)
    at = tl.where(backwards == 1, count - place, place)
    there = place <= count
    # The first diagonal has one node: the lattice's first, or the one outside of it that the last blank leads to.
    score = tl.where(place == 0, 0.0, NEVER).to(tl.float64)
    tl.store(scores + place, score, mask=place < tl.where(sound, 1 - backwards, 0))
    # Forwards an edge's probability stands where it begins, backwards where it leads to.
    frame = tl.where(backwards == 1, length - 1 + place, 1 - place)
    step = 1 - 2 * backwards
    on_blank = (frame - (1 - backwards)) * width + at
    on_label = frame * width + at - (1 - backwards)
    before = frame * width + at - step
    for _ in range(end):
        inside = there & (frame >= 0) & (frame < length)
        came = frame - (1 - backwards)
        by_blank = tl.load(blank + on_blank, mask=there & (came >= 0) & (came < length), other=NEVER)
        by_label = tl.load(label + on_label, mask=inside & (place > 0), other=NEVER)
        tl.debug_barrier()  # now each thread may read what its neighbour has stored
        score_before = tl.load(scores + before, mask=inside & (place > 0), other=NEVER)
        score = _either(score + _finite(by_blank), _finite(score_before) + _finite(by_label))
        score = tl.where(inside, _finite(score), NEVER)
        tl.store(scores + frame * width + at, tl.where(score < 0.5 * NEVER, float("-inf"), score), mask=inside)
        frame += step
        on_blank += step * width
        on_label += step * width
        before += step * width
