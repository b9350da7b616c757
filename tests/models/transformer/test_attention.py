"""Attention in bfloat16 on a processor: two products of matrices, as near to the exact one as eight bits allow."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.models.transformer import linear
from sottovoce.models.transformer.linear import attend_lines

# B lines, H heads, T frames, d channels of a head.
SHAPE = B, H, T, D = 3, 4, 50, 32
LENGTHS = torch.tensor([50, 31, 4])
MASK = (torch.arange(T) < LENGTHS[:, None])[:, None, None]
UNIT = 2.0**-9  # what rounding to bfloat16 moves a number by, of itself


def given() -> list[Tensor]:
    """q, k and v of bfloat16 numbers, whose scores matter: their spread is near 2."""
    random = torch.Generator().manual_seed(1)
    return [(scale * torch.randn(SHAPE, generator=random)).bfloat16().requires_grad_() for scale in (2.0, 1.0, 1.0)]


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The scores before the softmax, and what attention gives, in float64."""
    q, k, v = (part.double() for part in (q, k, v))
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~MASK, -math.inf)
    return scores, scores.softmax(dim=-1) @ v


def allowed(scores: Tensor, v: Tensor) -> float:
    """Of each number: a score is rounded once, which moves its weight by that much, of itself, and the sum of the
    weights by as much again; then the weight is rounded, and the result."""
    largest = scores.detach().masked_fill(scores.isinf(), 0).abs().max()
    return float((2 * largest + 2) * UNIT * v.detach().double().abs().max())


def furthest(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).detach().abs().max())


def test_it_is_the_exact_one_up_to_eight_bits() -> None:
    q, k, v = given()
    scores, expected = exact(q, k, v)
    found = attend_lines(q, k, v, mask=MASK, dropout=0.0)
    assert found.dtype == torch.bfloat16
    assert furthest(found, expected) < allowed(scores, v)


@pytest.mark.parametrize(
    "fault",
    [
        lambda q, k, v: attend_lines(2 * q, k, v, mask=MASK, dropout=0.0),
        lambda q, k, v: attend_lines(q, k, v, mask=torch.ones_like(MASK), dropout=0.0),
        lambda q, k, v: attend_lines(k, q, v, mask=MASK, dropout=0.0),
    ],
    ids=["scale", "mask", "exchanged"],
)
def test_a_fault_is_no_rounding(fault: Callable[..., Tensor]) -> None:
    q, k, v = given()
    scores, expected = exact(q, k, v)
    assert furthest(fault(q, k, v), expected) > allowed(scores, v)


def test_its_gradients_are_the_exact_ones_up_to_eight_bits() -> None:
    """Of their length. Five products and a softmax, each rounded: nine roundings, which all could agree in sign."""
    leaves = given()
    twins = [part.detach().double().requires_grad_() for part in leaves]
    along = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(attend_lines(*leaves, mask=MASK, dropout=0.0), leaves, along.bfloat16())
    theirs = torch.autograd.grad(exact(*twins)[1], twins, along.bfloat16().double())
    for own, twin in zip(ours, theirs, strict=True):
        assert float((own.double() - twin).norm() / twin.norm()) < 9 * UNIT


def test_evaluation_long_lines_and_float32_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = given()
    of_torch = F.scaled_dot_product_attention
    with torch.no_grad():
        still = [part.detach() for part in (q, k, v)]
        assert torch.equal(attend_lines(*still, mask=MASK, dropout=0.0), of_torch(*still, attn_mask=MASK))
    for parts in ([q.float(), k.float(), v.float()], [q.double(), k.double(), v.double()]):
        assert torch.equal(attend_lines(*parts, mask=MASK, dropout=0.0), of_torch(*parts, attn_mask=MASK))
    monkeypatch.setattr(linear, "PLAIN_FRAMES", T - 1)
    assert torch.equal(attend_lines(q, k, v, mask=MASK, dropout=0.0), of_torch(q, k, v, attn_mask=MASK))


def test_dropout_takes_its_share_and_keeps_the_mean() -> None:
    q = k = torch.zeros(1, 1, 400, D, dtype=torch.bfloat16, requires_grad=True)
    v, mask = torch.ones(1, 1, 400, D, dtype=torch.bfloat16), torch.ones(1, 1, 1, 400, dtype=torch.bool)
    torch.manual_seed(1)
    found = attend_lines(q, k, v, mask=mask, dropout=0.25)[0, 0, :, 0].detach().float()
    # 400 weights of 1/400, a quarter of them gone and the others 4/3 as large: a deviation of (3·400)^-½ = 0.029.
    assert float(found.mean()) == pytest.approx(1.0, abs=4 * 0.029 / 20 + UNIT)
    assert 0.015 < float(found.std()) < 0.045
