"""Triton kernels of the loss in `ctc`: the same bits on every call, no waiting for the host.

The states of the alignment graph are kept as two rows, blanks and tokens, so that each place needs one neighbour only.
One program walks an utterance from its first frame, another from its last with the text reversed: the same graph, so
the same code. Where the two meet, their product is the probability of all alignments through a state.

Shapes: B utterances, T frames, U tokens of a text, V outputs (the blank, then the tokens), W = U+1 places.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sottovoce.flat.triton import tl, triton

MOST_PLACES = 1024  # of one program: texts of up to 1,023 tokens, or 2,047 states
FRAMES, PLACES, MOST_OUTPUTS = 16, 32, 64  # of one program of the gradient

# Instead of -inf, whose differences are NaN; sums of as many as there are frames are still finite.
NEVER = tl.constexpr(-1e30)
# Frames between two rescalings. Scores fall by a few units a frame; left alone they reach minus a thousand, where
# float32 has room for three decimals only, and so has torch's gradient.
RESCALE = 8
# Else every new length of a batch that happens to be odd, or to divide by 16, would be compiled anew.
_SIZES = ("batch_stride", "frame_stride", "output_stride", "walk_stride", "frames", "outputs", "width")


def takes_batch(log_probs_BTV: Tensor, tokens_BU: Tensor) -> bool:
    """Whether this batch is one for the kernels; any other is torch's."""
    return log_probs_BTV.dtype == torch.float32 and log_probs_BTV.numel() > 0 and tokens_BU.shape[1] < MOST_PLACES


def losses(log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor) -> Tensor:
    """See `ctc.ctc_losses`. Lengths and tokens may be on the host: their copies are not waited for.

    The gradient is by the log-probabilities themselves, where torch's adds the softmax; through log_softmax both are
    equal. What cannot be checked without waiting is NaN: more frames or tokens than the batch has, or a token that is
    no output.
    """
    texts = (lengths_B, tokens_BU, token_lengths_B)
    on_device = [tensor.to(log_probs_BTV.device, non_blocking=True).contiguous() for tensor in texts]
    if torch.is_grad_enabled() and log_probs_BTV.requires_grad:
        return _Losses.apply(log_probs_BTV, *on_device)  # type: ignore[no-any-return, no-untyped-call]
    return _walk_both(log_probs_BTV, *on_device, directions=1)[0]


@dataclass(frozen=True)
class _Walks:
    """What the programs leave behind: log-probabilities of having come to a state, from the first frame or the last.

    scores [directions, B, T, blanks and tokens, W] are relative to levels [directions, B, T], for accuracy.
    """

    scores: Tensor
    levels: Tensor
    totals_B: Tensor


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor
    ) -> Tensor:
        batch = (log_probs_BTV, lengths_B, tokens_BU, token_lengths_B)
        losses_B, walks = _walk_both(*batch, directions=2)
        # Here rather than in backward: the scores, larger than all else, can go at once.
        ctx.save_for_backward(_gradients(*batch, walks))
        return losses_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_BTV,) = ctx.saved_tensors
        return gradient_BTV * grad_B[:, None, None], None, None, None


