"""What is computed in less memory is what torch and transformers compute, forwards and backwards, in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sottovoce.models.huggingface.attention import attend_by_distance
from sottovoce.models.huggingface.frozen import corrected_product, frozen_convolution

TOLERANCE = 1e-12  # sums of some dozens of numbers near one, in another order


def draw(*shape: int, seed: int, trained: bool = True) -> Tensor:
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.requires_grad_(trained)


def assert_same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    outer = draw(*found.shape, seed=99, trained=False)
    for own, other in zip(
        torch.autograd.grad(found, leaves, outer), torch.autograd.grad(expected, leaves, outer), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=TOLERANCE, atol=TOLERANCE)


def masks(frames: int) -> dict[str, Tensor | None]:
    """None, what may be looked at, and what is added to scores; the last utterance is shorter."""
    inside = torch.arange(frames) < torch.tensor([frames, frames, frames - 4])[:, None]
    inside_B1TT = (inside[:, None, :] & inside[:, :, None])[:, None]
    added = torch.zeros(inside_B1TT.shape, dtype=torch.float64).masked_fill(~inside_B1TT, -1e9)
    return {"none": None, "inside": inside_B1TT, "added": added}


@pytest.mark.parametrize("mask", ["none", "inside", "added"])
@pytest.mark.parametrize("is_embedding_trained", [True, False])
def test_attention_by_distance(mask: str, is_embedding_trained: bool) -> None:
    batch, heads, frames, left, right = 3, 2, 11, 5, 3
    q, k, v = (draw(batch, frames, heads, 4, seed=seed).transpose(1, 2) for seed in (1, 2, 3))
    embedding = draw(left + right + 1, 4, seed=4, trained=is_embedding_trained)
    places_T = torch.arange(frames)
    places_TT = (places_T - places_T[:, None]).clamp(-left, right) + left
    given = masks(frames)[mask]
    found = attend_by_distance(q, k, v, embedding, places_TT=places_TT, mask=given, scale=0.5)
    bias = torch.einsum("bhqd,qkd->bhqk", q, embedding[places_TT]) * 0.5  # as transformers
    if given is not None:
        least = torch.finfo(torch.float64).min
        bias = bias + given if given.is_floating_point() else torch.where(given, bias, least)
    expected = ((q @ k.mT) * 0.5 + bias).softmax(dim=-1) @ v
    assert_same(found, expected, [q, k, v, *([embedding] if is_embedding_trained else [])])


def test_dropout_of_attention_is_drawn_once() -> None:
    """The way back sees what the way there has drawn: the gradient is that of finite differences."""
    q, k, v = (draw(1, 1, 6, 3, seed=seed) for seed in (1, 2, 3))
    embedding, places_TT = draw(2, 3, seed=4), torch.eye(6, dtype=torch.long)

    def attend(v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend_by_distance(q, k, v, embedding, places_TT=places_TT, mask=None, scale=1.0, dropout=0.5)

    assert torch.autograd.gradcheck(attend, (v,))
    assert not torch.equal(attend(v), attend_by_distance(q, k, v, embedding, places_TT=places_TT, mask=None, scale=1.0))


@pytest.mark.parametrize("trained", ["both", "b"])
@pytest.mark.parametrize("bias", [True, False])
def test_corrected_product(trained: str, bias: bool) -> None:
    clients = 3
    x, weight = draw(clients, 7, 5, seed=1), draw(4, 5, seed=2, trained=False)
    bias_O = draw(4, seed=3, trained=False) if bias else None
    a, b = draw(clients, 2, 5, seed=4, trained=trained == "both"), draw(clients, 4, 2, seed=5)
    found = corrected_product(x, weight, bias_O, a, b)
    expected = functional.linear(x, weight, bias_O) + x @ a.mT @ b.mT
    assert_same(found, expected, [x, b, *([a] if trained == "both" else [])])


@pytest.mark.parametrize(("groups", "stride", "padding", "dilation"), [(1, 2, 0, 1), (4, 1, 2, 1), (2, 3, 1, 2)])
def test_frozen_convolution(groups: int, stride: int, padding: int, dilation: int) -> None:
    x, weight = draw(3, 4, 17, seed=1), draw(8, 4 // groups, 3, seed=2, trained=False)
    how = {"stride": (stride,), "padding": (padding,), "dilation": (dilation,), "groups": groups}
    bias = draw(8, seed=3, trained=False)
    assert_same(frozen_convolution(x, weight, bias, **how), functional.conv1d(x, weight, bias, **how), [x])


def test_frozen_layers_keep_no_inputs() -> None:
    x, kept = draw(2, 4, 9, seed=1), []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        frozen_convolution(
            x, draw(4, 1, 3, seed=2, trained=False), None, stride=(1,), padding=(1,), dilation=(1,), groups=4
        )
        corrected_product(
            x, draw(5, 9, seed=3, trained=False), None, draw(2, 1, 9, seed=4, trained=False), draw(2, 5, 1, seed=5)
        )
    assert all(own.shape != x.shape for own in kept)
