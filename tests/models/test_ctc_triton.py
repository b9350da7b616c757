"""The kernels run on a CUDA device, or anywhere (slowly) with TRITON_INTERPRET=1 in the environment."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.triton_marks import DEVICE, needs_cuda, somewhere
from torch import Tensor

from sottovoce.models import ctc

pytestmark = [
    *somewhere,
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # logits_BTV, lengths_B, tokens_BU, token_lengths_B


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    from sottovoce.models import ctc_triton

    return ctc_triton


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ours(kernels: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum by the logits."""
    logits_BTV = batch[0].to(DEVICE).requires_grad_()
    losses_B = kernels.losses(logits_BTV.log_softmax(dim=-1), *batch[1:])
    (gradient_BTV,) = torch.autograd.grad(losses_B.sum(), logits_BTV)
    return losses_B.detach().cpu(), gradient_BTV.cpu()


def torchs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Its implementation for CPUs, in float64."""
    logits_BTV = batch[0].double().requires_grad_()
    log_probs_TBV = logits_BTV.log_softmax(dim=-1).transpose(0, 1)
    losses_B = F.ctc_loss(log_probs_TBV, batch[2], batch[1], batch[3], reduction="none", zero_infinity=True)
    (gradient_BTV,) = torch.autograd.grad(losses_B.sum(), logits_BTV)
    return losses_B.detach(), gradient_BTV


def assert_equal_to_torch(kernels: Any, batch: Batch) -> None:
    for mine, exact in zip(ours(kernels, batch), torchs(batch), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=3e-5)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    size, frames, most = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(0, 6))
    outputs = draw(st.sampled_from([2, 3, 30]))  # few, so that tokens repeat
    texts = st.lists(st.integers(1, outputs - 1), min_size=most, max_size=most)
    tokens_BU = torch.tensor(draw(st.lists(texts, min_size=size, max_size=size))).view(size, most).long()
    lengths_B = draw(st.lists(st.integers(0, frames), min_size=size, max_size=size))
    token_lengths_B = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    logits_BTV = random_logits(size, frames, outputs, seed=draw(st.integers(0, 2**30)))
    return logits_BTV, torch.tensor(lengths_B), tokens_BU, torch.tensor(token_lengths_B)


@settings(deadline=None, max_examples=30)
@given(batch=batches())
def test_equals_torchs_loss_and_gradient_in_float64(kernels: Any, batch: Batch) -> None:
    assert_equal_to_torch(kernels, batch)


# Fits; fits its repeats exactly; one frame too few for them; one token, one frame; no text; no frames; neither.
EDGES: Batch = (
    random_logits(7, 9, 5),
    torch.tensor([9, 5, 4, 1, 6, 0, 0]),
    torch.tensor([[1, 2, 1, 4], [3, 3, 3, 0], [3, 3, 3, 0], [2, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
    torch.tensor([4, 3, 3, 1, 0, 1, 0]),
)


def test_edges_equal_torchs_and_what_is_not_spoken_has_no_gradient(kernels: Any) -> None:
    assert_equal_to_torch(kernels, EDGES)
    losses_B, gradient_BTV = ours(kernels, EDGES)
    assert losses_B[[2, 5, 6]].tolist() == [0, 0, 0]
    assert gradient_BTV[2].eq(0).all()
    padding_BT = torch.arange(9) >= EDGES[1][:, None]
    assert gradient_BTV[padding_BT].eq(0).all()
    assert gradient_BTV[~padding_BT & (losses_B > 0)[:, None]].ne(0).all()


@pytest.mark.parametrize(("frames", "tokens", "outputs"), [(160, 70, 30), (24, 9, 150)])
def test_long_texts_and_many_outputs_keep_their_accuracy(kernels: Any, frames: int, tokens: int, outputs: int) -> None:
    tokens_BU = torch.randint(1, outputs, (1, tokens), generator=torch.Generator().manual_seed(1))
    logits_BTV = random_logits(1, frames, outputs)
    assert_equal_to_torch(kernels, (logits_BTV, torch.tensor([frames]), tokens_BU, torch.tensor([tokens])))


def test_each_spoken_frame_reads_exactly_one_output(kernels: Any) -> None:
    log_probs_BTV = EDGES[0].log_softmax(dim=-1).to(DEVICE).requires_grad_()
    losses_B = kernels.losses(log_probs_BTV, *EDGES[1:])
    (gradient_BTV,) = torch.autograd.grad(losses_B.sum(), log_probs_BTV)
    spoken_BT = (torch.arange(9) < EDGES[1][:, None]) & (losses_B > 0).cpu()[:, None]
    torch.testing.assert_close(-gradient_BTV.sum(dim=-1).cpu(), spoken_BT.float(), rtol=0, atol=1e-5)


def test_same_bits_again_and_whatever_the_batch(kernels: Any) -> None:
    """Alone, an utterance needs fewer frames and places than in company."""
    losses_B, gradient_BTV = ours(kernels, EDGES)
    for again, first in zip(ours(kernels, EDGES), (losses_B, gradient_BTV), strict=True):
        assert torch.equal(again, first)
    logits_BTV, lengths_B, tokens_BU, token_lengths_B = EDGES
    wide_BU = F.pad(tokens_BU, (0, 40))
    long_BTV = F.pad(logits_BTV, (0, 0, 0, 30))
    for batch in (
        (logits_BTV[1:2, :5], lengths_B[1:2], tokens_BU[1:2, :3], token_lengths_B[1:2]),
        (long_BTV[1:], lengths_B[1:], wide_BU[1:], token_lengths_B[1:]),
    ):
        loss_B, its_gradient_BTV = ours(kernels, batch)
        assert torch.equal(loss_B[0], losses_B[1])
        assert torch.equal(its_gradient_BTV[0, :5], gradient_BTV[1, :5])


def test_any_strides_integers_and_places_and_no_gradient_give_the_same_bits(kernels: Any) -> None:
    losses_B, gradient_BTV = ours(kernels, EDGES)
    logits_BTV, *texts = EDGES
    log_probs_BTV = logits_BTV.to(DEVICE).log_softmax(dim=-1)
    strided_BTV = log_probs_BTV.permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    lengths_B, tokens_BU, token_lengths_B = (tensor.int().to(DEVICE) for tensor in texts)
    tokens_BU = tokens_BU.T.contiguous().T
    results_B = kernels.losses(strided_BTV, lengths_B, tokens_BU, token_lengths_B)
    assert torch.equal(results_B.cpu(), losses_B)
    with torch.no_grad():
        assert torch.equal(kernels.losses(strided_BTV, *texts).cpu(), losses_B)
    (by_log_probs_BTV,) = torch.autograd.grad((2 * results_B).sum(), strided_BTV)
    by_logits_BTV = by_log_probs_BTV - log_probs_BTV.exp() * by_log_probs_BTV.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(by_logits_BTV.cpu(), 2 * gradient_BTV)


def test_what_is_broken_is_nan_and_spoils_nobody_else(kernels: Any) -> None:
    logits_BTV, lengths_B, tokens_BU, token_lengths_B = (tensor[[0, 0, 0, 0, 0]].clone() for tensor in EDGES)
    logits_BTV[1, 3] = torch.nan
    lengths_B[2] = 10  # there are 9
    token_lengths_B[3] = 5  # there are 4
    tokens_BU[4, 1] = 5  # the last output is 4
    losses_B, gradient_BTV = ours(kernels, (logits_BTV, lengths_B, tokens_BU, token_lengths_B))
    sound = ours(kernels, EDGES)
    assert torch.equal(losses_B[0], sound[0][0])
    assert torch.equal(gradient_BTV[0], sound[1][0])
    assert losses_B[1:].isnan().all()
    assert gradient_BTV[1:].isnan().all()


def test_probabilities_of_zero_are_obeyed(kernels: Any) -> None:
    logits_BTV = EDGES[0][:2].clone()
    logits_BTV[0, 4, 3] = -torch.inf  # read by no alignment of 1 2 1 4
    logits_BTV[0, 3, 0] = -torch.inf  # read by some
    logits_BTV[1, 1, 0] = -torch.inf  # read by the only alignment of 3 3 3 with five frames
    texts = EDGES[1][:2], EDGES[2][:2], EDGES[3][:2]
    losses_B, gradient_BTV = ours(kernels, (logits_BTV, *texts))
    assert losses_B[1] == 0
    assert gradient_BTV[1].eq(0).all()
    logits_BTV[0, [4, 3], [3, 0]] = -1e4
    exact_B, exact_BTV = torchs((logits_BTV, *texts))
    torch.testing.assert_close(losses_B[0].double(), exact_B[0], rtol=1e-6, atol=3e-5)
    torch.testing.assert_close(gradient_BTV[0].double(), exact_BTV[0], rtol=1e-6, atol=3e-5)


def test_what_the_kernels_cannot_do_is_left_to_torch(kernels: Any) -> None:
    log_probs_BTV, tokens_BU = torch.zeros(1, 2, 3), torch.zeros(1, 1024, dtype=torch.long)
    assert kernels.takes_batch(log_probs_BTV, tokens_BU[:, :1023])
    assert not kernels.takes_batch(log_probs_BTV, tokens_BU)
    assert not kernels.takes_batch(log_probs_BTV.double(), tokens_BU[:, :4])
    assert not kernels.takes_batch(log_probs_BTV[:0], tokens_BU[:0, :4])


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_cuda_the_loss_waits_for_nothing_and_can_be_captured_in_a_graph(kernels: Any) -> None:
    logits_BTV = EDGES[0].to(DEVICE).requires_grad_()
    texts = [tensor.to(DEVICE) for tensor in EDGES[1:]]

    def step(*texts: Tensor) -> tuple[Tensor, Tensor]:
        loss = ctc.mean_ctc_loss(logits_BTV.log_softmax(dim=-1), *texts)
        return loss.detach(), torch.autograd.grad(loss, logits_BTV)[0]

    first = step(*EDGES[1:])
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step(*EDGES[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step(*texts)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*texts)
    graph.replay()
    for results in (second, captured):
        for result, expected in zip(results, first, strict=True):
            assert torch.equal(result, expected)
    exact = ctc.mean_ctc_loss(EDGES[0].double().log_softmax(dim=-1), *EDGES[1:])
    torch.testing.assert_close(first[0].cpu().double(), exact, rtol=1e-6, atol=1e-5)
