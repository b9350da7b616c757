"""The transducer's loss: golden values, every path counted, gradients, chunks, padding, and what must always hold."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import rnnt

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rnnt.json").read_text(encoding="utf-8"))["cases"]
GOLDEN_ROUNDING = 2e-6  # of what others computed in float32
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # float64, and sums of a few hundred


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_logits(logits: Tensor, *texts: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum."""
    leaf = logits.detach().requires_grad_()
    losses_B = rnnt.logit_losses(leaf, *texts)  # type: ignore[call-arg]
    return losses_B.detach(), torch.autograd.grad(losses_B.sum(), leaf)[0]


def of_joint(inputs: list[Tensor], *texts: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    losses_B = rnnt.joint_losses(*leaves, *texts)  # type: ignore[call-arg]
    return [losses_B.detach(), *torch.autograd.grad(losses_B.sum(), leaves)]


def by_hand(inputs: list[Tensor], *texts: Tensor) -> list[Tensor]:
    """The joint as a whole, and autograd through it."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    encoded, predicted, weight, bias = leaves
    losses_B = rnnt.logit_losses(F.linear((encoded[:, :, None] + predicted[:, None]).tanh(), weight, bias), *texts)  # type: ignore[call-arg]
    return [losses_B.detach(), *torch.autograd.grad(losses_B.sum(), leaves)]


def read_by_hand(logits: Tensor, tokens_BU: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T, W] of the blank and of the next token."""
    log_probs = logits.log_softmax(dim=-1)
    next_BTW1 = F.pad(tokens_BU, (0, 1))[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
    return log_probs[..., 0], log_probs.gather(3, next_BTW1)[..., 0]


# Two of unequal length, all tokens in one frame, no text, no frames.
LENGTHS, TOKEN_LENGTHS = torch.tensor([5, 3, 1, 4, 0]), torch.tensor([2, 4, 4, 0, 1])
TOKENS = torch.tensor([[1, 2, 0, 0], [3, 3, 1, 4], [5, 6, 6, 5], [0, 0, 0, 0], [1, 0, 0, 0]])
TEXTS = (LENGTHS, TOKENS, TOKEN_LENGTHS)
JOINT = [normal(5, 5, 6, seed=1), normal(5, 5, 6, seed=2), normal(7, 6, seed=3), normal(7, seed=4)]


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_costs_and_gradients_of_other_projects(case: dict[str, Any]) -> None:
    targets = torch.tensor(case["targets"]).view(len(case["targets"]), -1).long()
    texts = (torch.tensor(case["frames"]), targets, torch.tensor(case["target_lengths"]))
    losses_B, gradient = of_logits(torch.tensor(case["logits"], dtype=torch.float64), *texts)
    expected_B = torch.tensor(case["costs"], dtype=torch.float64)
    torch.testing.assert_close(losses_B, expected_B, rtol=0, atol=GOLDEN_ROUNDING)
    if case["gradient"] is not None:
        expected = torch.tensor(case["gradient"], dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=GOLDEN_ROUNDING)


def every_path(log_probs_TWV: Tensor, tokens: list[int]) -> float:
    """-log of the sum over all orders of blanks and tokens of which the last is a blank."""
    frames, steps = len(log_probs_TWV), len(log_probs_TWV) + len(tokens)
    total = []
    for places in combinations(range(steps - 1), len(tokens)):
        frame = place = 0
        score = 0.0
        for step in range(steps):
            if step in places:
                score += float(log_probs_TWV[frame, place, tokens[place]])
                place += 1
            else:
                score += float(log_probs_TWV[frame, place, 0])
                frame += 1
        total.append(score)
    assert len(total) == math.comb(frames - 1 + len(tokens), len(tokens))
    return -float(torch.tensor(total, dtype=torch.float64).logsumexp(0))


@settings(deadline=None, max_examples=25)
@given(frames=st.integers(1, 4), count=st.integers(0, 4), seed=st.integers(0, 2**30))
def test_it_is_the_sum_over_every_path(frames: int, count: int, seed: int) -> None:
    logits = 3 * normal(1, frames, count + 1, 4, seed=seed)
    tokens = torch.randint(1, 4, (1, count), generator=torch.Generator().manual_seed(seed))
    found = rnnt.logit_losses(logits, torch.tensor([frames]), tokens, torch.tensor([count]))
    expected = every_path(logits[0].log_softmax(dim=-1), tokens[0].tolist())
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_gradients_are_those_of_small_steps() -> None:
    logits = normal(5, 5, 5, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: rnnt.logit_losses(given, *TEXTS), (logits,))
    leaves = [tensor.clone().requires_grad_() for tensor in JOINT]
    assert torch.autograd.gradcheck(lambda *given: rnnt.joint_losses(*given, *TEXTS), leaves)


@pytest.mark.parametrize("logits", [1, 40, 10**6])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    """A frame at a time, a frame or two, or all at once."""
    expected = by_hand(JOINT, *TEXTS)
    monkeypatch.setattr(rnnt, "CPU_CHUNK_LOGITS", logits)
    for found, whole in zip(of_joint(JOINT, *TEXTS), expected, strict=True):
        torch.testing.assert_close(found, whole, **EXACT)


@st.composite
def utterances(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    size = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))
    counts = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    tokens = torch.randint(1, 5, (size, max(counts)), generator=generator)
    return torch.tensor(lengths), tokens, torch.tensor(counts)


@settings(deadline=None, max_examples=40)
@given(texts=utterances())
def test_what_must_always_hold(texts: tuple[Tensor, Tensor, Tensor]) -> None:
    """Every frame is left once, by a blank; every token is read once; no gradient changes a softmax's sum."""
    lengths_B, tokens_BU, counts_B = texts
    frames, width = max(int(lengths_B.max()), 1), tokens_BU.shape[1] + 1
    logits = 4 * normal(len(lengths_B), frames, width, 5)
    losses_B, gradient = of_logits(logits, *texts)
    spoken_B = lengths_B > 0
    assert (losses_B[spoken_B] > 0).all()
    assert losses_B[~spoken_B].eq(0).all()
    torch.testing.assert_close(gradient.sum(dim=-1), torch.zeros(gradient.shape[:-1], dtype=torch.float64), **EXACT)
    walked = rnnt.walk(*read_by_hand(logits, tokens_BU), lengths_B, counts_B)
    of_frames = torch.arange(frames) < lengths_B[:, None]
    of_tokens = (torch.arange(width) < counts_B[:, None]) & spoken_B[:, None]
    torch.testing.assert_close(walked.blank_BTW.sum(dim=2), of_frames.double(), **EXACT)
    torch.testing.assert_close(walked.label_BTW.sum(dim=1), of_tokens.double(), **EXACT)


def test_an_utterance_has_the_same_bits_in_any_batch_and_padding_has_no_gradient() -> None:
    inputs = [tensor.float() for tensor in JOINT]
    losses_B, of_encoded, of_predicted, *_ = of_joint(inputs, *TEXTS)
    padded = [F.pad(inputs[0], (0, 0, 0, 3), value=torch.nan), F.pad(inputs[1], (0, 0, 0, 2), value=torch.nan)]
    for b, (frames, count) in enumerate(zip(LENGTHS.tolist(), TOKEN_LENGTHS.tolist(), strict=True)):
        padded[0][b, frames:], padded[1][b, count + 1 :] = torch.nan, torch.nan
        assert of_encoded[b, frames:].eq(0).all()
        assert of_predicted[b, count + 1 :].eq(0).all()
        own = [inputs[0][b : b + 1, : max(frames, 1)], inputs[1][b : b + 1, : count + 1], *inputs[2:]]
        texts = (LENGTHS[b : b + 1], TOKENS[b : b + 1, :count], TOKEN_LENGTHS[b : b + 1])
        alone, its_encoded, its_predicted, *_ = of_joint(own, *texts)
        assert torch.equal(alone[0], losses_B[b])
        assert torch.equal(its_encoded[0, :frames], of_encoded[b, :frames])
        assert torch.equal(its_predicted[0], of_predicted[b, : count + 1])
    again_B, *gradients = of_joint([*padded, *inputs[2:]], LENGTHS, F.pad(TOKENS, (0, 2), value=99), TOKEN_LENGTHS)
    assert torch.equal(again_B, losses_B)
    assert torch.equal(gradients[0][:, :5], of_encoded)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_what_is_frozen_has_no_gradient() -> None:
    encoded = JOINT[0].clone().requires_grad_()
    losses_B = rnnt.joint_losses(encoded, *JOINT[1:], *TEXTS)  # type: ignore[call-arg]
    (alone,) = torch.autograd.grad(losses_B.sum(), [encoded])
    torch.testing.assert_close(alone, of_joint(JOINT, *TEXTS)[1], **EXACT)


def test_sixteen_bits_are_aligned_and_added_up_in_thirty_two() -> None:
    """Seven outputs become eight, of which nobody sees the last. Eight bits of mantissa, rounded four times over."""
    halves = [tensor.bfloat16() for tensor in JOINT]
    found = of_joint(halves, *TEXTS)
    assert found[0].dtype == torch.float32
    for ours, exact in zip(found, of_joint([half.double() for half in halves], *TEXTS), strict=True):
        assert ours.shape == exact.shape
        assert float((ours.double() - exact).norm()) < 4 * 2**-7 * float(exact.norm())


def test_long_utterances_keep_their_accuracy() -> None:
    """Where a lattice of float32 errs by thousandths: shares of the blank still add up to one in every frame."""
    logits = 2 * normal(1, 500, 81, 5, seed=9)
    tokens = torch.randint(1, 5, (1, 80), generator=torch.Generator().manual_seed(9))
    walked = rnnt.walk(*read_by_hand(logits, tokens), torch.tensor([500]), torch.tensor([80]))
    torch.testing.assert_close(walked.blank_BTW.sum(dim=2), torch.ones(1, 500, dtype=torch.float64), **EXACT)


def test_a_probability_of_zero_is_obeyed_and_no_way_at_all_costs_nothing() -> None:
    logits = normal(2, 3, 2, 4)
    logits[0, 1, 0, 1] = -torch.inf  # one of three ways
    logits[1, :, 0, 1] = -torch.inf  # all of them
    losses_B, gradient = of_logits(logits, torch.tensor([3, 3]), torch.tensor([[1], [1]]), torch.tensor([1, 1]))
    assert float(losses_B[0]) == pytest.approx(every_path(logits[0].log_softmax(dim=-1), [1]), rel=1e-12)
    assert gradient[0].isfinite().all()
    assert losses_B[1] == 0
    assert gradient[1].eq(0).all()


def test_what_is_not_a_number_spoils_nobody_else() -> None:
    inputs = [tensor.clone() for tensor in JOINT]
    inputs[0][1, 1] = torch.nan
    losses_B, of_encoded, *_ = of_joint(inputs, *TEXTS)
    assert losses_B.isnan().tolist() == [False, True, False, False, False]
    assert of_encoded.isnan().any(dim=2).any(dim=1).tolist() == [False, True, False, False, False]


def test_the_mean_counts_who_has_a_frame() -> None:
    losses_B = rnnt.joint_losses(*JOINT, *TEXTS)  # type: ignore[call-arg]
    torch.testing.assert_close(rnnt.mean(losses_B, LENGTHS), losses_B[:4].mean(), **EXACT)
    nobody = torch.zeros_like(LENGTHS)
    assert float(rnnt.mean(rnnt.joint_losses(*JOINT, nobody, TOKENS, TOKEN_LENGTHS), nobody)) == 0  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [6, 3, 1, 4, 0]}, "an utterance of 6 frames, expected at most 5"),
        ({"counts": [2, 5, 4, 0, 1]}, "an utterance of 5 tokens, expected at most 4"),
        ({"token": 0}, "token 0 in a text, expected 1 to 6"),
        ({"token": 7}, "token 7 in a text, expected 1 to 6"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    tokens = TOKENS.clone()
    tokens[1, 2] = changes.get("token", 1)
    lengths, counts = changes.get("lengths", LENGTHS.tolist()), changes.get("counts", TOKEN_LENGTHS.tolist())
    with pytest.raises(InputError, match=message):
        rnnt.joint_losses(*JOINT, torch.tensor(lengths), tokens, torch.tensor(counts))  # type: ignore[call-arg]
