"""Dropout from a key for each row. The kernels run on a CUDA device, or anywhere (slowly) with TRITON_INTERPRET=1."""

import math

import pytest
import torch
from tests.triton_marks import DEVICE, INTERPRETED, somewhere
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.models.transformer.dropout import keyed_attention, keyed_dropout, keyed_relu_dropout

HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies bfloat16 as integers
pytestmark = [
    *somewhere,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

KEYS = (2**61 + 12345, 17, 2**40 + 3)
RATE = 0.3
HEADS, CHANNELS = 2, 24
# Of each row: utterances, then padding up to the row's length; one utterance is longer than a block of the kernels.
ROWS = ((70, 5), (33,), (1, 20, 2))
ROW_FRAMES = 96


@pytest.fixture(autouse=True, scope="module")
def _triton() -> None:
    pytest.importorskip("triton")


def random(*shape: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=torch_stream(1, name)).to(DEVICE)


@pytest.mark.parametrize("function", [keyed_dropout, keyed_relu_dropout])
def test_a_row_is_dropped_by_its_own_key_whoever_stands_beside_it_and_however_long_rows_are(function: object) -> None:
    assert callable(function)
    x_NLD = random(3, 40, 129, name="x")
    keys_N = torch.tensor(KEYS, device=DEVICE)
    whole = function(x_NLD, keys_N, RATE)
    order = [2, 0]
    fewer = function(x_NLD[order, :25], keys_N[order], RATE)
    assert torch.equal(fewer, whole[order, :25])
    assert not torch.equal(function(x_NLD[:1], keys_N[1:2], RATE), whole[:1])
    kept = whole != 0
    torch.testing.assert_close(whole[kept], x_NLD[kept] / (1 - RATE), rtol=1e-4, atol=0)
    alive = x_NLD > 0 if function is keyed_relu_dropout else x_NLD != 0
    for row in range(3):  # 5,160 elements, or half of them: four standard deviations are at most 0.036
        assert float(kept[row].sum() / alive[row].sum()) == pytest.approx(1 - RATE, abs=0.036)
    # Two rows agree as often as independent ones do: p² + (1 − p)² of the time.
    both = alive[0] & alive[1]
    alike = (kept[0] == kept[1])[both].float().mean()
    assert float(alike) == pytest.approx(RATE**2 + (1 - RATE) ** 2, abs=0.06)


@pytest.mark.parametrize("function", [keyed_dropout, keyed_relu_dropout])
def test_the_gradient_flows_where_something_was_kept(function: object) -> None:
    assert callable(function)
    x_NLD = random(3, 40, 129, name="x").requires_grad_()
    y_NLD = function(x_NLD, torch.tensor(KEYS, device=DEVICE), RATE)
    gradient = random(3, 40, 129, name="gradient")
    (found,) = torch.autograd.grad(y_NLD, x_NLD, gradient)
    torch.testing.assert_close(found, torch.where(y_NLD != 0, gradient / (1 - RATE), 0), rtol=1e-4, atol=0)


def ends_of(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """As `plan_packing` has them: padding is a segment too, and empty ones follow."""
    ends = [0]
    for number, row in enumerate(rows):
        for length in row:
            ends.append(ends[-1] + length)
        ends.append((number + 1) * ROW_FRAMES)
    return torch.tensor([*ends, *ends[-1:] * 3], dtype=torch.int32, device=DEVICE)


def attended(qkv: Tensor, rows: tuple[tuple[int, ...], ...], keys: tuple[int, ...]) -> Tensor:
    keys_N = torch.tensor(keys, device=DEVICE)
    return keyed_attention(qkv, keys_N, ends=ends_of(rows), longest=128, dropout=RATE)


def masks_of(rows: tuple[tuple[int, ...], ...], keys: tuple[int, ...]) -> Tensor:
    """[F, H, F]: what each weight is multiplied by, seen through equal weights and values that name their frame."""
    frames = len(rows) * ROW_FRAMES
    masks = torch.zeros(frames, HEADS, frames, device=DEVICE)
    lengths = torch.diff(ends_of(rows))
    of_segment = torch.repeat_interleave(lengths, lengths)  # for each frame, how many it attends to
    for first in range(0, frames, CHANNELS):
        qkv = torch.zeros(frames, 3, HEADS, CHANNELS, device=DEVICE)
        for channel in range(min(CHANNELS, frames - first)):
            qkv[first + channel, 2, :, channel] = 1
        seen = attended(qkv, rows, keys)
        masks[:, :, first : first + CHANNELS] = seen[..., : frames - first] * of_segment[:, None, None]
    return masks


def test_attention_drops_weights_by_the_clients_own_key() -> None:
    masks = masks_of(ROWS, KEYS)
    scale = 1 / (1 - RATE)
    longest = masks[:70, :, :70]
    assert ((longest.abs() < 1e-3) | ((longest - scale).abs() < 1e-3)).all()
    # 9,800 weights: four standard deviations are 0.019.
    assert float((longest > 0.5).float().mean()) == pytest.approx(1 - RATE, abs=0.019)
    assert not torch.equal(longest[:, 0], longest[:, 1])  # heads differ
    assert not masks[:70, :, 70:].any()  # utterances keep to themselves

    alone = masks_of(ROWS[2:], KEYS[2:])
    assert torch.equal(alone, masks[2 * ROW_FRAMES :, :, 2 * ROW_FRAMES :])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_attention_and_its_gradient_are_those_of_the_whole_matrix_of_weights(dtype: torch.dtype) -> None:
    """Against float64 with the same masks. Rounding: some units of the type, and the sums are short."""
    frames = len(ROWS) * ROW_FRAMES
    qkv = random(frames, 3, HEADS, CHANNELS, name="qkv").to(dtype)
    gradient = random(frames, HEADS, CHANNELS, name="gradient").to(dtype)
    masks = masks_of(ROWS, KEYS).double()
    masks = torch.where(masks > 0.5, 65536 / (65536 - round(RATE * 65536)), 0.0).transpose(0, 1)

    exact = qkv.double().requires_grad_()
    q, k, v = exact.permute(1, 2, 0, 3)
    lengths = torch.diff(ends_of(ROWS))
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)
    scores = (q @ k.mT / math.sqrt(CHANNELS)).masked_fill(segment[:, None] != segment, -math.inf)
    expected = (scores.softmax(-1) * masks @ v).transpose(0, 1)
    (expected_gradient,) = torch.autograd.grad(expected, exact, gradient.double())

    ours = qkv.requires_grad_()
    found = attended(ours, ROWS, KEYS)
    (found_gradient,) = torch.autograd.grad(found, ours, gradient)
    tolerance = 40 * torch.finfo(dtype).eps / 2
    assert found.dtype == found_gradient.dtype == dtype
    assert (found.double() - expected).norm() <= tolerance * expected.norm()
    for part in range(3):
        apart = (found_gradient[:, part].double() - expected_gradient[:, part]).norm()
        assert apart <= tolerance * expected_gradient[:, part].norm()


def test_what_is_not_finite_stays_in_its_own_row() -> None:
    frames = len(ROWS) * ROW_FRAMES
    qkv = random(frames, 3, HEADS, CHANNELS, name="qkv")
    spoilt = qkv.clone()
    spoilt[ROW_FRAMES : 2 * ROW_FRAMES] = torch.nan
    results = []
    for given in (qkv, spoilt):
        leaf = given.clone().requires_grad_()
        mixed = attended(leaf, ROWS, KEYS)
        results.append((mixed, torch.autograd.grad(mixed, leaf, torch.ones_like(mixed))[0]))
    for whole, own in zip(*results, strict=True):
        assert torch.equal(own[:ROW_FRAMES], whole[:ROW_FRAMES])
        assert torch.equal(own[2 * ROW_FRAMES :], whole[2 * ROW_FRAMES :])
        assert own[ROW_FRAMES : 2 * ROW_FRAMES].isnan().any()
