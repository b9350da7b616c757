"""The kernels run on a CUDA device, or anywhere (slowly) with TRITON_INTERPRET=1 in the environment."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.triton_marks import DEVICE, INTERPRETED, needs_cuda, somewhere
from torch import Tensor

from sottovoce.models import rnnt

pytestmark = [
    *somewhere,
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # float64, sums of a few hundred

Lattice = tuple[Tensor, Tensor, Tensor, Tensor]  # blank_BTW, label_BTW, lengths_B, token_lengths_B


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    from sottovoce.models import rnnt_triton

    return rnnt_triton


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lattice(lengths: list[int], tokens: list[int], *, seed: int = 0) -> Lattice:
    """Log-probabilities of random nodes, and what is not a number behind each utterance."""
    lengths_B, token_lengths_B = torch.tensor(lengths), torch.tensor(tokens)
    shape = (len(lengths), max(lengths), max(tokens) + 1)
    values = [-(normal(*shape, seed=seed + i).abs()) - 0.1 for i in range(2)]
    outside = torch.arange(shape[1])[:, None] >= lengths_B[:, None, None]
    outside = outside | (torch.arange(shape[2]) > token_lengths_B[:, None, None])
    blank_BTW, label_BTW = (value.masked_fill(outside, torch.nan) for value in values)
    return blank_BTW, label_BTW, lengths_B, token_lengths_B


def assert_walks_equal(kernels: Any, given: Lattice) -> None:
    found = kernels.both_ways(*(tensor.to(DEVICE) for tensor in given))
    exact = rnnt.both_ways_over_diagonals(*given)
    inside = torch.arange(given[0].shape[1])[:, None] < given[2][:, None, None]
    inside = inside & (torch.arange(given[0].shape[2]) <= given[3][:, None, None])
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.cpu()[inside], expected[inside], **EXACT)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=3).filter(
        lambda sizes: any(frames for frames, _ in sizes)
    ),
    seed=st.integers(0, 2**30),
)
def test_the_lattice_is_that_of_torch(kernels: Any, sizes: list[tuple[int, int]], seed: int) -> None:
    lengths, tokens = map(list, zip(*sizes, strict=True))
    assert_walks_equal(kernels, lattice(lengths, tokens, seed=seed))


@pytest.mark.parametrize(("frames", "tokens"), [(90, 70), (1, 40), (60, 0)])
def test_long_lattices_keep_their_accuracy(kernels: Any, frames: int, tokens: int) -> None:
    assert_walks_equal(kernels, lattice([frames, 3], [tokens, min(tokens, 2)]))


def test_probabilities_of_zero_are_obeyed(kernels: Any) -> None:
    given = lattice([4, 4, 4], [2, 2, 2])
    given[0][0, 1, 1] = -torch.inf  # passed by some alignments
    given[0][1, 3, 2] = -torch.inf  # passed by all
    given[1][2, :, 0] = -torch.inf
    assert_walks_equal(kernels, given)


def test_what_is_not_a_number_spoils_nobody_else(kernels: Any) -> None:
    given = lattice([4, 4], [2, 2])
    given[0][0, 1, 1] = torch.nan
    back = kernels.both_ways(*(tensor.to(DEVICE) for tensor in given))[1].cpu()
    assert back[0, 0, 0].isnan()
    torch.testing.assert_close(back[1], rnnt.both_ways_over_diagonals(*given)[1][1], **EXACT)


def nodes(dtype: torch.dtype, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [C, W, V], each place's next token, and shares cut out of longer rows."""
    logits_CWV = normal(3, 4, outputs).to(DEVICE, dtype)
    next_W = torch.tensor([1, outputs - 1, 1, 0], device=DEVICE)
    shares = normal(2, 3, 6).abs().to(DEVICE, torch.float32)
    shares[1, :, 3] = 0  # nothing follows the last place
    return logits_CWV, next_W, shares[0, :, :4], shares[1, :, :4]