def _walk_both(
    log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor, *, directions: int
) -> tuple[Tensor, _Walks]:
    batch, frames, outputs = log_probs_BTV.shape
    width = tokens_BU.shape[1] + 1
    losses_B = log_probs_BTV.new_empty(batch)
    walks = _Walks(
        scores=log_probs_BTV.new_empty(directions, batch, frames, 2, width),
        levels=log_probs_BTV.new_empty(directions, batch, frames, dtype=torch.float64),
        totals_B=log_probs_BTV.new_empty(batch, dtype=torch.float64),
    )
    block = max(32, triton.next_power_of_2(width))
    _walk[(batch, directions)](
        log_probs_BTV, lengths_B, tokens_BU, token_lengths_B, losses_B, walks.scores, walks.levels, walks.totals_B,
        *log_probs_BTV.stride(), batch * frames, frames, outputs, width,
        RESCALE=RESCALE, BLOCK=block, num_warps=max(1, min(8, block // 64)), num_stages=1,
    )  # fmt: skip
    return losses_B, walks


def _gradients(
    log_probs_BTV: Tensor, lengths_B: Tensor, tokens_BU: Tensor, token_lengths_B: Tensor, walks: _Walks
) -> Tensor:
    batch, frames, outputs = log_probs_BTV.shape
    gradient_BTV = torch.empty(batch, frames, outputs, dtype=torch.float32, device=log_probs_BTV.device)
    block = max(16, min(MOST_OUTPUTS, triton.next_power_of_2(outputs)))
    _occupancy[(batch, triton.cdiv(frames, FRAMES), triton.cdiv(outputs, block))](
        log_probs_BTV, lengths_B, tokens_BU, token_lengths_B, gradient_BTV, walks.scores, walks.levels, walks.totals_B,
        *log_probs_BTV.stride(), batch * frames, frames, outputs, tokens_BU.shape[1] + 1,
        FRAMES=FRAMES, PLACES=PLACES, OUTPUTS=block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return gradient_BTV


@triton.jit
def _either(a, b):  # type: ignore[no-untyped-def]
    """log(exp(a) + exp(b)), and NaN where either is; a maximum alone would drop it."""
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _finite(log_prob):  # type: ignore[no-untyped-def]
    return tl.where(log_prob < NEVER, NEVER, log_prob)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    log_probs, lengths, tokens, token_lengths, losses, scores, levels, totals,
    batch_stride, frame_stride, output_stride, walk_stride, frames, outputs, width,
    RESCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    backwards = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    count = tl.load(token_lengths + row).to(tl.int32)
    sound = (length <= frames) & (count < width)
    length = tl.where(sound, length, 0)
    count = tl.where(sound, count, 0)

    # `place` counts along the walk; the others say where in the text that is.
    place = tl.arange(0, BLOCK)
    blank_at = tl.where(backwards == 1, count - place, place)
    token_at = tl.where(backwards == 1, count - 1 - place, place)
    before_at = tl.where(backwards == 1, count - place, place - 1)
    has_before = (place > 0) & (place <= count)
    text = tokens + row * (width - 1)
    token = tl.load(text + token_at, mask=place < count, other=0)
    token_before = tl.load(text + before_at, mask=has_before, other=0)
    known = (token >= 0) & (token < outputs)
    may_skip = has_before & (token != token_before)

    step = 1 - 2 * backwards
    first = (backwards * tl.maximum(length - 1, 0)).to(tl.int64)
    speech = log_probs + row * batch_stride + first * frame_stride
    frame_at = backwards * walk_stride + row * frames + first
    states = scores + frame_at * 2 * width
    level_at = levels + frame_at

    # Before the first frame all alignments stand at the first blank, and have read nothing.
    level = tl.full([], 0.0, tl.float64)
    blank_score = tl.where(place == 0, 0.0, NEVER)
    token_score = tl.full([BLOCK], NEVER, tl.float32)
    before_score = tl.full([BLOCK], NEVER, tl.float32)
    blank_emission = tl.load(speech)
    token_emission = tl.load(speech + token * output_stride, mask=known, other=float("nan"))
    for frame in range(length):
        if frame % RESCALE == RESCALE - 1:
            top = tl.max(tl.maximum(blank_score, token_score), axis=0)
            blank_score -= top
            token_score -= top
            before_score -= top
            level += top.to(tl.float64)
        # The next frame's are asked for early, for they are long on their way; the last frame's, twice.
        speech += tl.where(frame + 1 < length, step * frame_stride, 0)
        next_blank_emission = tl.load(speech)
        next_token_emission = tl.load(speech + token * output_stride, mask=known, other=float("nan"))
        to_blank = _either(blank_score, before_score)
        token_score = _either(token_score, tl.where(may_skip, to_blank, blank_score)) + _finite(token_emission)
        blank_score = to_blank + _finite(blank_emission)
        tl.store(states + blank_at, blank_score, mask=place <= count)
        tl.store(states + width + token_at, token_score, mask=place < count)
        tl.store(level_at, level)
        tl.debug_barrier()  # now each thread may read what its neighbour has stored
        before_score = tl.load(states + width + before_at, mask=has_before, other=NEVER)
        states += step * 2 * width
        level_at += step
        blank_emission = next_blank_emission
        token_emission = next_token_emission

    if backwards == 0:
        last_blank = tl.sum(tl.where(place == count, blank_score, 0.0), axis=0)
        last_token = tl.sum(tl.where(place == count - 1, token_score, 0.0), axis=0)
        total = level + _either(last_blank, tl.where(count > 0, last_token, NEVER)).to(tl.float64)
        total = tl.where(sound, total, float("nan"))
        tl.store(totals + row, total)
        tl.store(losses + row, tl.where(total < 0.5 * NEVER, 0.0, -total).to(tl.float32))


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _occupancy(  # type: ignore[no-untyped-def]
    log_probs, lengths, tokens, token_lengths, gradient, scores, levels, totals,
    batch_stride, frame_stride, output_stride, walk_stride, frames, outputs, width,
    FRAMES: tl.constexpr, PLACES: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Minus the probability, given the text, that a frame reads an output: states of one output, added in order."""
    row = tl.program_id(0).to(tl.int64)
    frame = tl.program_id(1) * FRAMES + tl.arange(0, FRAMES)
    output = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.load(totals + row)
    possible = total >= 0.5 * NEVER  # nor is NaN: its scores may never have been written
    spoken = frame < tl.where(possible, tl.load(lengths + row), 0)
    count = tl.load(token_lengths + row).to(tl.int32)

    speech = log_probs + row * batch_stride + frame.to(tl.int64) * frame_stride
    frame_at = row * frames + frame
    back_at = frame_at + walk_stride
    level = tl.load(levels + frame_at, mask=spoken, other=0.0) + tl.load(levels + back_at, mask=spoken, other=0.0)
    level -= total
    # Both walks contain the emission of the frame at which they meet.
    blank_level = level.to(tl.float32) - _finite(tl.load(speech, mask=spoken, other=0.0))
    of_blank = tl.zeros([FRAMES], tl.float32)
    of_output = tl.zeros([FRAMES, OUTPUTS], tl.float32)
    for start in range(0, tl.where(possible, count + 1, 0), PLACES):
        place = start + tl.arange(0, PLACES)
        forward = scores + (frame_at * 2 * width)[:, None] + place[None, :]
        backward = scores + (back_at * 2 * width)[:, None] + place[None, :]
        at = spoken[:, None] & (place <= count)[None, :]
        score = tl.load(forward, mask=at, other=NEVER) + tl.load(backward, mask=at, other=NEVER)
        of_blank += tl.sum(tl.exp(score + blank_level[:, None]), axis=1)

        at = spoken[:, None] & (place < count)[None, :]
        token = tl.load(tokens + row * (width - 1) + place, mask=place < count, other=-1)
        emission = tl.load(speech[:, None] + token[None, :] * output_stride, mask=at, other=0.0)
        score = tl.load(forward + width, mask=at, other=NEVER) + tl.load(backward + width, mask=at, other=NEVER)
        share = tl.exp(score + (level.to(tl.float32)[:, None] - _finite(emission)))
        reads = (token[:, None] == output[None, :]).to(tl.float32)
        of_output = tl.dot(share, reads, of_output, input_precision="ieee")
    of_output += tl.where(output == 0, 1.0, 0.0)[None, :] * of_blank[:, None]
    result = tl.where(total == total, -of_output, float("nan"))
    inside = (frame < frames)[:, None] & (output < outputs)[None, :]
    tl.store(gradient + frame_at[:, None] * outputs + output[None, :], result, mask=inside)