# The interpreter knows no arithmetic of bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16]))
@pytest.mark.parametrize("outputs", [2, 7, 600])
def test_nodes_are_read_and_pulled_as_by_torch(kernels: Any, dtype: torch.dtype, outputs: int) -> None:
    """Read to float32's rounding of sums of `outputs`; pulled to that of the logits' own type."""
    logits_CWV, next_W, blank_CW, label_CW = nodes(dtype, outputs)
    logits_CWV[..., -1] = -torch.inf if outputs == 7 else 1.0  # as where outputs are aligned
    next_W[1] = 1
    exact = [tensor.cpu().double() for tensor in (logits_CWV, blank_CW, label_CW)]
    for found, expected in zip(kernels.read_nodes(logits_CWV, next_W), rnnt._read(exact[0], next_W.cpu()), strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=1e-5)
    pulled_CWV = kernels.pull(logits_CWV, next_W, blank_CW, label_CW)
    assert pulled_CWV.dtype == dtype
    expected = rnnt._pull(exact[0], next_W.cpu(), *exact[1:])
    torch.testing.assert_close(pulled_CWV.cpu().double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16] + ([] if INTERPRETED else [torch.bfloat16]))
@pytest.mark.parametrize(("frames", "places", "width"), [(3, 4, 8), (9, 5, 130), (17, 1, 200)])
def test_joints_are_joined_and_parted_as_by_torch(
    kernels: Any, dtype: torch.dtype, frames: int, places: int, width: int
) -> None:
    """Joined to the rounding of 16 bits; parted, in float32, to that of sums of `frames` or `places`."""
    encoded_CJ, predicted_WJ = (4 * normal(rows, width, seed=rows).to(DEVICE, dtype) for rows in (frames, places))
    joined_CWJ = kernels.joined(encoded_CJ, predicted_WJ)
    exact_CWJ = (encoded_CJ.double()[:, None] + predicted_WJ.double()).tanh()
    torch.testing.assert_close(joined_CWJ.double(), exact_CWJ, rtol=torch.finfo(dtype).eps, atol=2**-24)
    gradient_CWJ = normal(frames, places, width).to(DEVICE, dtype)
    pulled_CWJ = gradient_CWJ.double() * (1 - joined_CWJ.double() ** 2)
    for found, dim in zip(kernels.parted(gradient_CWJ, joined_CWJ), (1, 0), strict=True):
        expected = pulled_CWJ.sum(dim=dim)
        rounding = 2**-24 * (2 + max(frames, places)) * pulled_CWJ.abs().sum(dim=dim)
        assert bool(((found.double() - expected).abs() <= rounding + 2**-23 * gradient_CWJ.abs().sum(dim=dim)).all())


def test_what_the_kernels_cannot_do_is_left_to_torch(kernels: Any) -> None:
    assert kernels.takes_logits(torch.zeros(1, 1, 16_384))
    assert not kernels.takes_logits(torch.zeros(1, 1, 16_385))
    assert not kernels.takes_logits(torch.zeros(1, 1, 4, dtype=torch.float64))
    assert kernels.joins(torch.zeros(1, 4, dtype=torch.bfloat16))
    assert not kernels.joins(torch.zeros(1, 4))
    assert kernels.walks(torch.zeros(1, 1, 1024))
    assert not kernels.walks(torch.zeros(1, 1, 1025))


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_cuda_the_loss_is_the_processors_and_waits_for_nothing(kernels: Any) -> None:
    lengths_B, token_lengths_B = torch.tensor([9, 4, 1]), torch.tensor([3, 5, 0])
    texts = (lengths_B, torch.randint(1, 11, (3, 5), generator=torch.Generator().manual_seed(1)), token_lengths_B)
    inputs = [normal(*shape, seed=i).float() for i, shape in enumerate(((3, 9, 8), (3, 6, 8), (11, 8), (11,)))]

    def step(device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            losses_B = rnnt.joint_losses(*leaves, *texts)  # type: ignore[call-arg]
            found = [losses_B, *torch.autograd.grad(losses_B.sum(), leaves)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [tensor.detach().cpu().double() for tensor in found]

    exact = step("cpu", torch.float64)
    first, again = (step("cuda", torch.float32) for _ in range(2))
    for ours, repeated, expected in zip(first, again, exact, strict=True):
        assert torch.equal(ours, repeated)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for ours, expected in zip(step("cuda", torch.bfloat16), exact, strict=True):
        # Eight bits of mantissa: inputs, sums, logits, gradients and their products are rounded, at worst the same way.
        assert float((ours - expected).norm()) < 8 * 2**-7 * float(expected.norm())
